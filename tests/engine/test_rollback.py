"""Rejected drafts leave no trace: after any pattern of right and wrong drafts, every row that a
later query can read is the one that plain decoding leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.support.rows import Key, difference, visible_rows, worse
from tests.support.tiny import Tiny
from v4graph.engine import engine as engine_module
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.pools import IntegrityError
from v4graph.engine.request import Request, SamplingParams
from v4graph.engine.rounds import RoundRecord
from v4graph.errors import ProgramError
from v4graph.model.params import random_params
from v4graph.plan.lower import lower
from v4graph.plan.types import Limits, Plan
from v4graph.spec.model import ModelSpec

TOLERANCE = 1e-4
NEW = 20
PROMPTS = tuple(range(1, 10))
"""Every residue of the ratios 4 and 8 and of the window of 8, on both sides of one of each; the
rounds then pass over two more of each."""
TINY = Tiny(
    kinds=("csa", "hca"),
    window=8,
    topk=4,
    head_dim=16,
    rope_dim=8,
    index_heads=16,
    index_dim=16,
    hash_layers=1,
    hidden=32,
    experts=4,
    vocab=64,
    max_len=64,
)


@cache
def spec_of(page_tokens: int, layers: int = 1) -> ModelSpec:
    """Pages of one row make every ring exactly as long as it must be; `layers` MTP layers."""
    data = replace(TINY, page_tokens=page_tokens).data()
    data["speculative"]["mtp"]["num_layers"] = layers
    for group in data["cache_groups"].values():
        if group["kind"] == "compressor_state":
            group["page_tokens"] = page_tokens
    return ModelSpec.model_validate(data)


@cache
def params(layers: int = 1) -> dict[str, Tensor]:
    return random_params(spec_of(8, layers), 5)


def prompt(length: int) -> list[int]:
    gen = torch.Generator().manual_seed(length)
    return torch.randint(2, TINY.vocab, (length,), generator=gen).tolist()


def engine(page_tokens: int, k: int, chunk: int = 9, layers: int = 1) -> LLMEngine:
    config = EngineConfig(
        max_num_seqs=len(PROMPTS),
        max_num_batched_tokens=chunk,
        compile=False,
        checked=True,
        device="cpu",
        speculative="mtp" if k else "none",
        num_draft_tokens=k or None,
        overlap=False,
    )
    return LLMEngine.from_params(spec_of(page_tokens, layers), dict(params(layers)), config)


Observer = Callable[[Request], None]


def run(llm: LLMEngine, observe: Observer) -> dict[int, list[int]]:
    """All prompts at once; `observe` sees each running request after every step."""
    for n in PROMPTS:
        wanted = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
        llm.add_request(str(n), prompt(n), wanted)
    out: dict[int, list[int]] = {n: [] for n in PROMPTS}
    while llm.has_unfinished():
        for step in llm.step():
            out[int(step.request_id)] += step.token_ids
        for request in llm.scheduler.running:
            observe(request)
    llm.check_integrity()
    return out


class Reference:
    """Plain decoding: the tokens, and every row by prompt length and position.

    Rows of draft layers come from rounds of one draft a layer, all of them always wrong.
    """

    def __init__(self, layers: int = 1) -> None:
        self.rows: dict[int, dict[Key, Tensor]] = {n: {} for n in PROMPTS}
        # One token a step: every row is seen while it is visible.
        plain = engine(8, 0, chunk=1, layers=layers)
        self.tokens = run(plain, lambda r: self.keep(plain, r))
        single = engine(8, layers, chunk=1, layers=layers)
        single.draft_injector = lambda r: [self.wrong(r, i) for i in range(layers)]
        assert run(single, lambda r: self.keep(single, r)) == self.tokens

    def keep(self, llm: LLMEngine, request: Request) -> None:
        mine = self.rows[int(request.request_id)]
        for key, row in visible_rows(llm, request).items():
            mine.setdefault(key, row)

    def right(self, request: Request, ahead: int) -> int:
        """The token that plain decoding writes `ahead` places behind the known ones."""
        tokens = self.tokens[int(request.request_id)]
        place = request.num_generated_tokens + ahead
        return tokens[place] if place < len(tokens) else 2

    def wrong(self, request: Request, ahead: int) -> int:
        return (self.right(request, ahead) + 1) % TINY.vocab


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def check_pattern(
    reference: Reference,
    llm: LLMEngine,
    pattern_of: Callable[[Request], tuple[bool, ...]],
) -> float:
    """Force a pattern of right and wrong drafts on every round; the worst row difference."""

    def inject(request: Request) -> list[int]:
        pattern = pattern_of(request)
        return [
            (reference.right if good else reference.wrong)(request, i)
            for i, good in enumerate(pattern)
        ]

    worst = 0.0

    def observe(request: Request) -> None:
        nonlocal worst
        if request.num_computed_tokens == 0:
            return
        error = difference(visible_rows(llm, request), reference.rows[int(request.request_id)])
        worst = worse(worst, error)

    llm.draft_injector = inject
    whole: list[tuple[int, int]] = []

    def record(r: RoundRecord) -> None:
        # Behind the reference's last token nothing is known to be right.
        if r.num_tokens + len(r.drafts) < int(r.request_id) + NEW:
            pattern = [d == reference_token(reference, r, i) for i, d in enumerate(r.drafts)]
            whole.append((leading(tuple(pattern)), len(r.tokens) - 1))

    llm.recorder = record
    assert run(llm, observe) == reference.tokens
    assert len(whole) > len(PROMPTS)
    assert all(expected == accepted for expected, accepted in whole)
    return worst


def reference_token(reference: Reference, r: RoundRecord, ahead: int) -> int:
    """What plain decoding writes `ahead` places behind the tokens known to a round."""
    length = int(r.request_id)
    return reference.tokens[length][r.num_tokens - length + ahead]


def leading(pattern: tuple[bool, ...]) -> int:
    """Drafts that a pattern gets accepted."""
    return next((i for i, good in enumerate(pattern) if not good), len(pattern))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("page_tokens", [1, 8])
def test_every_pattern(k: int, page_tokens: int, reference: Reference) -> None:
    """Page for page on visible rows, whatever was accepted, at every residue of every boundary."""
    llm = engine(page_tokens, k)
    for pattern in product((True, False), repeat=k):
        assert check_pattern(reference, llm, lambda r, p=pattern: p) < TOLERANCE, pattern


@pytest.mark.parametrize(("page_tokens", "k"), [(1, 5), (1, 8), (8, 8)])
def test_two_windows_closing_in_one_verification(
    page_tokens: int, k: int, reference: Reference
) -> None:
    """More drafts than the ratio: windows close behind windows, accepted up to any place."""
    llm = engine(page_tokens, k)
    for right in range(k + 1):
        pattern = tuple(i < right for i in range(k))
        assert check_pattern(reference, llm, lambda r, p=pattern: p) < TOLERANCE, right


@pytest.mark.parametrize("k", [3, 8])
def test_rejection_in_some_rows_of_a_batch(k: int, reference: Reference) -> None:
    """Each request and round has a pattern of its own."""
    llm = engine(1, k)
    patterns = list(product((True, False), repeat=k))

    def own(request: Request) -> tuple[bool, ...]:
        return patterns[(31 * int(request.request_id) + 7 * request.num_tokens) % len(patterns)]

    assert check_pattern(reference, llm, own) < TOLERANCE
    one = PROMPTS[3]
    for rejected in (True, False):

        def alone(request: Request, rejected: bool = rejected) -> tuple[bool, ...]:
            return ((int(request.request_id) == one) != rejected,) * k

        assert check_pattern(reference, llm, alone) < TOLERANCE


# Several MTP layers --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chained() -> Reference:
    """What plain decoding leaves in each of three MTP layers."""
    return Reference(3)


def test_every_pattern_of_a_chain(chained: Reference) -> None:
    """Rows of every layer that rest on drafts are computed again once these are decided."""
    llm = engine(1, 3, layers=3)
    for pattern in product((True, False), repeat=3):
        assert check_pattern(chained, llm, lambda r, p=pattern: p) < TOLERANCE, pattern


def test_leading_drafts_of_a_chain(chained: Reference) -> None:
    """More drafts than layers: the last layer goes on, its guesses behind the known rows."""
    llm = engine(1, 5, layers=3)
    for right in (0, 1, 3, 5):
        pattern = tuple(i < right for i in range(5))
        assert check_pattern(chained, llm, lambda r, p=pattern: p) < TOLERANCE, right


# Rings ---------------------------------------------------------------------------------------


def shortened(name: str, by: int) -> Callable[[ModelSpec, Limits], Plan]:
    """Lowering to a plan with a shorter ring, which nobody verifies."""

    def short(spec: ModelSpec, limits: Limits) -> Plan:
        plan = lower(spec, limits)
        groups = tuple(
            replace(g, table_width=g.table_width - by) if g.name == name else g for g in plan.groups
        )
        return replace(plan, groups=groups)

    return short


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", ["window", "csa_state", "index_state", "hca_state"])
def test_one_row_less_loses_rows(
    name: str, k: int, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rings are no longer than needed: one row less, and rows or tokens are other ones."""

    def worst() -> float:
        return check_pattern(reference, engine(1, k, chunk=1), lambda r: (False,) * k)

    assert worst() < TOLERANCE
    monkeypatch.setattr(engine_module, "lower", shortened(name, 1))
    with pytest.raises((AssertionError, IntegrityError, ProgramError)):
        assert worst() < TOLERANCE
