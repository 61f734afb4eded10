"""What tells one model's cached pages from another's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from v4graph.model.projections import StoredParam, tensors_of
from v4graph.plan.types import Plan
from v4graph.spec.model import ModelSpec

_SAMPLED = 8


def identity(spec: ModelSpec, plan: Plan, params: Mapping[str, StoredParam]) -> bytes:
    """A digest of the spec, the compute dtype, the draft layers and the weights.

    Of each weight its name, shape, dtype and some values: enough to tell checkpoints apart, and no
    pass over all of them.
    """
    out = hashlib.sha256()
    out.update(spec.model_dump_json().encode())
    out.update(f"{plan.limits.dtype} {plan.speculation.name}".encode())
    for name in sorted(params):
        for t in tensors_of(params[name]):
            step = max(t.numel() // _SAMPLED, 1)
            sample = t.reshape(-1)[::step][:_SAMPLED]
            values = sample.view(torch.uint8) if sample.element_size() == 1 else sample.float()
            out.update(f"{name} {tuple(t.shape)} {t.dtype} {values.tolist()}".encode())
    return out.digest()
