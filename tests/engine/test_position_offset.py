"""`position_offset` moves the rotation of the draft layer's rows, and no draft."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.support.rows import visible_rows
from tests.support.speculation import Session, greedy, run
from tests.support.world import SMALL
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.model.params import random_params
from v4graph.model.recompute import RecomputeModel
from v4graph.model.rope import inverse_frequencies
from v4graph.model.rounds import RoundOracle
from v4graph.ops.rope import cos_sin, rotate
from v4graph.spec.model import ModelSpec, MtpSpeculation

TINY = replace(SMALL, max_len=64)
PROMPTS = {"a": list(range(2, 27)), "b": [5, 9, 60, 7]}


@cache
def spec(offset: int) -> ModelSpec:
    data = TINY.data()
    data["speculative"]["mtp"] |= {"position_offset": offset, "mask_position_zero": True}
    return ModelSpec.model_validate(data)


@cache
def params() -> dict[str, Tensor]:
    return random_params(spec(0), 5)


def mtp(offset: int) -> MtpSpeculation:
    mode = spec(offset).speculative["mtp"]
    assert isinstance(mode, MtpSpeculation)
    return mode


@cache
def served(offset: int) -> tuple[Session, dict[tuple[str, int], Tensor]]:
    """A run, and the draft layer's rows by (request, position) as they were last seen."""
    config = EngineConfig(
        max_num_seqs=2,
        max_num_batched_tokens=16,
        compile=False,
        checked=True,
        device="cpu",
        greedy_only=True,
        overlap=False,
        speculative="mtp",
        num_draft_tokens=3,
    )
    llm = LLMEngine.from_params(spec(offset), dict(params()), config)
    rows: dict[tuple[str, int], Tensor] = {}

    def keep(_: int) -> None:
        for request in llm.scheduler.running:
            for (block, _, _, position), row in visible_rows(llm, request).items():
                if block == "mtp":
                    rows[request.request_id, position] = row

    return run(llm, PROMPTS, greedy(24), every_step=keep), rows


def turned(row: Tensor, by: int) -> Tensor:
    """A cached row rotated `by` positions further."""
    rope = spec(0).rope["main"]
    cos, sin = cos_sin(torch.tensor([by]), inverse_frequencies(rope))
    return rotate(row, cos[0], sin[0])


def test_rows_are_rotated_one_position_further() -> None:
    (_, plain), (_, shifted) = served(0), served(1)
    assert plain.keys() == shifted.keys()
    assert len(plain) > 40
    for key, row in plain.items():
        torch.testing.assert_close(shifted[key], turned(row, 1), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(shifted[key], row, atol=1e-2)


def test_no_draft_and_no_token_differs() -> None:
    (plain, _), (shifted, _) = served(0), served(1)
    assert plain.tokens == shifted.tokens
    for name, rounds in plain.rounds.items():
        assert [r.drafts for r in rounds] == [r.drafts for r in shifted.rounds[name]]


@pytest.mark.parametrize("offset", [0, 1])
def test_the_oracle_obeys_it(offset: int) -> None:
    """Its rows are the engine's, and so are its drafts."""
    session, rows = served(offset)
    kept: list[Tensor] = []

    class Keeping(RecomputeModel):
        def attend(self, q: Tensor, kv: Tensor, *more: object) -> Tensor:
            kept.append(kv)
            return super().attend(q, kv, *more)  # type: ignore[arg-type]

    model = Keeping(spec(offset), params())
    assert session.differences(RoundOracle(model, mtp(offset))) == []
    for name, prompt in PROMPTS.items():
        ids = torch.tensor([[*prompt, *session.tokens[name]]])
        with torch.no_grad():
            streams = model.forward(ids).streams[:, :-1]
            model.draft_streams(streams, ids[:, 1:], mtp(offset))
        own = {p: row for (request, p), row in rows.items() if request == name}
        # The last rounds' rows may stand for tokens behind the end of the output.
        for position in sorted(own)[:-4]:
            torch.testing.assert_close(own[position], kept[-1][0, position], rtol=1e-3, atol=1e-4)


def test_pairing_with_the_row_s_own_token_is_another_layer() -> None:
    """What `token_shift` 0 of the oracle shows: other drafts, unlike an offset."""
    session, _ = served(0)
    model = RecomputeModel(spec(0), params())
    ids = [*PROMPTS["a"], *session.tokens["a"]]
    known = range(26, 46)
    drafts = RoundOracle(model, mtp(0)).drafts(ids, known, 2)
    assert RoundOracle(model, mtp(1)).drafts(ids, known, 2) == drafts
    assert RoundOracle(model, mtp(0), token_shift=0).drafts(ids, known, 2) != drafts
