"""The acceptance gap is zero: every draft, accepted count and token of v4-nano's rounds equals a
recompute without any cache."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import nano
from tests.support.speculation import Session, greedy, run
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.rounds import DraftCounts
from v4graph.model.ngram_recompute import search
from v4graph.model.rounds import EngineRound, RoundOracle
from v4graph.ops.ngram import lookup
from v4graph.spec.model import NgramSpeculation

NEW = 20
LENGTHS = (3, 64, 31, 129, 12, 33)


def engine(k: int, **more: Any) -> LLMEngine:
    config: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 37,
        "max_model_len": 192,
        "compile": False,
        "checked": True,
        "device": "cpu",
        "greedy_only": True,
        "speculative": "mtp" if k else "none",
        "num_draft_tokens": k or None,
        **more,
    }
    return LLMEngine.from_params(nano.spec(), dict(nano.params()), EngineConfig(**config))


def prompts() -> dict[str, list[int]]:
    return {str(len(ids)): ids for ids in nano.prompts(*LENGTHS)}


def oracle() -> RoundOracle:
    return RoundOracle(nano.oracle(), nano.mtp())


@cache
def plain() -> dict[str, list[int]]:
    """Tokens without speculation."""
    return run(engine(0), prompts(), greedy(NEW)).tokens


def assert_no_gap(session: Session) -> None:
    assert session.differences(oracle()) == []
    assert session.num_accepted > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_no_gap_in_batches_of_mixed_lengths(k: int, overlap: bool) -> None:
    """More requests than slots: they join and leave; prompts are prefilled in chunks."""
    session = run(engine(k, overlap=overlap), prompts(), greedy(NEW))
    assert session.tokens == plain()
    assert_no_gap(session)


@pytest.mark.parametrize("k", [2, 5])
def test_no_gap_with_late_joins_and_aborts(k: int) -> None:
    session = run(
        engine(k),
        prompts(),
        greedy(NEW),
        join={"31": 4, "12": 7, "33": 11},
        abort={"64": 9, "33": 14},
    )
    for name, tokens in session.tokens.items():
        if name in session.reasons:
            assert tokens == plain()[name]
        else:
            assert tokens == plain()[name][: len(tokens)]
    assert session.reasons.keys() == {"3", "31", "129", "12"}
    assert_no_gap(session)


@pytest.mark.parametrize("overlap", [False, True])
def test_no_gap_through_preemptions(overlap: bool) -> None:
    """Pages for one sequence and a little of another: requests lose theirs and come back."""
    llm = engine(4, overlap=overlap)
    for pool in llm.pages.pools.values():
        keep = pool.group.pages_per_seq + 2
        del pool._free[: pool.num_free - keep]
        pool.group = replace(pool.group, num_pages=keep + 1)
    many = {f"p{i}": ids for i, ids in enumerate(nano.prompts(118, 120, 122, 124, 126))}
    session = run(llm, many, greedy(NEW))
    assert session.tokens == run(engine(0), many, greedy(NEW)).tokens
    assert_no_gap(session)
    assert llm.metrics["num_preemptions"] > 0


def test_counts_are_those_of_the_rounds() -> None:
    llm = engine(3)
    session = run(llm, prompts(), greedy(NEW))
    counts, records = llm.draft_counts, [r for own in session.rounds.values() for r in own]
    assert (counts.rounds, counts.drafts) == (len(records), session.num_drafts)
    assert counts.accepted == session.num_accepted
    for i in range(3):
        assert counts.accepted_at[i] == sum(len(r.tokens) > i + 1 for r in records)
    metrics = llm.metrics
    assert metrics["num_rounds"] == counts.rounds
    assert metrics["draft_tokens"] == counts.drafts
    assert metrics["accepted_draft_tokens"] == counts.accepted


def test_three_rates_under_three_names() -> None:
    """A published run at k = 3: 2.8447 tokens a round, approximate rate 0.6485; its draft
    acceptance was 0.615."""
    counts = DraftCounts()
    for accepted, rounds in ((3, 4000), (2, 2447), (1, 1553), (0, 2000)):
        for _ in range(rounds):
            counts.add(3, accepted)
    assert counts.tokens_per_round == pytest.approx(2.8447)
    assert counts.approximate_rate == pytest.approx(0.6485, abs=5e-5)
    assert counts.draft_acceptance == pytest.approx(0.615, abs=5e-4)
    assert counts.accepted_at == [8000, 6447, 4000]


# The oracle itself ---------------------------------------------------------------------------


def test_the_oracle_tells_a_wrong_draft_count_and_token() -> None:
    session = run(engine(3), {"31": prompts()["31"]}, greedy(NEW))
    records = session.rounds["31"]
    full = [*session.prompts["31"], *session.tokens["31"]]
    full = [*full[: records[-1].num_tokens], *records[-1].tokens]
    rounds = [EngineRound(r.num_tokens, tuple(r.drafts), tuple(r.tokens)) for r in records]
    assert oracle().check(full, rounds) == []
    some = next(r for r in rounds if len(r.tokens) > 1)

    def told(changed: EngineRound) -> set[str]:
        return {d.where for d in oracle().check(full, [changed]) if d.gap >= 1e-4}

    n, drafts, tokens = some.num_tokens, some.drafts, some.tokens
    assert told(some) == set()
    assert told(EngineRound(n, ((drafts[0] + 1) % 4096, *drafts[1:]), tokens)) >= {"draft", "count"}
    assert told(EngineRound(n, (*drafts[:-1], (drafts[-1] + 1) % 4096), tokens)) >= {"draft"}
    assert told(EngineRound(n, drafts, (*tokens[:-1], (tokens[-1] + 1) % 4096))) >= {"token"}
    assert told(EngineRound(n, drafts, tokens[:-1])) == {"count"}


def test_the_oracle_drafts_like_a_loop_over_whole_sequences() -> None:
    """Branches batched over lengths, against one forward a step over one sequence."""
    ids, known, k = list(nano.prompts(90)[0]), [2, 3, 40, 66, 89], 4
    model, mode = nano.oracle(), nano.mtp()
    expected = []
    with torch.no_grad():
        for n in known:
            streams = model.forward(torch.tensor([ids])).streams[:, : n - 1]
            tokens, drafts = list(ids[:n]), []
            for _ in range(k):
                out = model.draft(streams, torch.tensor([tokens[1:]]), mode)
                drafts.append(int(out.logits[0, -1].argmax()))
                streams = torch.cat((streams, out.streams[:, -1:]), dim=1)
                tokens.append(drafts[-1])
            expected.append(drafts)
    assert oracle().drafts(ids, known, k) == expected
    assert RoundOracle(model, mode, max_rows=1).drafts(ids, known, k) == expected


def recorded(llm: LLMEngine, ids: list[int]) -> tuple[list[int], list[EngineRound]]:
    """A request's tokens, all of its last round included, and its rounds."""
    session = run(llm, {"a": ids}, greedy(NEW))
    rounds = [
        EngineRound(r.num_tokens, tuple(r.drafts), tuple(r.tokens)) for r in session.rounds["a"]
    ]
    full = [*ids, *session.tokens["a"]]
    return [*full[: rounds[-1].num_tokens], *rounds[-1].tokens], rounds


def ngram() -> NgramSpeculation:
    mode = nano.spec().speculative["ngram"]
    assert isinstance(mode, NgramSpeculation)
    return mode


@pytest.mark.parametrize(("name", "k"), [("mtp", 3), ("ngram", 4)])
def test_own_rounds_are_the_engines_up_to_the_end_of_the_context(name: str, k: int) -> None:
    llm = engine(k, speculative=name, max_model_len=64)
    full, rounds = recorded(llm, nano.prompts(50)[0])
    assert min(len(r.drafts) for r in rounds) < k
    drafter = oracle() if name == "mtp" else RoundOracle(nano.oracle(), ngram())
    differences, own = drafter.compare(full, rounds, k, 64)
    assert differences == []
    assert [(r.drafts, r.tokens) for r in own] == [(r.drafts, r.tokens) for r in rounds]


def test_own_rounds_go_their_own_way() -> None:
    """Behind a token that the recompute would not have chosen, and whatever the engine drafted."""
    full, rounds = recorded(engine(3), prompts()["31"])
    r = next(r for r in rounds if len(r.tokens) == 4)
    n = r.num_tokens
    wrong = EngineRound(n, ((r.drafts[0] + 1) % 4096, *r.drafts[1:2]), r.tokens)
    other = [*full[:n], (full[n] + 1) % 4096, *full[n + 1 :]]
    differences, own = oracle().compare(other, [wrong], 3, 192)
    assert [(o.drafts, o.tokens) for o in own] == [(r.drafts, r.tokens)]
    assert {d.where for d in differences if d.gap >= 1e-4} >= {"draft", "num_drafts"}


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=24),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(0, 2),
)
@settings(max_examples=200, deadline=None)
def test_the_search_drafts_like_the_operator(ids: list[int], k: int, least: int, more: int) -> None:
    mode = ngram().model_copy(update={"min_ngram": least, "max_ngram": least + more})
    drafts, count = lookup(torch.tensor([ids]), torch.tensor([len(ids)]), k, least, least + more)
    assert search(ids, k, mode) == drafts[0, : count[0]].tolist()


def test_the_oracle_tells_wrong_lookups() -> None:
    ids = [5, 6, 7, 8, 5, 6, 9, 5, 6]
    drafter = RoundOracle(nano.oracle(), ngram())

    def told(drafts: tuple[int, ...]) -> list[tuple[str, int, int, int]]:
        token = drafter.own_rounds(ids, [len(ids)], 2, 192)[0].tokens[0]
        rounds = [EngineRound(len(ids), drafts, (token,))]
        differences, _ = drafter.compare([*ids, token], rounds, 2, 192)
        return [(d.where, d.index, d.expected, d.found) for d in differences]

    assert told((9, 5)) == []
    assert told((7, 5)) == [("draft", 0, 9, 7)]
    assert told((9,)) == [("num_drafts", 0, 2, 1)]
    assert told((9, 5, 6, 0)) == [("draft", 3, -1, 0), ("num_drafts", 0, 2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("k", range(1, 9))
def test_no_gap_at_length(k: int) -> None:
    """64 held-out prompts x 200 tokens."""
    lengths = [4 + (i * 37) % 157 for i in range(64)]
    many = {f"p{i}": ids for i, ids in enumerate(nano.prompts(*lengths))}
    llm = engine(k, max_num_seqs=8, max_model_len=384, checked=False, compile=True)
    assert_no_gap(run(llm, many, greedy(200)))
