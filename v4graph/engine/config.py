"""What a user may set of an engine, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from v4graph.errors import PlanError
from v4graph.plan.rules import MAX_LOGPROBS
from v4graph.plan.types import Limits
from v4graph.spec.model import HyperConnections, ModelSpec, SparseAttention


@dataclass(frozen=True)
class EngineConfig:
    """What a user may set; 0 or None leaves the choice to the plan."""

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    dtype: str = "float32"
    device: str = "auto"
    compile: bool = True
    checked: bool = False
    kernels: str = "auto"
    """`reference`: functions of `ops/` that the compiler fuses; `operators`: registered ones, where
    there are some (Triton kernels on a GPU, their references on a CPU); `auto`: operators on a GPU
    in bfloat16, if the kernels take the model's sizes. Packed rows and stored weights always need
    operators."""
    weight_format: str = "auto"
    """`decoded` to `dtype`; `stored`, as the checkpoint holds them; `auto`: stored with operators
    on a GPU."""
    allow_nonfinite: bool = False
    """Load weights that are NaN or infinite, which is refused otherwise; each request that they
    reach ends with an error."""
    seed: int = 0
    decode_buckets: tuple[int, ...] = ()
    prefill_buckets: tuple[tuple[int, int], ...] = ()
    greedy_only: bool = False
    """Build no sampling programs; requests with a temperature are refused."""
    logits_processing: bool | None = None
    """Build programs for penalties, biases, banned words and `min_tokens`; None is: unless
    `greedy_only`."""
    max_logprobs: int | None = None
    """Most alternatives that a request may ask for, 0..20; 0 builds no programs for them. None is
    20, or 0 with `greedy_only`."""
    speculative: str | None = None
    """An entry of the spec's `speculative`; None is the first one."""
    num_draft_tokens: int | None = None
    """Drafts a round; None is the mode's own number."""
    overlap: bool = True
    """Launch a round before the tokens of the last one are read."""
    cuda_graphs: bool = True
    """On a GPU, launch each round as one CUDA graph."""
    prefix_cache: bool = True
    """Keep the pages of sequences, and start a request behind the longest prefix that is kept."""
    cached_boundaries: int | None = None
    """Places to keep at which a request can start; None is four for each of max_num_seqs."""

    def limits(self) -> Limits:
        """The plan's view of this configuration."""
        kept = 4 * self.max_num_seqs if self.cached_boundaries is None else self.cached_boundaries
        return Limits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len or 0,
            kv_memory_bytes=self.kv_memory_bytes or 0,
            dtype=self.dtype,
            decode_buckets=self.decode_buckets,
            prefill_buckets=self.prefill_buckets,
            greedy_only=self.greedy_only,
            logits_processing=(
                not self.greedy_only if self.logits_processing is None else self.logits_processing
            ),
            max_logprobs=self._max_logprobs(),
            speculative=self.speculative or "",
            num_draft_tokens=self.num_draft_tokens or 0,
            overlap=self.overlap,
            cached_boundaries=kept if self.prefix_cache else 0,
        )

    def _max_logprobs(self) -> int:
        if self.max_logprobs is None:
            return 0 if self.greedy_only else MAX_LOGPROBS
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise PlanError(f"max_logprobs {self.max_logprobs}: expected 0..{MAX_LOGPROBS}")
        return self.max_logprobs

    def torch_device(self) -> torch.device:
        """The device to run on.

        Raises:
            PlanError: a name that torch does not know, or CUDA where there is none.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as e:
            raise PlanError(f"device {self.device!r}: expected auto, cpu or cuda[:N]") from e
        if device.type == "cuda" and not torch.cuda.is_available():
            raise PlanError(f"device {self.device!r}: no NVIDIA GPU is visible to torch")
        return device

    def use_operators(self, spec: ModelSpec) -> bool:
        """Whether programs call registered operators.

        Raises:
            PlanError: a value that does not exist.
        """
        if self.kernels not in ("auto", "reference", "operators"):
            raise PlanError(
                f"kernels {self.kernels!r}: expected 'auto', 'reference' or 'operators'"
            )
        if self.kernels != "auto":
            return self.kernels == "operators"
        on_gpu = self.torch_device().type == "cuda"
        return on_gpu and self.dtype == "bfloat16" and kernels_fit(spec)

    def keep_stored(self, spec: ModelSpec) -> bool:
        """Whether FP8 and FP4 weights stay as the checkpoint holds them.

        Raises:
            PlanError: a value that does not exist.
        """
        if self.weight_format not in ("auto", "decoded", "stored"):
            raise PlanError(
                f"weight_format {self.weight_format!r}: expected 'auto', 'decoded' or 'stored'"
            )
        if self.weight_format != "auto":
            return self.weight_format == "stored"
        return self.torch_device().type == "cuda" and self.use_operators(spec)


def kernels_fit(spec: ModelSpec) -> bool:
    """Whether the Triton kernels take a model's sizes: powers of two (docs/kernels.md)."""
    sizes = [a.head_dim for a in spec.attention.values()]
    sizes += [a.indexer.dim for a in spec.attention.values() if isinstance(a, SparseAttention)]
    if isinstance(spec.residual, HyperConnections):
        sizes.append(16 * spec.residual.streams)
    return all(n >= 16 and n & (n - 1) == 0 for n in sizes)
