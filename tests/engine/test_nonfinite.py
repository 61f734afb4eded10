"""A request whose logits become NaN or infinite ends with an error; its company does not notice."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.engine.test_lossless import DRAFTERS, model
from tests.support.prefix import ids
from tests.support.speculation import Session, run
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import FinishReason, SamplingParams

NAN = float("nan")
MODES = ["none", "mtp", "dspark", "ngram"]
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True),
    "ruled": SamplingParams(
        max_tokens=16,
        temperature=0.0,
        min_tokens=9,
        bad_words=((7, 8), (9,)),
        repetition_penalty=1.2,
    ),
}
# Every mode and every kind with overlap and without.
CASES = [
    (mode, kind, bool((i + j) % 2)) for i, mode in enumerate(MODES) for j, kind in enumerate(KINDS)
]
PROMPTS = {"ill": ids(11, 1, 40), "well": ids(19, 2, 40)}


def engine(mode: str, poisoned: int | None = None, overlap: bool = True, **more: Any) -> LLMEngine:
    """An engine whose model turns everything behind the token `poisoned` into NaN."""
    spec, params = model("mtp" if mode == "none" else mode)
    params = dict(params)
    if poisoned is not None:
        params["embed.weight"] = params["embed.weight"].clone()
        params["embed.weight"][poisoned, 0] = NAN
    settings: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 24,
        "max_model_len": 90,
        "compile": False,
        "device": "cpu",
        "speculative": DRAFTERS.get(mode, "none"),
        "overlap": overlap,
        **more,
    }
    return LLMEngine.from_params(spec, params, EngineConfig(**settings))


@cache
def clean(mode: str, kind: str) -> Session:
    return run(engine(mode), PROMPTS, KINDS[kind], record=False)


def fatal_token(mode: str, kind: str) -> int:
    """A token that only the request "ill" ever writes, not as its first one."""
    session = clean(mode, kind)
    ill, well = session.tokens["ill"], session.tokens["well"]
    seen = {*PROMPTS["ill"], *PROMPTS["well"], *well, *ill[:2]}
    return next(token for token in ill[2:-4] if token not in seen)


@pytest.mark.parametrize(("mode", "kind", "overlap"), CASES)
def test_a_fault_while_decoding_ends_its_request_alone(mode: str, kind: str, overlap: bool) -> None:
    fatal = fatal_token(mode, kind)
    together = run(engine(mode, fatal, overlap), PROMPTS, KINDS[kind], record=False)
    assert together.reasons["ill"] is FinishReason.ERROR
    ill = together.tokens["ill"]
    assert ill.index(fatal) == len(ill) - 1
    assert together.reasons["well"] is FinishReason.LENGTH
    well = {"well": PROMPTS["well"]}
    alone = run(engine(mode, fatal, overlap), well, KINDS[kind], record=False)
    assert together.tokens["well"] == alone.tokens["well"]
    if kind != "sampled" or mode == "none":
        # Elsewhere drafts behind the token, which differ, decide what is drawn.
        assert alone.tokens["well"] == clean(mode, kind).tokens["well"]
        assert ill == clean(mode, kind).tokens["ill"][: len(ill)]


@pytest.mark.parametrize(("mode", "kind", "overlap"), CASES)
def test_a_fault_in_a_prompt_ends_its_request_alone(mode: str, kind: str, overlap: bool) -> None:
    fatal = fatal_token(mode, kind)
    prompts = {
        "short": [*PROMPTS["ill"][:4], fatal],
        "well": PROMPTS["well"],
        "chunks": [*ids(40, 4, 40), fatal],
    }
    llm = engine(mode, fatal, overlap)
    together = run(llm, prompts, KINDS[kind], record=False)
    for name in ("short", "chunks"):
        assert together.reasons[name] is FinishReason.ERROR
        assert together.tokens[name] == []
    assert llm.metrics["num_nonfinite_requests"] == 2
    well = {"well": PROMPTS["well"]}
    alone = run(engine(mode, fatal, overlap), well, KINDS[kind], record=False)
    assert together.tokens["well"] == alone.tokens["well"]
    # In slots and pages that held NaN.
    for name in ("again", "more"):
        again = run(llm, {name: PROMPTS["well"]}, KINDS[kind], record=False)
        assert again.tokens[name] == alone.tokens["well"]


@pytest.mark.parametrize("mode", ["mtp", "dspark", "ngram"])
def test_a_rejected_draft_that_makes_nan_is_no_fault(mode: str) -> None:
    fatal = fatal_token(mode, "greedy")
    llm = engine(mode, fatal, overlap=False)
    llm.draft_injector = lambda request: [fatal, fatal]
    well = {"well": PROMPTS["well"]}
    session = run(llm, well, KINDS["greedy"], record=False)
    assert session.tokens["well"] == clean(mode, "greedy").tokens["well"]
    assert session.reasons["well"] is FinishReason.LENGTH


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_one_infinite_logit_is_a_fault(mode: str, kind: str) -> None:
    """Also where it is minus infinity, as bans make it."""
    spec, params = model("mtp" if mode == "none" else mode)
    head = params["head.weight"].clone()
    head[5] = float("inf")
    config = EngineConfig(
        max_model_len=90, compile=False, device="cpu", speculative=DRAFTERS.get(mode, "none")
    )
    llm = LLMEngine.from_params(spec, {**params, "head.weight": head}, config)
    session = run(llm, PROMPTS, KINDS[kind], record=False)
    assert set(session.reasons.values()) == {FinishReason.ERROR}
    assert set(map(tuple, session.tokens.values())) == {()}


def test_a_token_before_the_fault_that_ends_the_text_counts() -> None:
    """Without drafts the request would have ended there."""
    fatal = fatal_token("mtp", "greedy")
    params = replace(KINDS["greedy"], stop_token_ids=(fatal,))
    session = run(engine("mtp", fatal), PROMPTS, params, record=False)
    assert session.reasons["ill"] is FinishReason.STOP
    assert session.tokens["ill"][-1] == fatal


def test_compiled_and_replayed_steps_tell_faults() -> None:
    mode = "none"
    fatal = fatal_token(mode, "greedy")
    llm = engine(
        mode, fatal, compile=True, greedy_only=True, decode_buckets=(3,), prefill_buckets=((24, 3),)
    )
    session = run(llm, PROMPTS, KINDS["greedy"], record=False)
    assert session.reasons == {"ill": FinishReason.ERROR, "well": FinishReason.LENGTH}
    assert session.tokens["well"] == clean(mode, "greedy").tokens["well"]
    assert llm.metrics["num_recompilations"] == 0
