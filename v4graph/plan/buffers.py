"""Static buffers of one program: names, shapes, dtypes and producers.

Axes: T padded tokens, R padded requests, C closing windows, L listed rows.
"""

from __future__ import annotations

from v4graph.plan.types import Bucket, BufferPlan, GroupPlan, Mode, Plan

STAMP_FIELDS = 2
"""A stamp holds (mode number, step number)."""


def num_closings(mode: Mode, bucket: Bucket, ratio: int) -> int:
    """Most windows of `ratio` tokens that a step of this size can close.

    A request with n tokens closes at most ceil(n / ratio) windows; summed over the requests that
    is at most tokens / ratio + requests.
    """
    if mode is Mode.DECODE:
        return bucket.num_reqs
    return min(bucket.num_tokens, bucket.num_tokens // ratio + bucket.num_reqs)


def closing_ratios(plan: Plan) -> tuple[int, ...]:
    """The distinct compression ratios, ascending; each has one list of closing windows."""
    return tuple(sorted({g.ratio for g in plan.groups if g.kind == "compressed"}))


def buffers(plan: Plan, mode: Mode, bucket: Bucket) -> tuple[BufferPlan, ...]:
    """Every static buffer of the program of `mode` at `bucket`."""
    T, R = bucket.num_tokens, bucket.num_reqs
    out = [
        BufferPlan("slots", "int64", (R,), "host"),
        BufferPlan("query_lens", "int64", (R,), "host"),
        BufferPlan("step_stamp", "int64", (STAMP_FIELDS,), "host"),
        BufferPlan("input_ids", "int64", (T,), "prepare"),
        BufferPlan("positions", "int64", (T,), "prepare"),
        BufferPlan("token_to_req", "int64", (T,), "prepare"),
        BufferPlan("is_valid_token", "bool", (T,), "prepare"),
        BufferPlan("logits_rows", "int64", (R,), "prepare"),
        BufferPlan("do_sample", "bool", (R,), "prepare"),
        BufferPlan("stamp", "int64", (STAMP_FIELDS,), "prepare"),
    ]
    for ratio in closing_ratios(plan):
        shape = (num_closings(mode, bucket, ratio),)
        out.append(BufferPlan(f"closing_positions.{ratio}", "int64", shape, "prepare"))
    for rope, dim in plan.rope_dims:
        out += [
            BufferPlan(f"rope.{rope}.{part}", "float32", (T, dim // 2), "prepare")
            for part in ("cos", "sin")
        ]
    for g in plan.groups:
        out += _group_buffers(g, mode, bucket)
    return tuple(out)


def _group_buffers(g: GroupPlan, mode: Mode, bucket: Bucket) -> list[BufferPlan]:
    T, C = bucket.num_tokens, num_closings(mode, bucket, g.closes_every)
    shapes: dict[str, tuple[int, ...]]
    if g.kind == "sliding_window":
        shapes = {"slot_mapping": (T,), "read_slots": (T, g.span)}
    elif g.kind == "compressor_state":
        shapes = {"slot_mapping": (T,), "read_slots": (C, g.span)}
    else:
        shapes = {"slot_mapping": (C,), "read_slots": (T, g.max_entries), "num_entries": (T,)}
    return [
        BufferPlan(f"{g.name}.{field}", "int64", shape, "prepare", g.name)
        for field, shape in shapes.items()
    ]
