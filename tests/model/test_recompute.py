"""The uncached oracle itself: causal, batched, differentiable; and its draft layer by hand.

Its main model is compared with transformers in tests/engine/test_parity.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.tiny import Tiny
from tests.support.world import SMALL, World, small
from v4graph.model.params import logical_entries, random_params, stack_experts, unstack_experts
from v4graph.model.recompute import Recomputed, RecomputeModel
from v4graph.spec.model import ModelSpec, MtpSpeculation

VARIANTS = {
    "all kinds": replace(SMALL, kinds=("swa", "csa", "hca", "csa"), hash_layers=2),
    "plain residual": replace(SMALL, kinds=("swa", "csa", "hca"), residual="plain"),
    "no yarn": replace(SMALL, yarn=False, hca_ratio=16),
    "one stream": replace(SMALL, streams=1),
}


def forward(world: World, ids: Tensor) -> Recomputed:
    with torch.no_grad():
        return world.model.forward(ids)


def draft_mode(spec: ModelSpec) -> MtpSpeculation:
    mode = spec.speculative["mtp"]
    assert isinstance(mode, MtpSpeculation)
    return mode


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_position_sees_a_later_token(variant: str) -> None:
    """Windows, compressed rows and index choices: the first logits are those of the prefix."""
    world = World(VARIANTS[variant])
    ids = world.ids(61)
    whole = world.oracle(ids)
    for length in (1, 3, 4, 7, 8, 9, 15, 16, 17, 33, 60):
        prefix = world.oracle(ids[:length])
        torch.testing.assert_close(prefix, whole[:length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_recent_token_counts(variant: str) -> None:
    world = World(VARIANTS[variant])
    ids = world.ids(40)
    base = world.oracle(ids)[-1]
    for back in range(1, world.tiny.window + 1):
        other = list(ids)
        other[-back] = 2 + (ids[-back] - 1) % (world.spec.vocab_size - 2)
        assert not torch.allclose(world.oracle(other)[-1], base, atol=1e-4), back


def test_the_window_ends_where_it_should() -> None:
    """`window` tokens, the query's own included, and not one more."""
    world = World(replace(SMALL, kinds=("swa",), hash_layers=0))
    ids = world.ids(40)
    base = world.oracle(ids)[-1]
    for back, counts in ((1, True), (8, True), (9, False), (10, False)):
        other = list(ids)
        other[-back] = 2 + (ids[-back] - 1) % (world.spec.vocab_size - 2)
        assert torch.allclose(world.oracle(other)[-1], base, atol=1e-5) is not counts, back


def test_tokens_beyond_the_window_count_through_compressed_rows_only() -> None:
    """A model of sliding layers forgets; one with compressed layers does not."""
    for kinds, remembers in ((("swa",), False), (("hca",), True), (("csa",), True)):
        world = World(replace(SMALL, kinds=kinds, hash_layers=0, topk=64))
        ids = world.ids(40)
        other = [*world.ids(8, seed=9), *ids[8:]]
        same = torch.allclose(world.oracle(other)[-1], world.oracle(ids)[-1], atol=1e-5)
        assert same is not remembers, kinds


def test_sequences_of_a_batch_do_not_mix() -> None:
    world = small()
    rows = torch.tensor([world.ids(30, seed=s) for s in range(4)])
    together = forward(world, rows)
    for i in range(4):
        alone = forward(world, rows[i : i + 1])
        torch.testing.assert_close(together.logits[i], alone.logits[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(together.streams[i], alone.streams[0], rtol=1e-4, atol=1e-4)


def test_the_same_input_gives_the_same_bits() -> None:
    world = small()
    ids = torch.tensor([world.ids(50)])
    first = forward(world, ids)
    for _ in range(5):
        assert torch.equal(forward(world, ids).logits, first.logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_has_a_gradient(variant: str) -> None:
    """What random parameters leave out, no test of the engine could notice."""
    spec = VARIANTS[variant].spec()
    params = {k: v.clone() for k, v in random_params(spec, seed=1).items()}
    for tensor in params.values():
        if tensor.is_floating_point():
            tensor.requires_grad_()
    model = RecomputeModel(spec, params)
    ids = torch.tensor([World(VARIANTS[variant]).ids(70)])
    main = model.forward(ids)
    draft = model.draft(main.streams[:, :-1], ids[:, 1:], draft_mode(spec))
    (main.logits.square().mean() + draft.logits.square().mean()).backward()
    # Selection is discrete: what only ranks candidates has no gradient.
    ranking = ("indexer.", "gate.bias")
    without = {
        name
        for name, tensor in params.items()
        if tensor.requires_grad and (tensor.grad is None or not tensor.grad.any())
    }
    assert {n for n in without if not any(part in n for part in ranking)} == set()


def test_indexer_and_selection_bias_decide() -> None:
    """The parameters without a gradient do change the output."""
    world = small()
    ids = world.ids(60)
    base = world.oracle(ids)
    for name in ("layers.0.attn.indexer.wq_b.weight", "layers.1.ffn.gate.bias"):
        changed = dict(world.params)
        changed[name] = torch.randn_like(changed[name]) * 2
        with torch.no_grad():
            other = RecomputeModel(world.spec, changed).forward(torch.tensor([ids])).logits[0]
        assert not torch.allclose(other, base, atol=1e-3), name


def drafts(world: World, ids: list[int], mode: MtpSpeculation | None = None) -> Recomputed:
    main = forward(world, torch.tensor([ids]))
    with torch.no_grad():
        return world.model.draft(
            main.streams[:, :-1], torch.tensor([ids[1:]]), mode or draft_mode(world.spec)
        )


def test_a_draft_sees_one_token_more_than_its_row() -> None:
    """Row t takes streams up to t and tokens up to t + 1, nothing later."""
    world = small()
    ids = world.ids(30)
    base = drafts(world, ids).logits[0]
    for place in (1, 5, 17, 29):
        other = list(ids)
        other[place] = 2 + (ids[place] - 1) % (world.spec.vocab_size - 2)
        changed = (drafts(world, other).logits[0] - base).abs().amax(-1) > 1e-5
        assert not changed[: place - 1].any()
        assert changed[place - 1], "the next token is the draft's own input"


def test_draft_inputs_by_hand() -> None:
    """Embedding and streams are normed apart, projected apart, and added on every stream."""
    world, seen = small(), []

    class Recording(RecomputeModel):
        def block(self, p: str, x: Tensor, ids: Tensor, *kinds: Any) -> Tensor:
            seen.append((p, x, ids))
            return super().block(p, x, ids, *kinds)

    ids = torch.tensor([world.ids(12)])
    streams = forward(world, ids).streams[:, :-1]
    model, w = Recording(world.spec, world.params), world.params
    with torch.no_grad():
        model.draft(streams, ids[:, 1:], draft_mode(world.spec))
    ((p, x, block_ids),) = seen
    assert p == "mtp.0"
    assert torch.equal(block_ids, ids[:, 1:])

    def norm(values: Tensor, weight: Tensor) -> Tensor:
        return values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    for t in range(11):
        e = norm(w["embed.weight"][ids[0, t + 1]], w["mtp.0.enorm.weight"])
        e = F.linear(e, w["mtp.0.e_proj.weight"])
        for n in range(world.tiny.streams):
            h = norm(streams[0, t, n], w["mtp.0.hnorm.weight"])
            expected = F.linear(h, w["mtp.0.h_proj.weight"]) + e
            torch.testing.assert_close(x[0, t, n], expected, rtol=1e-4, atol=1e-5)


def test_mask_of_position_zero() -> None:
    """With the mask the first draft does not see its token's embedding; it is off by default."""
    world = small()
    mode = draft_mode(world.spec)
    assert not mode.mask_position_zero
    masked = mode.model_copy(update={"mask_position_zero": True})
    ids = world.ids(20)
    assert not torch.allclose(
        drafts(world, ids, masked).logits[0, 0], drafts(world, ids).logits[0, 0], atol=1e-4
    )
    unseen = RecomputeModel(world.spec, {**world.params})
    zeroed = dict(world.params)
    zeroed["embed.weight"] = world.params["embed.weight"].clone()
    zeroed["embed.weight"][ids[1]] = 0
    main = forward(world, torch.tensor([ids[:2]])).streams[:, :1]
    with torch.no_grad():
        a = unseen.draft(main, torch.tensor([[ids[1]]]), masked).logits
        b = RecomputeModel(world.spec, zeroed).draft(main, torch.tensor([[ids[1]]]), mode).logits
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_is_near_float32(variant: str) -> None:
    tiny = replace(VARIANTS[variant], topk=64)  # all rows: no choice for rounding to change
    spec, world = tiny.spec(), World(tiny)
    half = {
        k: v.bfloat16() if v.is_floating_point() and not _keeps_float32(spec, k) else v
        for k, v in world.params.items()
    }
    ids = torch.tensor([world.ids(24)])
    with torch.no_grad():
        got = RecomputeModel(spec, half).forward(ids)
    assert got.logits.dtype is torch.float32
    assert got.streams.dtype is torch.bfloat16
    exact = forward(world, ids).logits
    error = (got.logits - exact).abs().median() / exact.abs().median()
    assert error < 0.1


def _keeps_float32(spec: ModelSpec, name: str) -> bool:
    """Tensors that the inventory lists as F32 whatever the checkpoint's format."""
    other = spec.model_copy(
        update={
            "weights": spec.weights.model_copy(
                update={"linear": "bf16", "experts": "bf16", "other": "bf16"}
            )
        }
    )
    return name in {e.name for e in logical_entries(other) if e.dtype == "F32"}


def test_experts_stack_and_unstack() -> None:
    params = random_params(Tiny(kinds=("csa",), experts=5).spec(), seed=2)
    flat = dict(unstack_experts(params))
    assert "layers.0.ffn.experts.4.w3.weight" in flat
    again = stack_experts(flat)
    assert again.keys() == params.keys()
    assert all(torch.equal(again[k], params[k]) for k in params)
    gate_up = params["layers.0.ffn.experts.w13"]
    assert torch.equal(flat["layers.0.ffn.experts.3.w1.weight"], gate_up[3, :32])
    assert torch.equal(flat["layers.0.ffn.experts.3.w3.weight"], gate_up[3, 32:])


def test_random_parameters_are_reproducible() -> None:
    spec = SMALL.spec()
    a, b, c = random_params(spec, 1), random_params(spec, 1), random_params(spec, 2)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["embed.weight"], c["embed.weight"])
    table = a["layers.0.ffn.gate.tid2eid"]
    assert 0 <= int(table.min()) <= int(table.max()) < 4
    assert all(len(set(row)) == len(row) for row in table.tolist())
