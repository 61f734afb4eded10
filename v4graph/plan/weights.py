"""The checkpoint inventory: every tensor of a model by name, dtype and shape. No torch, no I/O.

Names, dtypes and shapes are those of the published DeepSeek-V4 safetensors headers (Flash: 69,187
tensors, 159,609,485,896 bytes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod

from v4graph.spec.model import (
    Attention,
    CompressedGroup,
    DenseFfn,
    DsparkSpeculation,
    Ffn,
    HashMoe,
    HeavyAttention,
    HyperConnections,
    ModelSpec,
    MtpSpeculation,
    SparseAttention,
)

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}
FP8_BLOCK = 128
FP4_GROUP = 32
_PLAIN = {"f32": "F32", "bf16": "BF16"}
_SCALE = {"f32": "F32", "e8m0": "F8_E8M0"}


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor; `dtype` is the safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, header excluded."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class _Inventory:
    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.other = _PLAIN[spec.weights.other]
        self.scale = _SCALE[spec.weights.scale]

    def linear(self, name: str, out: int, inp: int) -> Iterator[TensorEntry]:
        yield from self._matrix(name, out, inp, self.spec.weights.linear)

    def _matrix(self, name: str, out: int, inp: int, fmt: str) -> Iterator[TensorEntry]:
        if fmt == "fp8_block":
            yield TensorEntry(f"{name}.weight", "F8_E4M3", (out, inp))
            blocks = (ceil(out / FP8_BLOCK), ceil(inp / FP8_BLOCK))
            yield TensorEntry(f"{name}.scale", self.scale, blocks)
        elif fmt == "fp4":
            yield TensorEntry(f"{name}.weight", "I8", (out, inp // 2))
            yield TensorEntry(f"{name}.scale", self.scale, (out, inp // FP4_GROUP))
        else:
            yield TensorEntry(f"{name}.weight", _PLAIN[fmt], (out, inp))

    def plain(self, name: str, *shape: int) -> Iterator[TensorEntry]:
        yield TensorEntry(name, self.other, shape)

    def f32(self, name: str, *shape: int) -> Iterator[TensorEntry]:
        yield TensorEntry(name, "F32", shape)

    def attention(self, p: str, a: Attention) -> Iterator[TensorEntry]:
        hidden, width = self.spec.hidden_size, a.heads * a.head_dim
        yield from self.linear(f"{p}.wq_a", a.q_lora_rank, hidden)
        yield from self.linear(f"{p}.wq_b", width, a.q_lora_rank)
        yield from self.linear(f"{p}.wkv", a.head_dim, hidden)
        yield from self.linear(f"{p}.wo_a", a.o_groups * a.o_lora_rank, width // a.o_groups)
        yield from self.linear(f"{p}.wo_b", hidden, a.o_groups * a.o_lora_rank)
        yield from self.plain(f"{p}.q_norm.weight", a.q_lora_rank)
        yield from self.plain(f"{p}.kv_norm.weight", a.head_dim)
        yield from self.f32(f"{p}.attn_sink", a.heads)
        if isinstance(a, SparseAttention | HeavyAttention):
            yield from self.compressor(f"{p}.compressor", a.caches.compressed)
        if isinstance(a, SparseAttention):
            index = a.indexer
            yield from self.linear(f"{p}.indexer.wq_b", index.heads * index.dim, a.q_lora_rank)
            yield from self.plain(f"{p}.indexer.weights_proj.weight", index.heads, hidden)
            yield from self.compressor(f"{p}.indexer.compressor", a.caches.index)

    def compressor(self, p: str, group_name: str) -> Iterator[TensorEntry]:
        group = self.spec.cache_groups[group_name]
        assert isinstance(group, CompressedGroup)  # noqa: S101 (spec.check proved it)
        width = group.row.dim * (2 if group.overlap else 1)
        yield from self.plain(f"{p}.wkv.weight", width, self.spec.hidden_size)
        yield from self.plain(f"{p}.wgate.weight", width, self.spec.hidden_size)
        yield from self.plain(f"{p}.norm.weight", group.row.dim)
        yield from self.f32(f"{p}.ape", group.ratio, width)

    def swiglu(self, p: str, intermediate: int, fmt: str) -> Iterator[TensorEntry]:
        hidden = self.spec.hidden_size
        yield from self._matrix(f"{p}.w1", intermediate, hidden, fmt)
        yield from self._matrix(f"{p}.w2", hidden, intermediate, fmt)
        yield from self._matrix(f"{p}.w3", intermediate, hidden, fmt)

    def ffn(self, p: str, f: Ffn) -> Iterator[TensorEntry]:
        weights = self.spec.weights
        if isinstance(f, DenseFfn):
            yield from self.swiglu(p, f.intermediate, weights.linear)
            return
        yield from self.plain(f"{p}.gate.weight", f.experts, self.spec.hidden_size)
        if isinstance(f, HashMoe):
            yield TensorEntry(f"{p}.gate.tid2eid", "I64", (self.spec.vocab_size, f.topk))
        else:
            yield from self.f32(f"{p}.gate.bias", f.experts)
        for e in range(f.experts):
            yield from self.swiglu(f"{p}.experts.{e}", f.intermediate, weights.experts)
        if f.shared_experts:
            yield from self.swiglu(f"{p}.shared_experts", f.intermediate, weights.linear)

    def hyper(self, prefix: str) -> Iterator[TensorEntry]:
        r = self.spec.residual
        if isinstance(r, HyperConnections):
            mixes = (2 + r.streams) * r.streams
            yield from self.f32(f"{prefix}_fn", mixes, r.streams * self.spec.hidden_size)
            yield from self.f32(f"{prefix}_base", mixes)
            yield from self.f32(f"{prefix}_scale", 3)

    def hyper_head(self, prefix: str) -> Iterator[TensorEntry]:
        r = self.spec.residual
        if isinstance(r, HyperConnections):
            yield from self.f32(f"{prefix}hc_head_fn", r.streams, r.streams * self.spec.hidden_size)
            yield from self.f32(f"{prefix}hc_head_base", r.streams)
            yield from self.f32(f"{prefix}hc_head_scale", 1)

    def block(self, p: str, attention: str, ffn: str) -> Iterator[TensorEntry]:
        yield from self.attention(f"{p}.attn", self.spec.attention[attention])
        yield from self.ffn(f"{p}.ffn", self.spec.ffn[ffn])
        yield from self.plain(f"{p}.attn_norm.weight", self.spec.hidden_size)
        yield from self.plain(f"{p}.ffn_norm.weight", self.spec.hidden_size)
        yield from self.hyper(f"{p}.hc_attn")
        yield from self.hyper(f"{p}.hc_ffn")

    def mtp(self, mode: MtpSpeculation) -> Iterator[TensorEntry]:
        hidden = self.spec.hidden_size
        for i in range(mode.num_layers):
            p = f"mtp.{i}"
            yield from self.block(p, mode.attention, mode.ffn)
            yield from self.linear(f"{p}.e_proj", hidden, hidden)
            yield from self.linear(f"{p}.h_proj", hidden, hidden)
            for norm in ("enorm", "hnorm", "norm"):
                yield from self.plain(f"{p}.{norm}.weight", hidden)
            yield from self.hyper_head(f"{p}.")

    def dspark(self, mode: DsparkSpeculation) -> Iterator[TensorEntry]:
        hidden, rank = self.spec.hidden_size, mode.markov_rank
        last = mode.num_layers - 1
        for i in range(mode.num_layers):
            p = f"mtp.{i}"
            yield from self.block(p, mode.attention, mode.ffn)
            if i == 0:
                yield from self.linear(
                    f"{p}.main_proj", hidden, len(mode.target_layer_ids) * hidden
                )
                yield from self.plain(f"{p}.main_norm.weight", hidden)
            if i == last:
                yield from self.plain(f"{p}.norm.weight", hidden)
                yield from self.hyper_head(f"{p}.")
                for part in ("markov_w1", "markov_w2"):
                    name = f"{p}.markov_head.{part}.weight"
                    yield from self.plain(name, self.spec.vocab_size, rank)
                yield from self.plain(f"{p}.confidence_head.proj.weight", 1, hidden + rank)


def head_tensor(spec: ModelSpec) -> str:
    """The tensor `[V, D]` that projects on the vocabulary: the embedding where the two are tied."""
    return "embed.weight" if spec.tie_word_embeddings else "head.weight"


def main_inventory(spec: ModelSpec) -> list[TensorEntry]:
    """Every tensor of the main model, in checkpoint order."""
    inv = _Inventory(spec)
    out = list(inv.plain("embed.weight", spec.vocab_size, spec.hidden_size))
    for i, (attention, ffn) in enumerate(spec.layer_kinds):
        out += inv.block(f"layers.{i}", attention, ffn)
    out += inv.plain("norm.weight", spec.hidden_size)
    if not spec.tie_word_embeddings:
        out += inv.plain("head.weight", spec.vocab_size, spec.hidden_size)
    out += inv.hyper_head("")
    return out


def draft_inventory(spec: ModelSpec) -> list[TensorEntry]:
    """Every tensor of the draft layers; empty when no speculative mode stores weights.

    Modes of one kind share the checkpoint's draft layers, so the first one decides.
    """
    for mode in spec.speculative.values():
        if isinstance(mode, MtpSpeculation):
            return list(_Inventory(spec).mtp(mode))
        if isinstance(mode, DsparkSpeculation):
            return list(_Inventory(spec).dspark(mode))
    return []


def inventory(spec: ModelSpec) -> list[TensorEntry]:
    """Every tensor of the checkpoint: main model, then draft layers."""
    return main_inventory(spec) + draft_inventory(spec)
