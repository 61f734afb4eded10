"""Which configuration a kernel runs with: found once for a device, kept in a table, looked up.

Trying configurations costs seconds of compilation each and synchronises, so an engine never does
it. `V4GRAPH_TUNE_KERNELS=1` does, for a benchmark that visits the shapes of interest and then calls
`save`; `tuned/<device>.json` beside this file is what such runs have found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

TABLES = Path(__file__).parent / "tuned"
Key = tuple[int | bool, ...]


def tuning() -> bool:
    """Whether this process times configurations."""
    return os.environ.get("V4GRAPH_TUNE_KERNELS", "0") == "1"


class Tuned:
    """A kernel with several configurations, launched as `kernel[grid](...)` like any other.

    Args:
        fn: the `triton.jit` function; its name is that of its table.
        configs: the first is the choice for shapes that no table knows.
        key: arguments that a choice depends on. The first is a size that varies from step to step:
            without an entry for it, that of the nearest one counts.
    """

    def __init__(self, fn: Any, configs: Sequence[triton.Config], key: Sequence[str]) -> None:
        self.fn, self.configs, self.key = fn, tuple(configs), tuple(key)
        self.name: str = fn.__name__
        self._names: list[str] = list(fn.arg_names)
        self._chosen: dict[Key, triton.Config] = {}
        self._autotuner = triton.autotune(configs=list(configs), key=list(key))(fn)
        self.found: dict[Key, triton.Config] = {}
        """What this process has tuned."""
        _KERNELS.append(self)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self.run, grid=grid)

    def run(self, *args: Any, grid: Any, **kwargs: Any) -> Any:
        """Launch with the configuration for these arguments."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        key = tuple(given[name] for name in self.key)
        if tuning() and isinstance(self.fn, JITFunction):
            result = self._autotuner[grid](*args, **kwargs)
            self.found[key] = self._autotuner.best_config
            return result
        return self.fn[grid](*args, **kwargs, **self.choose(key).all_kwargs())

    def choose(self, key: Key) -> triton.Config:
        """The configuration for a key: the table's, or the first."""
        if key not in self._chosen:
            self._chosen[key] = self._look_up(key, table(_device()).get(self.name, {}))
        return self._chosen[key]

    def _look_up(self, key: Key, entries: Mapping[Key, dict[str, Any]]) -> triton.Config:
        alike = [k for k in entries if k[1:] == key[1:]]
        if alike:
            nearest = min(alike, key=lambda k: abs(_log2(k[0]) - _log2(key[0])))
            for config in self.configs:
                if config.all_kwargs() == entries[nearest]:
                    return config
        return self.configs[0]


_KERNELS: list[Tuned] = []


def tuned(configs: Sequence[triton.Config], key: Sequence[str]) -> Callable[[Any], Tuned]:
    """Decorate a `triton.jit` function with its configurations; see `Tuned`."""
    return lambda fn: Tuned(fn, configs, key)


def _log2(n: int) -> int:
    return max(int(n), 1).bit_length()


@cache
def _device() -> str:
    return torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else ""


@cache
def table(device: str) -> dict[str, dict[Key, dict[str, Any]]]:
    """The choices kept for a device, by kernel and key; empty for one without a file."""
    path = TABLES / f"{device}.json"
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    out: dict[str, dict[Key, dict[str, Any]]] = {}
    for row in rows:
        out.setdefault(row["kernel"], {})[tuple(row["key"])] = row["config"]
    return out


def save(path: Path) -> int:
    """Write what this process has tuned, joined to what the table held; the number of rows."""
    merged = {name: dict(entries) for name, entries in table(_device()).items()}
    for kernel in _KERNELS:
        for key, config in kernel.found.items():
            merged.setdefault(kernel.name, {})[key] = config.all_kwargs()
    rows = [
        {"kernel": name, "key": list(key), "config": config}
        for name, entries in sorted(merged.items())
        for key, config in sorted(entries.items(), key=lambda item: [int(x) for x in item[0]])
    ]
    text = ",\n ".join(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[{text}]\n", encoding="utf-8")
    return len(rows)
