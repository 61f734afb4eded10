"""Losses of the main head and of the recurrent draft steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nano.fast import Aux, FastModel

DRAFT_WEIGHTS = (0.3, 0.2, 0.15)
# Acceptance is agreement with the main head, so drafts mostly learn its distribution.
HARD_SHARE = 0.25


def head_loss(hidden: Tensor, head: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy in nats and the logits, in the dtype of `hidden`."""
    logits = F.linear(hidden, head.to(hidden.dtype))
    logp = logits.float().log_softmax(-1)
    return -logp.gather(-1, target[..., None]).mean(), logits.detach()


def draft_loss(
    hidden: Tensor, head: Tensor, target: Tensor, teacher: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """Training loss and plain cross-entropy of one draft step over its live rows.

    Args:
        teacher: the main head's logits for the same targets.
        live: `[S]`, 1 where the step has its whole history.
    """
    logp = F.linear(hidden, head.to(hidden.dtype)).float().log_softmax(-1)
    hard = -logp.gather(-1, target[..., None])[..., 0]
    soft = -(teacher.float().softmax(-1) * logp).sum(-1)
    count = live.sum() * hidden.shape[0]
    loss = HARD_SHARE * hard + (1 - HARD_SHARE) * soft
    return (loss * live).sum() / count, (hard.detach() * live).sum() / count


@dataclass
class Losses:
    """The sum to minimise, its parts for the log, and the load of every routed layer."""

    total: Tensor
    parts: dict[str, Tensor]
    loads: dict[str, Tensor]


class Objective:
    """The training loss of a batch `ids [B, S + 2]`."""

    def __init__(self, model: FastModel, depth: int, compile_: bool) -> None:
        self.model, self.depth = model, depth
        wrap = partial(torch.compile, fullgraph=True, dynamic=False) if compile_ else lambda f: f
        self.head_loss, self.draft_loss = wrap(head_loss), wrap(draft_loss)

    def __call__(self, ids: Tensor) -> Losses:
        model, head = self.model, self.model.params["head.weight"]
        inputs, S = ids[:, :-2].contiguous(), ids.shape[1] - 2
        hidden, streams, reports = model.main(inputs)
        main, logits = self.head_loss(hidden, head, ids[:, 1:-1])
        total, parts = main, {"main": main.detach()}
        loads = {p: r.load for p, r in reports.items() if r.load is not None}
        teacher, target = logits[:, 1:], ids[:, 2:-1]
        drafts: list[tuple[Tensor, Aux]] = []
        if self.depth:
            drafts = model.drafts(streams, ids[:, :-1].contiguous(), self.depth)
        rows = torch.arange(S - 1, device=ids.device)
        for d, (row, aux) in enumerate(drafts):
            live = (rows >= d).float()
            loss, hard = self.draft_loss(row[:, :-1], head, target, teacher, live)
            total = total + DRAFT_WEIGHTS[d] * loss
            parts[f"draft{d + 1}"] = hard
            loads["mtp.0"] = loads["mtp.0"] + aux.load if d else aux.load
        for name in ("kl", "tie"):
            values = [getattr(r, name) for r in reports.values() if getattr(r, name) is not None]
            if values:
                loss = torch.stack(values).sum()
                total = total + loss
                parts[name] = loss.detach()
        return Losses(total, parts, loads)
