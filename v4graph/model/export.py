"""Write a checkpoint directory in the published layout: shards, and the index that lists them.

One shard is in memory at a time. The index is written last, so that a directory whose writing
stopped halfway does not load.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from v4graph.errors import WeightsError
from v4graph.plan.weights import TensorEntry
from v4graph.spec.safetensors_header import INDEX_FILE

CONFIG_FILE = "config.json"
Progress = Callable[[str, int, int], None]

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_HEADER_BYTES = 256
"""Room for a tensor's entry in its file's header and in the index."""


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint and its tensors."""

    file: str
    entries: tuple[TensorEntry, ...]


def plan_shards(entries: Iterable[TensorEntry], shard_bytes: int) -> list[Shard]:
    """Cut tensors, in their order, into files of at most `shard_bytes` bytes of tensors.

    A tensor that is larger has a file of its own.
    """
    groups: list[list[TensorEntry]] = []
    size = 0
    for entry in entries:
        if not groups or size + entry.num_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.num_bytes
    total = len(groups)
    return [
        Shard(f"model-{n:05d}-of-{total:05d}.safetensors", tuple(group))
        for n, group in enumerate(groups, 1)
    ]


def prepare_directory(directory: Path, num_bytes: int, num_tensors: int, force: bool) -> None:
    """Make room for a checkpoint in `directory`, which need not exist.

    With `force` an older checkpoint's index and its shards `model-N-of-M.safetensors` are deleted,
    and nothing else.

    Raises:
        WeightsError: the directory holds anything and `force` is not set; it is no directory; the
            file system has too little room.
    """
    if directory.exists() and not directory.is_dir():
        raise WeightsError(f"{directory}: a file; expected a directory to write into")
    held = sorted(directory.iterdir()) if directory.is_dir() else []
    if held and not force:
        raise WeightsError(
            f"{directory}: not empty (it holds {held[0].name}); pass --force to replace the "
            "checkpoint in it"
        )
    old = [p for p in held if p.is_file() and (_SHARD.fullmatch(p.name) or p.name == INDEX_FILE)]
    place = next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists())
    needed = num_bytes + num_tensors * _HEADER_BYTES
    free = shutil.disk_usage(place).free + sum(p.stat().st_size for p in old)
    if needed > free:
        raise WeightsError(
            f"{directory}: {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # The index first: without it what is left of the shards does not pass for a checkpoint.
        for path in sorted(old, key=lambda p: p.name != INDEX_FILE):
            path.unlink()
    except OSError as fault:
        raise WeightsError(f"{directory}: cannot be written: {fault.strerror}") from fault


def write_checkpoint(
    directory: Path,
    shards: Iterable[Shard],
    make: Callable[[TensorEntry], Tensor],
    config: dict[str, Any] | None,
    progress: Progress | None = None,
) -> None:
    """Write shards, `config.json` (unless it is None) and the index.

    Args:
        make: the values of a tensor, contiguous, on the CPU, in the dtype and shape of its entry.
        progress: called with ("write", tensors made, tensors in all).

    Raises:
        WeightsError: a file cannot be written.
    """
    shards = list(shards)
    total, done = sum(len(s.entries) for s in shards), 0
    weight_map: dict[str, str] = {}
    path = directory
    try:
        for shard in shards:
            tensors: dict[str, Tensor] = {}
            for entry in shard.entries:
                tensors[entry.name] = make(entry)
                weight_map[entry.name] = shard.file
                done += 1
                if progress is not None:
                    progress("write", done, total)
            path = directory / shard.file
            save_file(tensors, path, metadata={"format": "pt"})
        if config is not None:
            path = directory / CONFIG_FILE
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        path = directory / INDEX_FILE
        size = sum(entry.num_bytes for shard in shards for entry in shard.entries)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for shard in shards:
            # safetensors makes its files readable to their owner only.
            shutil.copymode(path, directory / shard.file)
    except (OSError, SafetensorError) as fault:
        raise WeightsError(f"{path}: cannot be written: {fault}") from fault
