"""Random tiny V4 models: a spec from a few numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from v4graph.spec.model import ModelSpec


@dataclass(frozen=True)
class Tiny:
    """Dimensions of a tiny model; `kinds` lists the attention of every layer."""

    kinds: tuple[str, ...] = ("swa", "csa", "hca", "csa")
    csa_ratio: int = 4
    hca_ratio: int = 8
    window: int = 16
    topk: int = 8
    heads: int = 4
    head_dim: int = 32
    rope_dim: int = 16
    o_groups: int = 2
    index_heads: int = 24
    index_dim: int = 32
    streams: int = 4
    yarn: bool = True
    hash_layers: int = 1
    hidden: int = 48
    experts: int = 6
    experts_topk: int = 2
    vocab: int = 96
    page_tokens: int = 16
    max_len: int = 2048
    residual: str = "hyper_connections"
    dspark: tuple[int, int] | None = None
    """(layers, block size) of a DSpark drafter in place of the MTP layer."""
    row_format: str = "model"
    """Of window and compressed rows; with `fp8_ds` index rows are `fp8`."""

    def data(self) -> dict[str, Any]:
        """The spec as plain data."""
        shared = {
            "heads": self.heads,
            "head_dim": self.head_dim,
            "q_lora_rank": 24,
            "o_groups": self.o_groups,
            "o_lora_rank": 16,
        }
        csa_page = _multiple(self.page_tokens, self.csa_ratio)
        hca_page = _multiple(self.page_tokens, self.hca_ratio)
        index_format = "fp8" if self.row_format == "fp8_ds" else self.row_format
        row = {"dim": self.head_dim, "format": self.row_format}
        index_row = {"dim": self.index_dim, "format": index_format}
        groups: dict[str, Any] = {
            "window": {
                "kind": "sliding_window",
                "window": self.window,
                "row": row,
                "page_tokens": self.page_tokens,
            }
        }
        attention: dict[str, Any] = {
            "swa": {
                "kind": "sliding_attention",
                "rope": "main",
                "caches": {"window": "window"},
                **shared,
            }
        }
        if "csa" in self.kinds:
            csa = {"kind": "compressed", "ratio": self.csa_ratio, "overlap": True}
            groups["csa_kv"] = {**csa, "row": row, "page_tokens": csa_page}
            groups["csa_index"] = {**csa, "row": index_row, "page_tokens": csa_page}
            groups["csa_state"] = {"kind": "compressor_state", "of": "csa_kv"}
            groups["index_state"] = {
                "kind": "compressor_state",
                "of": "csa_index",
                "page_tokens": 4,
            }
            attention["csa"] = {
                "kind": "compressed_sparse_attention",
                "rope": "compress",
                "indexer": {"heads": self.index_heads, "dim": self.index_dim, "topk": self.topk},
                "caches": {
                    "window": "window",
                    "compressed": "csa_kv",
                    "state": "csa_state",
                    "index": "csa_index",
                    "index_state": "index_state",
                },
                **shared,
            }
        if "hca" in self.kinds:
            groups["hca_kv"] = {
                "kind": "compressed",
                "ratio": self.hca_ratio,
                "row": row,
                "page_tokens": hca_page,
            }
            groups["hca_state"] = {"kind": "compressor_state", "of": "hca_kv"}
            attention["hca"] = {
                "kind": "heavily_compressed_attention",
                "rope": "compress",
                "caches": {"window": "window", "compressed": "hca_kv", "state": "hca_state"},
                **shared,
            }
        ropes: dict[str, Any] = {"main": {"theta": 10000, "dim": self.rope_dim}}
        if set(self.kinds) - {"swa"}:
            ropes["compress"] = {"theta": 160000, "dim": self.rope_dim}
            if self.yarn:
                ropes["compress"]["yarn"] = {"factor": 4, "original_max_position": 64}
        moe = {
            "experts": self.experts,
            "topk": self.experts_topk,
            "intermediate": 32,
            "scale": 1.5,
            "clamp": 10.0,
        }
        ffn = {"routed": {"kind": "moe", **moe}}
        if self.hash_layers:
            ffn["hash"] = {"kind": "hash_moe", **moe}
        residual: dict[str, Any] = {"kind": self.residual}
        if self.residual == "hyper_connections":
            residual["streams"] = self.streams
        return {
            "name": "tiny",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "max_position_embeddings": self.max_len,
            "eos_token_id": 1,
            "residual": residual,
            "rope": ropes,
            "cache_groups": groups,
            "attention": attention,
            "ffn": ffn,
            "layers": [
                {"attention": kind, "ffn": "hash" if i < self.hash_layers else "routed"}
                for i, kind in enumerate(self.kinds)
            ],
            "speculative": {"none": {"kind": "none"}, **self._drafter()},
            "weights": {"linear": "f32", "experts": "f32", "other": "f32"},
        }

    def _drafter(self) -> dict[str, Any]:
        layer = {"attention": "swa", "ffn": "routed"}
        if self.dspark is None:
            return {"mtp": {"kind": "mtp", "num_draft_tokens": 3, **layer}}
        layers, size = self.dspark
        block = {"num_layers": layers, "block_size": size, "num_draft_tokens": size}
        last = len(self.kinds) - 1
        features = {
            "target_layer_ids": [last - 1, last] if last else [last],
            "noise_token_id": self.vocab - 2,
            "markov_rank": self.hidden,
        }
        return {"dspark": {"kind": "dspark", **block, **features, **layer}}

    def spec(self) -> ModelSpec:
        """The validated spec."""
        return ModelSpec.model_validate(self.data())


def _multiple(tokens: int, ratio: int) -> int:
    """The page size nearest above `tokens` that the ratio divides."""
    return -(-tokens // ratio) * ratio


SHAPES: dict[str, Tiny] = {
    "sliding": Tiny(kinds=("swa", "swa"), window=8, hash_layers=0),
    "sliding_hash": Tiny(kinds=("swa", "swa", "swa"), window=128, hash_layers=3),
    "csa": Tiny(kinds=("csa",), topk=4, hash_layers=0),
    "csa_wide": Tiny(kinds=("csa", "csa"), csa_ratio=8, topk=2, window=8, yarn=False),
    "csa_all": Tiny(kinds=("csa",), topk=64, window=33, rope_dim=8),
    "hca8": Tiny(kinds=("hca",), hca_ratio=8, window=17, hash_layers=0),
    "hca128": Tiny(kinds=("hca", "hca"), hca_ratio=128, window=64),
    "mixed": Tiny(),
    "mixed128": Tiny(kinds=("swa", "swa", "csa", "hca", "csa"), hca_ratio=128, hash_layers=3),
    "hca_first": Tiny(kinds=("hca", "csa"), hca_ratio=16, streams=2, yarn=False, hash_layers=0),
    "two_streams": Tiny(streams=2, heads=8, o_groups=4, head_dim=16, rope_dim=8, topk=16),
    "one_group": Tiny(heads=2, o_groups=1, head_dim=64, rope_dim=32, index_dim=32, window=128),
    "many_heads": Tiny(heads=16, o_groups=8, head_dim=16, rope_dim=16, index_dim=16, topk=3),
    "many_experts": Tiny(experts=16, experts_topk=6, kinds=("csa", "hca"), hash_layers=2, topk=5),
}
"""The parity configurations, by name."""


def with_pages(tiny: Tiny, page_tokens: int) -> Tiny:
    """The same model over pages of another size."""
    return replace(tiny, page_tokens=page_tokens)
