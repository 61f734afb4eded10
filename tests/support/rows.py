"""Page pools as the tests see them: rows by position, through the requests' own page maps."""

from __future__ import annotations

from torch import Tensor

from v4graph.engine.engine import LLMEngine
from v4graph.engine.request import Request

Key = tuple[str, int, str, int]
"""(`layers` or `mtp`, layer, cache role, position that the row stands for)."""


def visible_rows(llm: LLMEngine, request: Request) -> dict[Key, Tensor]:
    """A dump of every row that the request's next query may read, by position."""
    out = {}
    computed, known = request.num_computed_tokens, request.num_tokens
    for block, layer, role, name, pool in llm.programs.state.all_pools():
        g = llm.plan.group(name)
        if g.kept_tokens:
            final = computed
            if block == "mtp" and layer.index:
                # A chained layer's newest rows rest on drafts and are computed again.
                final = max(min(computed, known - 1 - layer.index), 0)
            # Up to the next closing window; for windows of tokens that is the next token's own.
            # Behind a cached prefix nothing else is there.
            closing = (final // g.closes_every + 1) * g.closes_every
            positions = range(max(closing - g.span, 0), final)
        else:
            positions = range(0, computed // g.ratio * g.ratio, g.ratio)
        for p in positions:
            page = request.pages[name][p // g.page_tokens]
            row = pool[page * g.page_rows + p % g.page_tokens // g.ratio]
            out[block, layer.index, role, p] = row.clone()
    return out


def difference(rows: dict[Key, Tensor], reference: dict[Key, Tensor]) -> float:
    """The largest difference between rows and their reference, relative to the row's size."""
    worst = 0.0
    for key, row in rows.items():
        other = reference.get(key)
        if other is None:
            return float("inf")  # a position that plain decoding never reached
        scale = float(other.abs().max()) or 1.0
        error = float((row - other).abs().max()) / scale
        worst = worse(worst, error)
    return worst


def worse(a: float, b: float) -> float:
    """The larger of two differences; NaN is worse than anything, whichever comes first."""
    return a if a != a or b <= a else b
