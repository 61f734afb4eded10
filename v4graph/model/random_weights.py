"""Random values for every tensor of a checkpoint, in the dtype in which it is stored.

A tensor's values depend on the seed and on its name alone: not on the other tensors, on shard sizes
or on the number of layers. They are chosen for healthy numerics, not for what the model says:

| tensor | values |
|---|---|
| matrices | mean 0, standard deviation `scale / sqrt(inputs)`, quantised or not |
| embedding | standard normal |
| norms, `hc_*_scale` | 1 + 0.1 normal |
| sinks, `ape`, gate biases, `hc_*_base` | 0.1 normal |
| `tid2eid` | distinct experts in every row, all equally likely |

FP8 codes are normal with a standard deviation of 64, FP4 codes uniform over all 16. Scales make up
the rest: e8m0 ones are drawn from the two nearest powers of two so that the mean square is right,
float32 ones lie within half of what is needed.
"""

from __future__ import annotations

import hashlib
from math import ceil, floor, log2, prod
from pathlib import Path

import torch
from torch import Tensor

from v4graph.model.checkpoint import StoredAs
from v4graph.ops.quantised import FP4_VALUES
from v4graph.plan.weights import TensorEntry, inventory
from v4graph.spec.model import ModelSpec

_FP8_STD = 64.0
_FP8_MAX = 448.0
"""The largest e4m3 value; torch turns what is beyond into NaN."""
_FP4_STD = (sum(v * v for v in FP4_VALUES) / len(FP4_VALUES)) ** 0.5
_TABLE_ROWS = 16384
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class RandomWeights:
    """The random checkpoint of one spec and seed."""

    def __init__(
        self, spec: ModelSpec, seed: int = 0, scale: float = 1.0, device: str | torch.device = "cpu"
    ) -> None:
        """Draw on `device`; another kind of device draws other values from one seed."""
        self.seed, self.scale = seed, scale
        self.device = torch.device(device)
        self.entries = tuple(inventory(spec))
        """All tensors, in checkpoint order."""
        self._by_name = {e.name: e for e in self.entries}

    def tensor(self, entry: TensorEntry) -> Tensor:
        """The values of one tensor of `entries`, on the CPU, as a file stores them."""
        return self.draw(entry).cpu()

    def draw(self, entry: TensorEntry) -> Tensor:
        """The same, on the device that draws them."""
        digest = hashlib.sha256(f"{self.seed}:{entry.name}".encode()).digest()
        generator = torch.Generator(self.device)
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return self._draw(entry, generator)

    def _draw(self, entry: TensorEntry, generator: torch.Generator) -> Tensor:
        if entry.dtype == "I64":
            gate = self._by_name[entry.name.removesuffix("tid2eid") + "weight"]
            return _table(entry, gate.shape[0], generator)
        if entry.name.endswith(".scale"):
            return self._scales(entry, generator)
        if entry.dtype == "I8":
            return _bytes(entry.shape, generator).view(torch.int8)
        values = torch.randn(entry.shape, generator=generator, device=self.device)
        if entry.dtype == "F8_E4M3":
            values.mul_(_FP8_STD).clamp_(-_FP8_MAX, _FP8_MAX)
            return values.to(torch.float8_e4m3fn)
        return self._shaped(entry, values).to(_DTYPES[entry.dtype])

    def _shaped(self, entry: TensorEntry, values: Tensor) -> Tensor:
        """Standard normal values to those of an unquantised tensor; in place."""
        name = entry.name
        if name == "embed.weight":
            return values
        if name.endswith(("norm.weight", "_scale")):
            return values.mul_(0.1).add_(1)
        if len(entry.shape) < 2 or name.endswith(".ape"):
            return values.mul_(0.1)
        return values.mul_(self._std(entry))

    def _std(self, weight: TensorEntry) -> float:
        inputs = weight.shape[-1] * (2 if weight.dtype == "I8" else 1)
        return self.scale / inputs**0.5

    def _scales(self, entry: TensorEntry, generator: torch.Generator) -> Tensor:
        weight = self._by_name[entry.name.removesuffix("scale") + "weight"]
        needed = self._std(weight) / (_FP4_STD if weight.dtype == "I8" else _FP8_STD)
        draw = torch.rand(entry.shape, generator=generator, device=self.device)
        if entry.dtype == "F32":
            # The mean square of 0.5 + draw is 13/12.
            return draw.add_(0.5).mul_(needed / (13 / 12) ** 0.5)
        exponent = log2(needed)
        low = floor(exponent)
        # A share p of 2^(low + 1) and a rest of 2^low: (1 + 3 p) 4^low = needed^2.
        share = (4 ** (exponent - low) - 1) / 3
        byte = (draw < share).to(torch.uint8) + (127 + low)
        return byte.to(torch.uint8).view(torch.float8_e8m0fnu)


class RandomSource:
    """Random weights as a source of `load_quantised`: a model in memory, without files."""

    def __init__(self, weights: RandomWeights) -> None:
        self.directory = Path(f"random weights of seed {weights.seed}")
        self._weights = weights
        self._by_name = {e.name: e for e in weights.entries}

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def names(self) -> set[str]:
        """Published names of all tensors."""
        return set(self._by_name)

    def place(self, name: str) -> StoredAs:
        """Dtype and shape of a tensor; the file does not exist."""
        entry = self._by_name[name]
        return StoredAs(self.directory, name, entry.dtype, entry.shape)

    def read(self, name: str) -> Tensor:
        """One tensor as a file would store it, on the device that draws."""
        return self._weights.draw(self._by_name[name])

    def close(self) -> None:
        """Nothing is open."""


def _bytes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform bytes, drawn eight at a time."""
    count = prod(shape)
    words = torch.empty(ceil(count / 8), dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:count].view(shape)


def _table(entry: TensorEntry, experts: int, generator: torch.Generator) -> Tensor:
    """Expert ids by token id: the places of the largest of `experts` random numbers."""
    rows, topk = entry.shape
    parts = [
        torch.rand(
            (min(_TABLE_ROWS, rows - start), experts), generator=generator, device=generator.device
        )
        .topk(topk)
        .indices
        for start in range(0, rows, _TABLE_ROWS)
    ]
    return torch.cat(parts)
