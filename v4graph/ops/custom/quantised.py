"""Operators over weights as stored: FP8 linears, plain and grouped, and FP4 experts."""

from __future__ import annotations

from v4graph.ops import quantised as reference
from v4graph.ops.custom.library import register

fp8_linear = register(
    "fp8_linear(Tensor x, Tensor weight, Tensor scale) -> Tensor",
    reference=reference.fp8_linear,
    fake=lambda x, weight, scale: x.new_empty((x.shape[0], weight.shape[0])),
    kernel=("fp8_linear", "fp8_linear"),
)
"""`x [M, i]` times e4m3 `weight [o, i]` with block scales, `[M, o]`; `ops/quantised.py`."""

grouped_fp8_linear = register(
    "grouped_fp8_linear(Tensor x, Tensor weight, Tensor scale) -> Tensor",
    reference=reference.grouped_fp8_linear,
    fake=lambda x, weight, scale: x.new_empty((*x.shape[:2], weight.shape[0] // x.shape[1])),
    kernel=("fp8_linear", "grouped_fp8_linear"),
)
"""`x [M, G, i]` times the group's rows of `weight [o, i]`, `[M, G, o / G]`."""

fp4_experts = register(
    "fp4_experts(Tensor x, Tensor weights, Tensor experts, Tensor w13, Tensor s13, Tensor w2,"
    " Tensor s2, float? clamp) -> Tensor",
    reference=reference.fp4_experts,
    fake=lambda x, *args: x.new_empty(x.shape),
    kernel=("fp4_experts", "fp4_experts"),
)
"""Routed experts from packed FP4 weights, `[T, D]`; an expert of -1 reads and adds nothing."""
