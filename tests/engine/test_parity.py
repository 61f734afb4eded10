"""Every engine path against transformers: whole, chunked, decoded, ragged; float32, <= 1e-4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support import hf
from tests.support.runner import Runner, relative_error, top2_gap
from tests.support.tiny import SHAPES, Tiny
from v4graph.model.params import random_params
from v4graph.model.recompute import RecomputeModel
from v4graph.plan.types import Limits, Mode

BOUND = 1e-4
LENGTH = 300  # more than twice the largest ratio
CHUNKS = (1, 3, 4, 5, 127, 128, 129)


class Case:
    """One configuration with its oracle logits over a fixed sequence."""

    def __init__(self, name: str, directory: Path) -> None:
        self.tiny: Tiny = SHAPES[name]
        self.spec = self.tiny.spec()
        self.params = random_params(self.spec, seed=len(name))
        hf.write_checkpoint(self.spec, self.params, directory)
        self.model = hf.load(directory)
        gen = torch.Generator().manual_seed(7)
        self.ids = torch.randint(2, self.spec.vocab_size, (LENGTH,), generator=gen).tolist()
        self.oracle = self.hf_logits(self.ids)

    def hf_logits(self, ids: list[int]) -> Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0]

    def runner(self, seqs: int, tokens: int, compiled: bool = False) -> Runner:
        limits = Limits(
            max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=LENGTH + 260
        )
        return Runner(self.spec, self.params, limits, compiled)


@pytest.fixture(scope="module", params=sorted(SHAPES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


class _EdgeGaps(RecomputeModel):
    """Records the score gap at the edge of every top-k selection."""

    smallest = float("inf")

    def index_scores(self, *args: object) -> Tensor:  # type: ignore[override]
        scores = super().index_scores(*args)  # type: ignore[arg-type]
        topk = args[1].indexer.topk  # type: ignore[attr-defined]
        ratio = self.spec.cache_groups[args[1].caches.index].ratio  # type: ignore[attr-defined]
        for t in range(scores.shape[1]):
            visible = scores[0, t, : (t + 1) // ratio].sort(descending=True).values
            if len(visible) > topk:
                self.smallest = min(self.smallest, float(visible[topk - 1] - visible[topk]))
        return scores


def test_no_tie_at_the_selection_edge(case: Case) -> None:
    """Parity is only decidable where the oracle's own choice is: ReLU can make exact ties."""
    model = _EdgeGaps(case.spec, case.params)
    logits = model.forward(torch.tensor([case.ids])).logits[0]
    assert model.smallest > 1e-7
    assert relative_error(logits, case.oracle) <= BOUND


def test_whole_prefill_at_every_boundary(case: Case) -> None:
    t = case.tiny
    edges = {t.window, t.csa_ratio, t.hca_ratio, t.page_tokens, 64, 128, 2 * t.hca_ratio}
    lengths = sorted(
        {n for n in range(1, 10)}
        | {e + d for e in edges for d in (-1, 0, 1) if 1 <= e + d <= LENGTH}
        | {LENGTH}
    )
    runner = case.runner(seqs=1, tokens=LENGTH)
    for n in lengths:
        request = runner.add(case.ids[:n])
        error = relative_error(runner.step([(request, n)])[0], case.oracle[n - 1])
        assert error <= BOUND, f"length {n}: {error}"
        runner.drop(request)


def test_chunked_prefill_in_one_ragged_batch(case: Case) -> None:
    """Requests that advance by 1, 3, 4, 5, 127, 128 and 129 tokens share every step."""
    runner = case.runner(seqs=len(CHUNKS), tokens=sum(CHUNKS))
    requests = {chunk: runner.add(case.ids) for chunk in CHUNKS}
    for _ in range(60):
        batch = [
            (r, min(chunk, LENGTH - r.num_computed_tokens))
            for chunk, r in requests.items()
            if r.num_computed_tokens < LENGTH
        ]
        logits = runner.step(batch)
        for (request, _n), row in zip(batch, logits, strict=True):
            at = request.num_computed_tokens
            error = relative_error(row, case.oracle[at - 1])
            assert error <= BOUND, f"position {at}: {error}"


def test_each_chunk_size_alone(case: Case) -> None:
    for chunk in CHUNKS[1:]:
        runner = case.runner(seqs=1, tokens=chunk)
        request = runner.add(case.ids)
        length = LENGTH if chunk > 100 else 140
        while request.num_computed_tokens < length:
            n = min(chunk, length - request.num_computed_tokens)
            row = runner.step([(request, n)])[0]
            at = request.num_computed_tokens
            assert relative_error(row, case.oracle[at - 1]) <= BOUND, f"chunk {chunk} at {at}"


def test_decode_200_tokens(case: Case) -> None:
    """Greedy cached decode; then the oracle reads the whole text at once."""
    runner = case.runner(seqs=1, tokens=128)
    request = runner.add(case.ids[:37])
    rows = [runner.step([(request, 37)])[0].clone()]
    for _ in range(200):
        rows.append(runner.step([(request, 1)], Mode.DECODE)[0].clone())
    oracle = case.hf_logits(request.token_ids[:-1])[36:]
    for i, (row, expected) in enumerate(zip(rows, oracle, strict=True)):
        error = relative_error(row, expected)
        assert error <= BOUND, f"decoded token {i}: {error}"
        same = int(row.argmax()) == int(expected.argmax())
        assert same or top2_gap(expected) < 1e-4, f"token {i} differs at gap {top2_gap(expected)}"


def test_ragged_batch_with_joins_and_leaves(case: Case) -> None:
    """Five requests decode and prefill side by side while others come and go."""
    runner = case.runner(seqs=6, tokens=256)
    lengths = (1, 9, 40, 129, 65)
    live = {runner.add(case.ids[i : i + n]): i for i, n in enumerate(lengths)}
    done = []
    for turn in range(30):
        prefill = [
            (r, min(50, r.num_tokens - r.num_computed_tokens)) for r in live if r.is_prefilling
        ]
        # Decoding requests ride along in the prefill step on every third turn.
        decoding = [(r, 1) for r in live if r not in dict(prefill)]
        if prefill:
            runner.step(prefill + (decoding if turn % 3 == 0 else []))
        if decoding and turn % 3 != 0:
            runner.step(decoding, Mode.DECODE)
        if turn in (8, 15, 22):
            leaver = next(iter(live))
            done.append((leaver, live.pop(leaver)))
            runner.drop(leaver)
            live[runner.add(case.ids[turn : turn + 2 * turn])] = turn
    done += list(live.items())
    for request, _start in done:
        computed = request.token_ids[: request.num_computed_tokens]
        oracle = case.hf_logits(computed)
        for at in range(request.num_prompt_tokens, len(computed) + 1):
            expected = oracle[at - 1]
            token = request.token_ids[at] if at < request.num_tokens else None
            if token is not None:
                gap = top2_gap(expected)
                assert token == int(expected.argmax()) or gap < 1e-4, f"{at}: gap {gap}"
    runner.pages.check_integrity(list(live))
