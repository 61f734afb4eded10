"""The cases of `kernels.py`: operators at V4-Flash's shapes, random arguments on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from v4graph.ops import quantised
from v4graph.ops.custom import attention, compressor, heads, hyper, index, rows, sampling
from v4graph.ops.custom import quantised as products
from v4graph.ops.custom.attention import _sparse_attention
from v4graph.ops.custom.hyper import _hyper_leave_enter

NUMBERS = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6}


@dataclass
class Case:
    """One operator at one shape."""

    name: str
    make: Callable[[], tuple]
    """Fresh arguments on the GPU."""
    run: Callable
    bytes_moved: int
    reference: Callable | None = None
    """The same in PyTorch, if it fits in memory."""
    shape: dict[str, int | str] = field(default_factory=dict)
    operations: int = 0
    """Multiplications and additions, where these are the limit."""


def bf16(*shape: int) -> Tensor:
    """Normal values on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def random_bytes(*shape: int, low: int = 0, high: int = 120) -> Tensor:
    """Bytes without e4m3's NaN codes."""
    return torch.randint(low, high, shape, device="cuda", dtype=torch.uint8)


def packed_pool(num_pages: int, page_rows: int) -> Tensor:
    """Pages of `fp8_ds` rows; scales about 1."""
    pool = random_bytes(num_pages, page_rows * 584 + (-page_rows * 584) % 576, low=60, high=64)
    pool[:, page_rows * 576 :] = 120
    return pool


def slot_lists(tokens: int, width: int, num_rows: int, first: int) -> Tensor:
    """Distinct random rows for every token."""
    picks = [torch.randperm(num_rows - first, device="cuda")[:width] for _ in range(tokens)]
    return first + torch.stack(picks)


def attention_cases() -> Iterator[Case]:
    """Window of 128 rows and 512 selected ones, 64 heads."""
    for packed in (True, False):
        for tokens in (1, 4, 8, 32, 128):
            row = 584 if packed else 1024

            def make(tokens: int = tokens, packed: bool = packed) -> tuple:
                pool = packed_pool(1024, 64) if packed else bf16(65536, 512)
                near = slot_lists(tokens, 128, 65536, 64)
                far = slot_lists(tokens, 512, 65536, 64)
                sink = torch.randn(64, device="cuda")
                return bf16(tokens, 64, 512), pool, near, pool, far, sink, 512**-0.5

            layout = {"rope_dim": 64, "window_page_rows": 64, "compressed_page_rows": 64}
            yield Case(
                "attention",
                make,
                lambda *a, layout=layout: attention.sparse_attention(*a, **layout),
                tokens * (640 * (row + 8) + 2 * 64 * 512 * 2),
                lambda *a, layout=layout: _sparse_attention(*a, **layout),
                {"tokens": tokens, "rows": "fp8_ds" if packed else "bf16"},
            )


def rows_cases() -> Iterator[Case]:
    """Window rows of a step."""
    for tokens in (1, 8, 128):

        def make(tokens: int = tokens) -> tuple:
            angle = torch.randn(tokens, 32, device="cuda")
            slots = 64 + torch.randperm(4096, device="cuda")[:tokens]
            kv = bf16(tokens, 1600)[:, 1024:1536]
            return kv, bf16(512), angle, angle, slots, packed_pool(128, 64)

        yield Case(
            "write_kv_rows",
            make,
            lambda *a: rows.write_kv_rows(*a, eps=1e-6, rope_dim=64, page_rows=64),
            tokens * (1024 + 256 + 584 + 8) + 1024,
            shape={"tokens": tokens},
        )


def heads_cases() -> Iterator[Case]:
    """Queries of 64 heads and 64 index heads, window rows; then the outputs of the heads."""
    for tokens in (1, 8, 32, 8192):

        def make(tokens: int = tokens) -> tuple:
            angle = torch.randn(tokens, 32, device="cuda")
            slots = 64 + torch.randperm(8192, device="cuda")[:tokens]
            kv = bf16(tokens, 1600)[:, 1024:1536]
            return bf16(tokens, 40960), kv, bf16(512), angle, angle, slots, packed_pool(192, 64)

        numbers = {"heads": 64, "index_heads": 64, "index_dim": 128, "eps": 1e-6}
        yield Case(
            "qkv_rows",
            make,
            lambda *a, n=numbers: heads.qkv_rows(*a, **n, rope_dim=64, page_rows=64),
            tokens * (2 * 40960 * 2 + 1024 + 256 + 584),
            lambda *a, n=numbers: heads._qkv_rows(*a, **n, rope_dim=64, page_rows=64),
            {"tokens": tokens},
        )

        def make_outputs(tokens: int = tokens) -> tuple:
            angle = torch.randn(tokens, 32, device="cuda")
            return bf16(tokens, 64, 512), angle, angle

        yield Case(
            "unrope",
            make_outputs,
            heads.unrope,
            tokens * (2 * 64 * 64 * 2 + 256),
            shape={"tokens": tokens},
        )


def compressor_cases() -> Iterator[Case]:
    """A step that closes a window of every request: one token each, and a prompt of 8,192."""
    for ratio, dim, form in ((4, 512, "fp8_ds"), (128, 512, "fp8_ds"), (4, 128, "fp8")):
        for tokens, windows in ((1, 1), (32, 32), (8192, 8192 // ratio)):
            yield _closing_case(ratio, dim, form, tokens, windows)


def _closing_case(ratio: int, dim: int, form: str, tokens: int, windows: int) -> Case:
    parts = 2 if ratio == 4 else 1
    width, span = parts * dim, parts * ratio

    def make() -> tuple:
        first = torch.arange(windows, device="cuda") * ratio
        behind = torch.arange(span, device="cuda") - (span - ratio)
        read = (first[:, None] + behind).clamp_min(-span)
        read = torch.where(read < 0, -1, read + 64)
        # One token a request closes its window; a prompt's tokens are the rows of all windows.
        last = read[:, -1] if windows == tokens else 64 + torch.arange(tokens, device="cuda")
        pool = packed_pool(windows // 64 + 2, 64)
        if form == "fp8":
            pool = random_bytes(windows // 64 + 2, 8448)
        return (
            torch.randn(tokens, 2 * width, device="cuda"),
            torch.randn(ratio, width, device="cuda"),
            last - 64,
            last,
            torch.randn(64 + windows * ratio, 2 * width, device="cuda"),
            read,
            first + ratio - 1,
            torch.rand(32, device="cuda"),
            bf16(dim),
            64 + torch.arange(windows, device="cuda"),
            pool,
        )

    numbers = {"overlap": parts == 2, "eps": 1e-6, "row_format": form, "page_rows": 64}
    return Case(
        "close_windows",
        make,
        lambda *a: compressor.close_windows(*a, **numbers, dtype=torch.bfloat16),
        tokens * width * 16 + windows * (span * dim * 8 + dim + 136),
        shape={"ratio": ratio, "dim": dim, "tokens": tokens, "windows": windows},
    )


def hyper_cases() -> Iterator[Case]:
    """Between two sublayers."""
    for tokens in (1, 4, 8, 32, 128):

        def make(tokens: int = tokens) -> tuple:
            fn, base = torch.randn(24, 16384, device="cuda"), torch.randn(24, device="cuda")
            post, comb = torch.rand(tokens, 4), torch.rand(tokens, 4, 4)
            weights = fn * 16384**-0.5, base, torch.ones(3, device="cuda"), bf16(4096)
            return bf16(tokens, 4, 4096), bf16(tokens, 4096), post.cuda(), comb.cuda(), *weights

        yield Case(
            "hyper_leave_enter",
            make,
            lambda *a: hyper.hyper_leave_enter(*a, **NUMBERS),
            24 * 16384 * 4 + tokens * 4096 * 2 * (4 + 1 + 4 + 4 + 1),
            lambda *a: _hyper_leave_enter(*a, **NUMBERS),
            {"tokens": tokens},
        )


def index_cases() -> Iterator[Case]:
    """Scores over all compressed rows of a context, and the selection of 512."""
    for tokens, entries in (
        (1, 2048), (1, 32768), (1, 262144), (8, 32768), (32, 8192), (2048, 8192),
    ):  # fmt: skip

        def make(tokens: int = tokens, entries: int = entries) -> tuple:
            pool = random_bytes(entries // 64 + 1, 8448, low=40, high=80)
            pool[:, 8192:].view(torch.float32).fill_(1.0)
            slots = slot_lists(1, entries, entries + 64, 64).expand(tokens, -1).contiguous()
            return bf16(tokens, 64, 128), pool, slots, bf16(tokens, 64)

        yield Case(
            "index_scores",
            make,
            lambda *a: index.paged_index_scores(*a, page_rows=64),
            entries * 132 + tokens * entries * 12,
            shape={"tokens": tokens, "entries": entries},
            operations=2 * 64 * 128 * entries * tokens,
        )

        def make_scores(tokens: int = tokens, entries: int = entries) -> tuple:
            full = torch.full((tokens,), entries, device="cuda")
            return torch.randn(tokens, entries, device="cuda"), full

        yield Case(
            "select_rows",
            make_scores,
            lambda s, n: index.select_rows(s, n, None, topk=512),
            tokens * entries * 4,
            lambda s, n: index._select_rows(s, n, None, topk=512),
            {"tokens": tokens, "entries": entries},
        )


def linear_cases() -> Iterator[Case]:
    """The projections of a layer, by output and input channels."""
    shapes = {
        "wq_b": (32768, 1024),
        "wq_b+indexer": (40960, 1024),
        "wo_b": (4096, 8192),
        "wq_a+wkv": (1536, 4096),
        "shared w13": (4096, 4096),
        "shared w2": (4096, 2048),
    }
    for name, (o, i) in shapes.items():
        for tokens in (1, 8, 32, 128):

            def make(o: int = o, i: int = i, tokens: int = tokens) -> tuple:
                weight = random_bytes(o, i).view(torch.float8_e4m3fn)
                scale = random_bytes(o // 128, i // 128, low=110, high=115)
                return bf16(tokens, i), weight, scale

            size = o * i + tokens * (o + i) * 2
            shape = {"weight": name, "tokens": tokens}
            yield Case("fp8_linear", make, products.fp8_linear, size, quantised.fp8_linear, shape)
    for tokens in (1, 8, 32, 128):

        def make_grouped(tokens: int = tokens) -> tuple:
            weight = random_bytes(8192, 4096).view(torch.float8_e4m3fn)
            return bf16(tokens, 8, 4096), weight, random_bytes(64, 32, low=110, high=115)

        yield Case(
            "grouped_fp8_linear",
            make_grouped,
            products.grouped_fp8_linear,
            8192 * 4096 + tokens * 8 * 5120 * 2,
            quantised.grouped_fp8_linear,
            {"weight": "wo_a", "tokens": tokens},
        )


def experts_cases() -> Iterator[Case]:
    """Six of 256 experts a token; one input set, for the experts fill 3.4 GB."""
    E, D, J = 256, 4096, 2048
    w13, w2 = random_bytes(E, 2 * J, D // 2, high=256), random_bytes(E, D, J // 2, high=256)
    s13, s2 = random_bytes(E, 2 * J, D // 32, low=113, high=118), None
    s2 = random_bytes(E, D, J // 32, low=113, high=118)
    one = 3 * D * J // 2 + 3 * D * J // 32
    for tokens in (1, 8, 32, 128):
        chosen = torch.stack([torch.randperm(E, device="cuda")[:6] for _ in range(tokens)])

        def make(tokens: int = tokens) -> tuple:
            ids = torch.stack([torch.randperm(E, device="cuda")[:6] for _ in range(tokens)])
            weights = torch.rand(tokens, 6, device="cuda")
            return bf16(tokens, D), weights, ids, w13, s13, w2, s2, 10.0

        # Expected number of distinct experts; the sets differ a little.
        distinct = E * (1 - (1 - 6 / E) ** tokens)
        yield Case(
            "fp4_experts",
            make,
            products.fp4_experts,
            int(distinct * one),
            quantised.fp4_experts if tokens <= 8 else None,
            {"tokens": tokens, "touched": chosen.unique().numel()},
        )


def prefill_cases() -> Iterator[Case]:
    """Products of many tokens: bounded by arithmetic, so their rate is told too."""
    for name, (o, i) in {"wq_b": (32768, 1024), "wo_b": (4096, 8192)}.items():
        for tokens in (512, 2048, 8192):

            def make(o: int = o, i: int = i, tokens: int = tokens) -> tuple:
                weight = random_bytes(o, i).view(torch.float8_e4m3fn)
                return bf16(tokens, i), weight, random_bytes(o // 128, i // 128, low=110, high=115)

            yield Case(
                "fp8_linear",
                make,
                products.fp8_linear,
                o * i + tokens * (o + i) * 2,
                quantised.fp8_linear,
                {"weight": name, "tokens": tokens},
                2 * o * i * tokens,
            )
    E, D, J, K = 256, 4096, 2048, 6
    w13, w2 = random_bytes(E, 2 * J, D // 2, high=256), random_bytes(E, D, J // 2, high=256)
    s13 = random_bytes(E, 2 * J, D // 32, low=113, high=118)
    s2 = random_bytes(E, D, J // 32, low=113, high=118)
    for tokens in (128, 256, 512, 2048, 8192):

        def make_experts(tokens: int = tokens) -> tuple:
            ids = torch.rand(tokens, E, device="cuda").argsort(1)[:, :K]
            weights = torch.rand(tokens, K, device="cuda")
            return bf16(tokens, D), weights, ids, w13, s13, w2, s2, 10.0

        distinct = E * (1 - (1 - K / E) ** tokens)
        yield Case(
            "fp4_experts",
            make_experts,
            products.fp4_experts,
            int(distinct * (3 * D * J // 2 + 3 * D * J // 32)),
            shape={"tokens": tokens},
            operations=6 * D * J * K * tokens,
        )


def greedy_cases() -> Iterator[Case]:
    """V4's vocabulary."""
    for r in (1, 4, 32, 256):
        yield Case(
            "greedy_tokens",
            lambda r=r: (torch.randn(r, 129280, device="cuda"),),
            sampling.greedy_tokens,
            r * 129280 * 4,
            sampling._greedy_tokens,
            {"rows": r},
        )


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "attention": attention_cases,
    "rows": rows_cases,
    "heads": heads_cases,
    "compressor": compressor_cases,
    "hyper": hyper_cases,
    "index": index_cases,
    "linear": linear_cases,
    "experts": experts_cases,
    "greedy": greedy_cases,
    "prefill": prefill_cases,
}
