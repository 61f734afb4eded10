"""Open a checkpoint directory: where each tensor is, what its header says, and its values.

Files are memory-mapped by safetensors and few are open at a time, so that reading a checkpoint in
the order of its files keeps little more than one of them in the resident set.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from v4graph.errors import WeightsError
from v4graph.spec.safetensors_header import (
    INDEX_FILE,
    STACKED_EXPERTS,
    check_shard,
    official_name,
)
from v4graph.words import counted

_MAX_OPEN = 4
"""Files held open: the one that is read in order, and some for scales that lie elsewhere."""


@dataclass(frozen=True)
class StoredAs:
    """Where a tensor is and what its header says; `part` and `expert` pick a matrix out of stacked
    experts."""

    file: Path
    stored: str
    dtype: str
    """The safetensors name, such as F8_E4M3."""
    shape: tuple[int, ...]
    part: str = ""
    expert: int = 0


class TensorSource(Protocol):
    """Where a model's tensors come from: files, or memory."""

    directory: Path
    """Names the source in messages."""

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> set[str]:
        """Published names of all tensors."""
        ...

    def place(self, name: str) -> StoredAs:
        """File, dtype and shape of a tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor as stored."""
        ...

    def close(self) -> None:
        """Let go of what reading has opened."""
        ...


class Checkpoint:
    """The safetensors files of a directory, with or without an index; tensors are read lazily.

    Names are the published ones, whichever of the known schemes the files use (see
    `v4graph.spec.safetensors_header`).
    """

    def __init__(self, directory: Path) -> None:
        """Read all headers.

        Raises:
            WeightsError: no files, files that are no safetensors, an index that does not fit them,
                or a tensor that is there twice.
        """
        self.directory = directory
        if not directory.is_dir():
            raise WeightsError(f"{directory}: not a directory; expected a checkpoint directory")
        index = directory / INDEX_FILE
        self._index: dict[str, str] = {}
        self._open: OrderedDict[Path, Any] = OrderedDict()
        files = self._indexed(index) if index.is_file() else sorted(directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{directory}: no *.safetensors file and no {index.name}")
        self._where: dict[str, StoredAs] = {}
        for file in files:
            for name, place in self._places(file):
                if name in self._where:
                    raise WeightsError(
                        f"{directory}: tensor {name} is in {self._where[name].file.name} and in "
                        f"{file.name}, and no index says which one counts"
                    )
                self._where[name] = place
        held = {p.stored for p in self._where.values()}
        missing = [n for n in self._index if n not in held]
        if missing:
            raise WeightsError(
                f"{index}: says that {self._index[missing[0]]} holds {missing[0]}, but it does "
                f"not ({counted(len(missing), 'such tensor')})"
            )

    def _indexed(self, index: Path) -> list[Path]:
        try:
            self._index = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as e:
            raise WeightsError(f"{index}: expected JSON with a weight_map: {e}") from e
        try:
            files = sorted({self.directory / check_shard(n, f) for n, f in self._index.items()})
        except ValueError as e:
            raise WeightsError(f"{index}: {e}") from e
        for f in files:
            if not f.is_file():
                raise WeightsError(f"{index}: names {f.name}, which is not in {self.directory}")
        return files

    def _handle(self, file: Path) -> Any:
        """The open file; the one that was used longest ago is closed for it."""
        if file not in self._open:
            while len(self._open) >= _MAX_OPEN:
                self._open.popitem(last=False)
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as e:
                raise WeightsError(f"{file}: cannot be read as safetensors: {e}") from e
        self._open.move_to_end(file)
        return self._open[file]

    def _places(self, file: Path) -> Iterator[tuple[str, StoredAs]]:
        handle = self._handle(file)
        # The index is authoritative: a stale copy in another file does not count.
        for stored in handle.keys():  # noqa: SIM118 (not a mapping)
            if self._index and self.directory / self._index.get(stored, "") != file:
                continue
            header = handle.get_slice(stored)
            dtype, shape = header.get_dtype(), tuple(header.get_shape())
            name = official_name(stored)
            stacked = STACKED_EXPERTS.match(name)
            if stacked is None or len(shape) != 3:
                yield name, StoredAs(file, stored, dtype, shape)
                continue
            prefix, which, suffix = stacked.groups()
            experts, rows, columns = shape
            parts = ("w1", "w3") if which == "gate_up_proj" else ("w2",)
            for expert in range(experts):
                for part in parts:
                    official = f"{prefix}.{expert}.{part}{suffix or '.weight'}"
                    own = (rows // len(parts), columns)
                    yield official, StoredAs(file, stored, dtype, own, part, expert)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> set[str]:
        """Published names of all tensors."""
        return set(self._where)

    def place(self, name: str) -> StoredAs:
        """File, dtype and shape of a tensor."""
        return self._where[name]

    def read(self, name: str) -> Tensor:
        """One tensor as stored. It lies in the mapped file: copy what is kept."""
        place = self._where[name]
        handle = self._handle(place.file)
        if not place.part:
            return handle.get_tensor(place.stored)
        matrix = handle.get_slice(place.stored)[place.expert]
        if place.part == "w2":
            return matrix
        half = matrix.shape[0] // 2
        return matrix[:half] if place.part == "w1" else matrix[half:]

    def close(self) -> None:
        """Let go of the mapped files; reading opens them again."""
        self._open.clear()
