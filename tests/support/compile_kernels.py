"""Compile every kernel for sm_90 without a GPU; run as a script with TRITON_INTERPRET unset.

The interpreter accepts programs that the compiler refuses. Prints a line for each compiled kernel,
`name shared_bytes spilled_bytes`, and exits with 1 at the first that cannot be compiled. With
`V4GRAPH_TUNE_KERNELS=1` every configuration of a tuned kernel is compiled, otherwise the first.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from v4graph_kernels import load
from v4graph_kernels.tuning import Tuned, tuning

TOKENS = 2


class _NoDevice:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def _compile_only() -> None:
    compile_ = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        kernel = compile_(self, *args, grid=grid, warmup=True, **kwargs)
        # A bare `write`: the project keeps print to its tools.
        line = f"{self.__name__} {kernel.metadata.shared} {_spilled(kernel.asm['cubin'])}\n"
        sys.stdout.write(line)
        return kernel

    def run_tuned(self: Tuned, *args: Any, **kwargs: Any) -> None:
        for config in self.configs if tuning() else self.configs[:1]:
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    JITFunction.run = run
    Tuned.run = run_tuned


def _spilled(cubin: bytes) -> int:
    """Bytes of stack a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(knobs.nvidia.cuobjdump.path), "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(n) for n in re.findall(r"STACK:(\d+)", told))


def _ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _bytes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def rows() -> None:
    """Both row formats, with and without norm and rotation."""
    kernels, angle = load("cache_rows"), torch.zeros(TOKENS, 32)
    for pool in (_bytes(3, 37440), _bf16(64, 512)):
        numbers = {"eps": 1e-6, "rope_dim": 64, "page_rows": 64}
        kernels.write_kv_rows(
            _bf16(TOKENS, 512), _bf16(512), angle, angle, _ids(TOKENS), pool, **numbers
        )
        kernels.write_kv_rows(_bf16(TOKENS, 512), None, None, None, _ids(TOKENS), pool, **numbers)
    kernels.write_index_rows(_bf16(TOKENS, 128), _ids(TOKENS), _bytes(3, 8448), page_rows=64)


def attention() -> None:
    """Flash's heads over both row formats, in parts and whole."""
    kernels = load("paged_attention")
    layout = {"rope_dim": 64, "window_page_rows": 64, "compressed_page_rows": 64}
    for pool in (_bytes(3, 37440), _bf16(64, 512)):
        for parts in (0, 1):
            kernels.sparse_attention(
                _bf16(TOKENS, 64, 512), pool, _ids(TOKENS, 128), pool, _ids(TOKENS, 512),
                torch.zeros(64), 0.044, **layout, num_parts=parts,
            )  # fmt: skip


def hyper() -> None:
    """Flash's streams."""
    kernels, n, d = load("hyper"), 4, 4096
    x, y, post, comb = (
        _bf16(TOKENS, n, d),
        _bf16(TOKENS, d),
        torch.zeros(TOKENS, n),
        torch.zeros(TOKENS, n, n),
    )
    weights = torch.zeros(24, n * d), torch.zeros(24), torch.zeros(3), _bf16(d)
    numbers = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6}
    kernels.hyper_enter(x, *weights, **numbers)
    kernels.hyper_leave(x, y, post, comb)
    kernels.hyper_leave_enter(x, y, post, comb, *weights, **numbers)


def index() -> None:
    """Scores over both row formats; selection in one part and in several."""
    for pool in (_bytes(3, 8448), _bf16(64, 128)):
        for tokens in (TOKENS, 512):
            load("index_scores").index_scores(
                _bf16(tokens, 64, 128), pool, _ids(tokens, 4096), _bf16(tokens, 64), page_rows=64
            )
    for entries in (2048, 65536):
        scores = torch.zeros(TOKENS, entries)
        load("topk").select_rows(scores, _ids(TOKENS), _ids(TOKENS, entries), topk=512)


def quantised() -> None:
    """Flash's projections and experts."""
    x, weight = _bf16(TOKENS, 4096), _bytes(1536, 4096).view(torch.float8_e4m3fn)
    for scale in (_bytes(12, 32), torch.zeros(12, 32)):
        load("fp8_linear").fp8_linear(x, weight, scale)
    load("fp4_experts").fp4_experts(
        x, torch.zeros(TOKENS, 6), _ids(TOKENS, 6), _bytes(2, 4096, 2048), _bytes(2, 4096, 128),
        _bytes(2, 4096, 1024), _bytes(2, 4096, 64), 10.0,
    )  # fmt: skip


def prefill() -> None:
    """The same products of many tokens."""
    many = 512
    x, weight = _bf16(many, 4096), _bytes(1536, 4096).view(torch.float8_e4m3fn)
    for scale in (_bytes(12, 32), torch.zeros(12, 32)):
        load("fp8_linear").fp8_linear(x, weight, scale)
    load("fp4_experts").fp4_experts(
        x, torch.zeros(many, 6), _ids(many, 6), _bytes(24, 4096, 2048), _bytes(24, 4096, 128),
        _bytes(24, 4096, 1024), _bytes(24, 4096, 64), 10.0,
    )  # fmt: skip


def compressor() -> None:
    """Flash's two ratios and the indexer's keys; one launch, and two."""
    kernels = load("compressor")
    for ratio, dim, form, page in ((4, 512, "fp8_ds", 37440), (128, 512, "fp8_ds", 1728),
                                   (4, 128, "fp8", 8448)):  # fmt: skip
        parts = 2 if ratio == 4 else 1
        for tokens in (TOKENS, 512):
            kernels.close_windows(
                torch.zeros(tokens, 2 * parts * dim), torch.zeros(ratio, parts * dim),
                _ids(tokens), _ids(tokens), torch.zeros(8, 2 * parts * dim),
                _ids(TOKENS, parts * ratio), _ids(TOKENS), torch.zeros(32), _bf16(dim),
                _ids(TOKENS), _bytes(3, page), overlap=parts == 2, eps=1e-6, row_format=form,
                page_rows=2 if ratio == 128 else 64, dtype=torch.bfloat16,
            )  # fmt: skip


def heads() -> None:
    """Flash's heads, with the indexer's and without; the rotation back."""
    kernels, angle = load("heads"), torch.zeros(TOKENS, 32)
    numbers = {"heads": 64, "index_dim": 128, "eps": 1e-6, "rope_dim": 64, "page_rows": 64}
    for index_heads, pool in ((64, _bytes(3, 37440)), (0, _bf16(64, 512))):
        kernels.qkv_rows(
            _bf16(TOKENS, 32768 + index_heads * 128), _bf16(TOKENS, 512), _bf16(512), angle, angle,
            _ids(TOKENS), pool, index_heads=index_heads, **numbers,
        )  # fmt: skip
    kernels.unrope(_bf16(TOKENS, 64, 512), angle, angle)


def greedy() -> None:
    """V4's vocabulary, in parts and whole."""
    for rows in (TOKENS, 512):
        load("greedy").greedy_tokens(torch.zeros(rows, 129280))


def main() -> int:
    """Compile the groups named as arguments, all of them without any."""
    _compile_only()
    driver.set_active(_NoDevice())
    every = (rows, compressor, heads, attention, hyper, index, quantised, prefill, greedy)
    groups = {f.__name__: f for f in every}
    try:
        for name in sys.argv[1:] or groups:
            groups[name]()
    except triton.compiler.errors.CompilationError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
