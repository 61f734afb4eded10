"""Static buffers of one program: names, shapes, dtypes and producers.

Axes: T padded tokens, R padded requests, C closing windows, L listed rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from v4graph.plan.types import Bucket, BufferPlan, GroupPlan, Mode, Plan

STAMP_FIELDS = 2
"""A stamp holds (mode number, step number)."""


def num_closings(bucket: Bucket, ratio: int) -> int:
    """Most windows of `ratio` tokens that a step of this size can close.

    A request with n tokens closes at most ceil(n / ratio) windows; summed over the requests of a
    packed step that is at most tokens / ratio + requests.
    """
    if bucket.tokens_per_req:
        return bucket.num_reqs * -(-bucket.tokens_per_req // ratio)
    return min(bucket.num_tokens, bucket.num_tokens // ratio + bucket.num_reqs)


def mode_groups(plan: Plan, mode: Mode) -> tuple[GroupPlan, ...]:
    """The cache groups that a step of `mode` reads or writes."""
    m = plan.mode(mode)
    return tuple(g for g in plan.groups if g.name in m.reads or g.name in m.writes)


def mode_ropes(plan: Plan, mode: Mode) -> tuple[tuple[str, int], ...]:
    """(rope entry, rotated channels) that the layers of `mode` use."""
    return {"main": plan.rope_dims, "draft": plan.draft_rope_dims, "none": ()}[
        plan.mode(mode).layers
    ]


def closing_ratios(groups: Iterable[GroupPlan]) -> tuple[int, ...]:
    """The distinct compression ratios, ascending; each has one list of closing windows."""
    return tuple(sorted({g.ratio for g in groups if g.kind == "compressed"}))


def buffers(plan: Plan, mode: Mode, bucket: Bucket) -> tuple[BufferPlan, ...]:
    """Every static buffer of a stage of `mode` at `bucket`."""
    T, R = bucket.num_tokens, bucket.num_reqs
    out = [
        BufferPlan("slots", "int64", (R,), "host"),
        BufferPlan("query_lens", "int64", (R,), "host"),
        BufferPlan("step", "int64", (1,), "host"),
        BufferPlan("stamp", "int64", (STAMP_FIELDS,), "prepare"),
    ]
    m = plan.mode(mode)
    if m.layers == "none":
        return tuple(out)
    out += [
        BufferPlan("input_ids", "int64", (T,), "prepare"),
        BufferPlan("positions", "int64", (T,), "prepare"),
        BufferPlan("is_valid_token", "bool", (T,), "prepare"),
    ]
    if m.logits != "none":
        out.append(BufferPlan("do_sample", "bool", (R,), "prepare"))
    if m.logits == "last_token":
        out.append(BufferPlan("logits_rows", "int64", (R,), "prepare"))
    if mode is Mode.TARGET_VERIFY:
        out.append(BufferPlan("num_drafts", "int64", (R,), "prepare"))
    if mode is Mode.DRAFT_CHAIN:
        out.append(BufferPlan("stream_rows", "int64", (T,), "prepare"))
        out.append(BufferPlan("carry_rows", "int64", (R,), "prepare"))
    groups = mode_groups(plan, mode)
    for ratio in closing_ratios(groups):
        shape = (num_closings(bucket, ratio),)
        out.append(BufferPlan(f"closing_positions.{ratio}", "int64", shape, "prepare"))
    for rope, dim in mode_ropes(plan, mode):
        out += [
            BufferPlan(f"rope.{rope}.{part}", "float32", (T, dim // 2), "prepare")
            for part in ("cos", "sin")
        ]
    indexed = plan.index_groups
    for g in groups:
        own = _group_buffers(g, bucket, g.name in indexed)
        unused = {
            f"{g.name}.{field}"
            for field, names in (("slot_mapping", m.writes), ("read_slots", m.reads))
            if g.name not in names
        }
        out += [b for b in own if b.name not in unused]
    return tuple(out)


def _group_buffers(g: GroupPlan, bucket: Bucket, indexed: bool) -> list[BufferPlan]:
    T, C = bucket.num_tokens, num_closings(bucket, g.closes_every)
    shapes: dict[str, tuple[int, ...]]
    if g.kind == "sliding_window":
        shapes = {"slot_mapping": (T,), "read_slots": (T, g.span)}
    elif g.kind == "compressor_state":
        shapes = {"slot_mapping": (T,), "read_slots": (C, g.span)}
    else:
        shapes = {"slot_mapping": (C,), "read_slots": (T, g.max_entries)}
        if indexed:
            shapes["num_entries"] = (T,)
    return [
        BufferPlan(f"{g.name}.{field}", "int64", shape, "prepare", g.name)
        for field, shape in shapes.items()
    ]
