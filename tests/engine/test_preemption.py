"""A preempted request comes back with every token that it was given."""

from __future__ import annotations

import pytest

from tests.engine.test_properties import tight
from tests.engine.test_rounds import tiny_engine
from tests.support.speculation import greedy, run

PROMPT = [3, 4, 5, 9, 8]


def tokens_of(k: int, at: int | None, **more: bool) -> list[int]:
    """Output of a request that loses its pages before step `at`."""
    llm = tiny_engine(k, **more)
    llm.add_request("a", PROMPT, greedy(12))
    out: list[int] = []
    steps = 0
    while llm.has_unfinished():
        if steps == at:
            llm.scheduler.preempt(llm.scheduler.running[0])
        for step in llm.step():
            out += step.token_ids
        steps += 1
        llm.check_integrity()
    return out


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_tokens_in_flight_are_waited_for(k: int, prefix_cache: bool) -> None:
    """With overlap a round's tokens may be unread when its request is preempted: to be computed
    again before they are known would choose them twice."""
    plain = tokens_of(0, None, overlap=False, prefix_cache=False)
    for at in (1, 2, 3, 4):
        assert tokens_of(k, at, overlap=True, prefix_cache=prefix_cache) == plain, at


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_alone_nobody_is_preempted(k: int, overlap: bool, prefix_cache: bool) -> None:
    """A chunk is launched while the pages that the last one no longer needs are still held."""
    llm = tiny_engine(k, overlap=overlap, prefix_cache=prefix_cache)
    tight(llm, 0)
    for length in range(28, 40):
        run(llm, {str(length): [2 + i % 61 for i in range(length)]}, greedy(20))
    assert llm.metrics["num_preemptions"] == 0
