"""The bytes that a decoding round must read: the floor of its time on a given memory.

Counted are weights as the checkpoint stores them (each matrix once for every forward, of the routed
experts those that somebody chose) and cache rows that queries read. Left out are activations, rows
written, metadata and compressor states: little beside these.

With T tokens that choose K of E experts at random, `E (1 - (1 - K / E)^T)` are chosen by some.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from v4graph.plan.types import LayerPlan, Mode, Plan
from v4graph.plan.weights import DTYPE_BYTES, TensorEntry, head_tensor, inventory
from v4graph.spec.model import DenseFfn, ModelSpec, SparseAttention

_EXPERT = re.compile(r"\.ffn\.experts\.\d+\.")


@dataclass(frozen=True)
class TrafficLine:
    """One part of a round's reading."""

    part: str
    """`attention.<entry>`, `ffn.<entry>`, `experts.<entry>`, `rows.<group>`, `embed` or `head`;
    `mtp.` before it where draft layers read it."""
    num_bytes: int


def experts_touched(experts: int, topk: int, tokens: int) -> float:
    """How many different experts so many tokens choose, on average, if all are equally likely."""
    return experts * (1 - (1 - topk / experts) ** tokens)


def round_traffic(
    spec: ModelSpec, plan: Plan, num_reqs: int, context: int
) -> tuple[TrafficLine, ...]:
    """What a decoding round of `num_reqs` requests must read, draft layers included.

    Args:
        context: tokens of each request, the newest included.
    """
    sizes = _Sizes(spec)
    out: Counter[str] = Counter()
    bucket = min(
        (b for b in plan.mode(plan.decode_mode).buckets if b.num_reqs >= num_reqs),
        key=lambda b: b.num_reqs,
    )
    for stage in plan.stages(plan.decode_mode, bucket):
        width = max(stage.bucket.tokens_per_req, 1)
        tokens = num_reqs * width
        drafting = plan.mode(stage.mode).layers == "draft"
        block, layers = ("mtp", plan.speculation.layers) if drafting else ("layers", plan.layers)
        prefix = "mtp." if drafting else ""
        own: Counter[str] = Counter()
        for layer in layers:
            own.update(sizes.layer(block, layer, tokens))
            own.update(_rows(spec, plan, layer, num_reqs, context))
        logits = num_reqs if drafting or stage.mode is Mode.DECODE else tokens
        own["head"] += sizes.top[head_tensor(spec)] if logits else 0
        own["embed"] += tokens * spec.hidden_size * sizes.embed_bytes
        for part, size in own.items():
            out[prefix + part] += size * stage.repeat
    return tuple(TrafficLine(part, size) for part, size in out.items())


class _Sizes:
    """Bytes of weights by layer and part."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.top: Counter[str] = Counter()
        self.dense: Counter[tuple[str, str]] = Counter()
        self.experts: Counter[str] = Counter()
        self.embed_bytes = 0
        for e in inventory(spec):
            self._add(e)

    def _add(self, e: TensorEntry) -> None:
        block, *rest = e.name.split(".")
        key = ".".join((block, *rest[:1]))
        if block not in ("layers", "mtp"):
            self.top[e.name] += e.num_bytes
            if e.name == "embed.weight":
                self.embed_bytes = DTYPE_BYTES[e.dtype]
        elif e.dtype == "I64":
            pass  # a table is read at some rows only
        elif _EXPERT.search(e.name):
            self.experts[key] += e.num_bytes
        else:
            side = "ffn" if rest[1].startswith(("ffn", "hc_ffn")) else "attention"
            self.dense[key, side] += e.num_bytes

    def layer(self, block: str, layer: LayerPlan, tokens: int) -> Counter[str]:
        """Weights of one layer that so many tokens read, by part."""
        key, ffn = f"{block}.{layer.index}", self.spec.ffn[layer.ffn]
        out = Counter(
            {
                f"attention.{layer.attention}": self.dense[key, "attention"],
                f"ffn.{layer.ffn}": self.dense[key, "ffn"],
            }
        )
        if not isinstance(ffn, DenseFfn):
            touched = experts_touched(ffn.experts, ffn.topk, tokens)
            out[f"experts.{layer.ffn}"] = round(self.experts[key] / ffn.experts * touched)
        return out


def _rows(
    spec: ModelSpec, plan: Plan, layer: LayerPlan, num_reqs: int, context: int
) -> Counter[str]:
    """Cache rows of one layer that the queries of a step read, by group, each once a request."""
    a = spec.attention[layer.attention]
    caches = dict(a.caches)
    out: Counter[str] = Counter()
    for role, name in caches.items():
        g = plan.group(name)
        if g.kind == "sliding_window":
            rows = min(context, g.span)
        elif g.kind == "compressed":
            rows = context // g.ratio
            if role == "compressed" and isinstance(a, SparseAttention):
                rows = min(rows, a.indexer.topk)
        else:
            continue
        out[f"rows.{name}"] += num_reqs * rows * g.layer_page_bytes // g.page_rows
    return out
