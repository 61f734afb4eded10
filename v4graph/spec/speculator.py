"""Which speculator a checkpoint's files hold, told from tensor names alone.

`config.json` does not tell: checkpoints with a DSpark speculator keep `num_nextn_predict_layers` 1,
though they hold three stages and none of the tensors that an MTP layer begins with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from v4graph.words import counted

_MTP = re.compile(r"mtp\.(\d+)\.(?:e_proj|h_proj|enorm|hnorm)\..+")
_DSPARK = re.compile(r"mtp\.(\d+)\.(?:main_proj|main_norm|markov_head|confidence_head)\..+")

SpeculatorKind = Literal["none", "mtp", "dspark", "unknown"]

SHOWN: dict[str, str] = {
    "none": "no draft layers",
    "mtp": "MTP layers",
    "dspark": "a DSpark speculator",
    "unknown": "draft layers of an unknown kind",
}
"""What to call each kind in messages."""


def mtp_layers(count: int) -> str:
    """So many MTP layers, in words."""
    return counted(count, "MTP layer")


@dataclass(frozen=True)
class Speculator:
    """What `find_speculator` saw."""

    kind: SpeculatorKind
    evidence: str = ""
    """The tensor that told; empty for `none`."""
    num_layers: int = 0
    """Draft layers; 0 unless the kind is `mtp` or `dspark`."""


def find_speculator(names: Iterable[str]) -> Speculator:
    """The speculator among a checkpoint's official tensor names.

    `unknown` are `mtp.*` tensors of neither kind, or of both.
    """
    drafts = sorted(n for n in names if n.startswith("mtp."))
    if not drafts:
        return Speculator("none")
    mtp = [m for n in drafts if (m := _MTP.fullmatch(n))]
    dspark = [n for n in drafts if _DSPARK.fullmatch(n)]
    if mtp and not dspark:
        return Speculator("mtp", mtp[0][0], len({m[1] for m in mtp}))
    if dspark and not mtp:
        return Speculator("dspark", dspark[0], len({n.split(".")[1] for n in drafts}))
    return Speculator("unknown", drafts[0])
