"""Refuse a plan whose sizes cannot hold: every group written and large enough, every batch held."""

from __future__ import annotations

from v4graph.errors import PlanError
from v4graph.plan.types import GroupPlan, Mode, Plan, ring_tokens
from v4graph.words import counted


def verify_plan(plan: Plan) -> None:
    """Check a plan, also one that was changed by hand.

    Raises:
        PlanError: a cache group that no mode writes, keeps too little or has too few pages; a
            batch or a stage of a round without a program.
    """
    for g in plan.groups:
        _check_group(plan, g)
    _check_stages(plan)


def _check_group(plan: Plan, g: GroupPlan) -> None:
    for m in plan.modes:
        if g.name in m.reads and not any(g.name in w.writes for w in plan.modes):
            raise PlanError(f"cache group {g.name!r}: read by {m.mode.value}, written by no mode")
    back = plan.speculation.num_chained if g.draft_layers else 0
    if g.span and g.kept_tokens < g.span + back:
        begins = f", from a row that lies {back} back on" if back else ""
        raise PlanError(
            f"cache group {g.name!r}: keeps {counted(g.kept_tokens, 'token')}, a read takes "
            f"{g.span}{begins}"
        )
    full = -(-plan.max_model_len // g.page_tokens)
    least = full
    if g.kept_tokens:
        least = min(full, g.touched_pages(ring_tokens(g, plan.limits, plan.speculation)))
    if g.table_width < least:
        raise PlanError(
            f"cache group {g.name!r}: a block table of {counted(g.table_width, 'page')}; its "
            f"ring needs {least}, else a row that is still read could be overwritten"
        )
    if g.num_pages - 1 < g.table_width:
        raise PlanError(
            f"cache group {g.name!r}: {counted(g.num_pages - 1, 'page')} beside the null page; "
            f"one sequence needs {g.table_width}"
        )
    written = plan.speculation.draft_ahead if g.draft_layers else 0
    if g.draft_ahead < written:
        raise PlanError(
            f"cache group {g.name!r}: places {counted(g.draft_ahead, 'row')} ahead of a round; "
            f"its draft layers write {written}"
        )


def _check_stages(plan: Plan) -> None:
    modes = {m.mode: m for m in plan.modes}
    for mode in (Mode.PREFILL, plan.decode_mode, Mode.IDLE):
        if mode not in modes:
            raise PlanError(f"no program of mode {mode.value}")
    most = max(b.num_reqs for b in modes[plan.decode_mode].buckets)
    if most < plan.limits.max_num_seqs:
        raise PlanError(
            f"{plan.decode_mode.value} programs hold {counted(most, 'request')}, max_num_seqs is "
            f"{plan.limits.max_num_seqs}"
        )
    for first, bucket in plan.rounds():
        for stage in plan.stages(first, bucket):
            if stage.mode not in modes or stage.bucket not in modes[stage.mode].buckets:
                raise PlanError(
                    f"{first.value} at {bucket}: its {stage.mode.value} stage has no program of "
                    f"{stage.bucket}"
                )
