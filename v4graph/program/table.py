"""The device-resident request table: the one persistent truth about every running request.

Row 0 is the null request that padding points at. The host writes a row when a request is admitted
and block-table entries when pages change hands; everything else is advanced by the step programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from v4graph.plan.rules import RuleRow
from v4graph.plan.types import NULL_PAGE, Plan
from v4graph.program.rules import empty_rules

_SCALARS = {
    "num_tokens": torch.int64,  # known tokens: prompt and generated
    "num_computed_tokens": torch.int64,  # tokens whose cache rows are valid
    "num_committed": torch.int64,  # of these, computed by the last step
    "num_appended": torch.int64,  # tokens that the last step made known
    "num_drafts": torch.int64,  # drafts that follow the known tokens
    "temperature": torch.float32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "top_k": torch.int64,
    "seed": torch.int64,
}


class RequestTable:
    """Tensors indexed by request slot; `max_num_seqs + 1` rows.

    Attributes:
        token_ids: `[S, max_model_len + 1]` int64.
        scalars: `[S]` tensors by name.
        draft_tokens: `[S, k]` int64.
        draft_probs: `[S, k, V]` float32, what drafts of requests with a temperature were drawn
            from; without draft layers or sampling it has no elements.
        carried_streams: `[S, N, D]` by draft layer behind the first: the streams of the layer
            before at the row where this layer begins its next round (`program/chain.py`).
        rule_ints, rule_floats: rules over logits (`program/rules.py`); no columns if the plan's
            limits leave them out.
        block_tables: `[S, table_width]` int64 page ids by group; the null page where unassigned.
    """

    def __init__(self, plan: Plan, vocab_size: int, device: torch.device) -> None:
        slots = plan.limits.max_num_seqs + 1
        self.device = device
        self.token_ids = torch.zeros(
            slots, plan.max_model_len + 1, dtype=torch.int64, device=device
        )
        self.scalars = {
            name: torch.zeros(slots, dtype=dtype, device=device) for name, dtype in _SCALARS.items()
        }
        k = plan.speculation.num_draft_tokens
        self.draft_tokens = torch.zeros(slots, k, dtype=torch.int64, device=device)
        # Drafts that no layer draws are certain: there is no distribution to keep.
        stored = bool(plan.speculation.layers) and not plan.limits.greedy_only
        sampled = vocab_size if stored else 0
        self.draft_probs = torch.zeros(slots, k, sampled, device=device)
        carried = (slots, *plan.speculation.stream_shape)
        dtype = getattr(torch, plan.limits.dtype)
        self.carried_streams = {
            f"carried_streams.{i}": torch.zeros(carried, dtype=dtype, device=device)
            for i in range(1, plan.speculation.num_chained + 1)
        }
        ints, floats = empty_rules(slots, device)
        columns = None if plan.limits.logits_processing else 0
        self.rule_ints = ints[:, :columns].contiguous()
        self.rule_floats = floats[:, :columns].contiguous()
        self._ruled: set[int] = set()
        # One tensor behind all block tables, so that a request's new pages are one write.
        sizes = [slots * g.table_width for g in plan.groups]
        self._tables = torch.full((sum(sizes),), NULL_PAGE, dtype=torch.int64, device=device)
        self.block_tables: dict[str, Tensor] = {}
        self._places: dict[str, tuple[int, int]] = {}
        offset = 0
        for g, size in zip(plan.groups, sizes, strict=True):
            table = self._tables[offset : offset + size].view(slots, g.table_width)
            self.block_tables[g.name] = table
            self._places[g.name] = (offset, g.table_width)
            offset += size

    def admit(
        self,
        slot: int,
        token_ids: list[int],
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        min_p: float,
        seed: int,
        num_computed_tokens: int = 0,
        rules: RuleRow | None = None,
    ) -> None:
        """Start a request in `slot`: its tokens are known, of so many the rows are there."""
        if rules is not None:
            self._set_rules(slot, rules)
            self._ruled.add(slot)
        self.token_ids[slot, : len(token_ids)] = self._sent(token_ids)
        values = {
            "num_tokens": len(token_ids),
            "num_computed_tokens": num_computed_tokens,
            "num_committed": 0,
            "num_appended": 0,
            "num_drafts": 0,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "seed": seed,
        }
        for name, value in values.items():
            self.scalars[name][slot] = value

    def _set_rules(self, slot: int, rules: RuleRow) -> None:
        self.rule_ints[slot] = self._sent(rules.ints())
        self.rule_floats[slot] = self._sent(rules.floats(), torch.float32)

    def set_pages(self, slot: int, pages: dict[str, dict[int, int]]) -> None:
        """Write block-table entries of one request: pages by group and column."""
        where, what = [], []
        for group, entries in pages.items():
            offset, width = self._places[group]
            where += [offset + slot * width + column for column in entries]
            what += entries.values()
        if where:
            both = self._sent([*where, *what])
            self._tables.index_put_((both[: len(where)],), both[len(where) :])

    def _sent(self, values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        """Numbers on the device, by a copy that the host does not wait for."""
        on_host = torch.tensor(values, dtype=dtype)
        if self.device.type != "cuda":
            return on_host
        return on_host.pin_memory().to(self.device, non_blocking=True)

    def force_drafts(self, slot: int, drafts: list[int]) -> None:
        """Replace a request's drafts; with a temperature they count as drawn with certainty."""
        n = len(drafts)
        ids = self._sent(drafts)
        self.draft_tokens[slot, :n] = ids
        self.scalars["num_drafts"][slot] = n
        if self.draft_probs.shape[-1]:
            self.draft_probs[slot] = 0.0
            self.draft_probs[slot, torch.arange(n, device=self.device), ids] = 1.0

    def release(self, slot: int) -> None:
        """Forget a request; its block tables point at the null page again."""
        for table in self.block_tables.values():
            table[slot] = NULL_PAGE
        for values in self.scalars.values():
            values[slot] = 0
        if slot in self._ruled:
            self._set_rules(slot, RuleRow())
            self._ruled.remove(slot)

    def tensors(self) -> dict[str, Tensor]:
        """Everything a step program may read, by name."""
        tables = {f"block_table.{k}": v for k, v in self.block_tables.items()}
        drafts = {"draft_tokens": self.draft_tokens, "draft_probs": self.draft_probs}
        rules = {"rule_ints": self.rule_ints, "rule_floats": self.rule_floats}
        drafts |= self.carried_streams
        return {"token_ids": self.token_ids, **drafts, **rules, **self.scalars, **tables}
