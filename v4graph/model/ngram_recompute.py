"""Prompt lookup by search in plain Python: drafts of an `ngram` mode for the oracle of the tests.

Written from the definition alone, so that it can tell a fault of the operator's (`ops/ngram.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from v4graph.spec.model import NgramSpeculation


def search(known: Sequence[int], k: int, mode: NgramSpeculation) -> list[int]:
    """At most `k` drafts behind the known tokens; none without an occurrence.

    The n-gram that ends `known` is looked for earlier in it: the longest that occurs, of
    `min_ngram` to `max_ngram` tokens, and of its occurrences the most recent. The drafts are the
    known tokens behind that one.
    """
    ids = list(known)
    for size in range(mode.max_ngram, mode.min_ngram - 1, -1):
        # From the latest end of an earlier occurrence to the first that has room before it.
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[-size:]:
                return ids[end : end + k]
    return []
