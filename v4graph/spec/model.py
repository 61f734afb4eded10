"""Pydantic models of a model spec: the closed set of kinds that the YAML language knows.

Field names follow the checkpoint's `config.json` where it has a word for the thing. Rules that
span several fields live in `check.py`, because a field error would hide a model validator.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from v4graph.spec.base import StrictModel

PositiveInt = Annotated[int, Field(gt=0)]
TokenId = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class HyperConnections(StrictModel):
    """Manifold-constrained hyper-connections (V4 report section 2.2)."""

    kind: Literal["hyper_connections"]
    streams: Annotated[int, Field(ge=1, le=16)]
    """Residual streams n_hc (config.json `hc_mult`)."""
    sinkhorn_iters: Annotated[int, Field(ge=1, le=1000)] = 20
    """Sinkhorn-Knopp iterations t_max (config.json `hc_sinkhorn_iters`)."""
    eps: PositiveFloat = 1e-6
    """Numerical floor in the projection (config.json `hc_eps`)."""


class PlainResidual(StrictModel):
    """The ordinary residual connection x + f(norm(x))."""

    kind: Literal["plain"]


Residual = Annotated[HyperConnections | PlainResidual, Field(discriminator="kind")]


class Yarn(StrictModel):
    """YaRN frequency interpolation; V4 applies no attention mscale."""

    factor: PositiveFloat
    original_max_position: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0


class Rope(StrictModel):
    """Interleaved rotary embedding of the last `dim` channels of a head."""

    theta: PositiveFloat
    dim: PositiveInt
    """Rotated channels; even (config.json `qk_rope_head_dim`)."""
    yarn: Yarn | None = None


RowFormat = Literal["model", "f32", "bf16", "fp8_ds", "fp8"]
"""Storage of a cache row: `model` is the compute dtype; `fp8_ds` is e4m3 in groups of 64 with one
scale byte each and the rotated channels in bf16 (584 bytes for 512 channels); `fp8` is e4m3 with
one f32 scale (132 bytes for 128 channels)."""


class Row(StrictModel):
    """One stored vector of a cache group."""

    dim: PositiveInt
    format: RowFormat = "model"


class SlidingWindowGroup(StrictModel):
    """Key-value rows of the last `window` tokens, one row a token."""

    kind: Literal["sliding_window"]
    window: PositiveInt
    """Visible tokens, the query's own included (config.json `sliding_window`)."""
    row: Row
    page_tokens: PositiveInt = 64
    """Tokens that one page of the block table covers."""


class CompressedGroup(StrictModel):
    """One row for every `ratio` tokens, kept for the whole sequence."""

    kind: Literal["compressed"]
    ratio: Annotated[int, Field(ge=2)]
    overlap: bool = False
    """Pool over the previous window's Ca and this window's Cb half (V4 report section 2.3.1)."""
    row: Row
    page_tokens: PositiveInt = 256


class CompressorStateGroup(StrictModel):
    """Projected (kv, score + ape) rows in f32 of the tokens of still open windows."""

    kind: Literal["compressor_state"]
    of: str
    """The compressed group that these rows feed."""
    page_tokens: PositiveInt = 8


CacheGroup = Annotated[
    SlidingWindowGroup | CompressedGroup | CompressorStateGroup, Field(discriminator="kind")
]


class Indexer(StrictModel):
    """Lightning indexer: which compressed rows a query attends to (V4 report section 2.3.1)."""

    heads: PositiveInt
    dim: PositiveInt
    topk: PositiveInt


class SlidingCaches(StrictModel):
    window: str


class HeavyCaches(StrictModel):
    window: str
    compressed: str
    state: str


class SparseCaches(StrictModel):
    window: str
    compressed: str
    state: str
    index: str
    index_state: str


class AttentionBase(StrictModel):
    """What all V4 attention kinds share: low-rank queries, one K=V head, grouped output."""

    heads: PositiveInt
    head_dim: PositiveInt
    q_lora_rank: PositiveInt
    o_groups: PositiveInt
    o_lora_rank: PositiveInt
    rope: str
    """Name of an entry of the spec's `rope` block."""


class SlidingAttention(AttentionBase):
    kind: Literal["sliding_attention"]
    caches: SlidingCaches


class SparseAttention(AttentionBase):
    kind: Literal["compressed_sparse_attention"]
    indexer: Indexer
    caches: SparseCaches


class HeavyAttention(AttentionBase):
    kind: Literal["heavily_compressed_attention"]
    caches: HeavyCaches


Attention = Annotated[
    SlidingAttention | SparseAttention | HeavyAttention, Field(discriminator="kind")
]


class MoeBase(StrictModel):
    """Routed experts with an optional shared expert (V4 report section 2.1)."""

    experts: PositiveInt
    topk: PositiveInt
    intermediate: PositiveInt
    shared_experts: Annotated[int, Field(ge=0, le=1)] = 1
    scoring: Literal["sqrtsoftplus", "sigmoid", "softmax"] = "sqrtsoftplus"
    norm_topk: bool = True
    """Divide the chosen experts' scores by their sum."""
    scale: PositiveFloat = 1.0
    """Routed scaling factor."""
    clamp: PositiveFloat | None = None
    """SwiGLU limit: gate <= clamp, |up| <= clamp (config.json `swiglu_limit`)."""


class HashMoe(MoeBase):
    kind: Literal["hash_moe"]


class ScoredMoe(MoeBase):
    kind: Literal["moe"]


class DenseFfn(StrictModel):
    """A dense SwiGLU feed-forward."""

    kind: Literal["dense"]
    intermediate: PositiveInt
    clamp: PositiveFloat | None = None


Ffn = Annotated[HashMoe | ScoredMoe | DenseFfn, Field(discriminator="kind")]


class LayerPattern(StrictModel):
    """A run of layers; lists repeat together, the whole pattern `count` times."""

    attention: str | list[str]
    ffn: str | list[str]
    count: PositiveInt = 1


class NoSpeculation(StrictModel):
    kind: Literal["none"]


class StoredDrafter(StrictModel):
    """What speculative modes with draft layers under `mtp.N` share."""

    num_layers: PositiveInt = 1
    """Draft layers in the checkpoint."""
    attention: str
    ffn: str


class MtpSpeculation(StoredDrafter):
    """Multi-token prediction (V4 report section 2.4): draft i comes from layer i, or recurrently
    from the last one."""

    kind: Literal["mtp"]
    num_layers: Annotated[int, Field(ge=1, le=8)] = 1
    """Draft layers in the checkpoint; no more than there can be drafts."""
    num_draft_tokens: Annotated[int, Field(ge=1, le=8)]
    mask_position_zero: bool = False
    """Zero the token embedding of the row at position 0 (some engines do; the official code
    does not)."""
    position_offset: Annotated[int, Field(ge=0, le=1)] = 0
    """Rotary position of the draft row with the streams at t, less t. Attention sees differences
    of positions alone, so this changes cached rows and roundings but no choice."""


class DsparkSpeculation(StoredDrafter):
    """DSpark (arXiv 2607.05147): the layers draft a whole block of tokens at once.

    The block is the newest token and `block_size - 1` noise tokens; a low-rank Markov head then
    makes each draft depend on the one before it. Field names follow config.json's `dspark_*`.
    """

    kind: Literal["dspark"]
    block_size: Annotated[int, Field(ge=1, le=8)]
    num_draft_tokens: Annotated[int, Field(ge=1, le=8)]
    """Drafts that are verified: the first ones of a block, at most `block_size`."""
    target_layer_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    """Main-model layers whose outputs the draft layers attend to, counted from 0."""
    noise_token_id: TokenId
    markov_rank: PositiveInt


class NgramSpeculation(StrictModel):
    """Prompt lookup: drafts are what followed an earlier occurrence of the last tokens; needs no
    weights."""

    kind: Literal["ngram"]
    num_draft_tokens: Annotated[int, Field(ge=1, le=8)]
    min_ngram: PositiveInt = 1
    """Shortest n-gram that is looked for, in tokens."""
    max_ngram: Annotated[int, Field(ge=1, le=8)] = 3
    """Longest one, tried first."""


Speculation = Annotated[
    NoSpeculation | MtpSpeculation | DsparkSpeculation | NgramSpeculation,
    Field(discriminator="kind"),
]


class Weights(StrictModel):
    """How the checkpoint stores its tensors."""

    names: Literal["deepseek_v4"] = "deepseek_v4"
    linear: Literal["f32", "bf16", "fp8_block"] = "bf16"
    """Projection matrices; `fp8_block` is e4m3 with one scale a 128 x 128 block."""
    experts: Literal["f32", "bf16", "fp8_block", "fp4"] = "bf16"
    """Routed experts; `fp4` packs two e2m1 values a byte, one scale for 32 along the input."""
    scale: Literal["e8m0", "f32"] = "e8m0"
    """Dtype of the scales of quantised tensors."""
    other: Literal["f32", "bf16"] = "bf16"
    """Embedding, head, norms, gates, compressor projections."""


class ModelSpec(StrictModel):
    """A whole model: what `v4graph.spec.load` returns and the plan is lowered from."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    max_position_embeddings: PositiveInt
    """Longest sequence, in tokens."""
    norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False
    """Whether the embedding is the head too: the checkpoint stores no `head.weight`."""
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    residual: Residual
    rope: dict[str, Rope]
    cache_groups: dict[str, CacheGroup]
    attention: dict[str, Attention]
    ffn: dict[str, Ffn]
    layers: Annotated[list[LayerPattern], Field(min_length=1)]
    speculative: Annotated[dict[str, Speculation], Field(default_factory=dict)]
    weights: Weights = Weights()

    @property
    def layer_kinds(self) -> list[tuple[str, str]]:
        """The (attention name, ffn name) pair of every layer, in order."""
        pairs: list[tuple[str, str]] = []
        for p in self.layers:
            attention = [p.attention] if isinstance(p.attention, str) else p.attention
            ffn = [p.ffn] if isinstance(p.ffn, str) else p.ffn
            width = max(len(attention), len(ffn))
            run = [(attention[i % len(attention)], ffn[i % len(ffn)]) for i in range(width)]
            pairs += run * p.count
        return pairs

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation."""
        if self.eos_token_id is None:
            return ()
        return (
            (self.eos_token_id,) if isinstance(self.eos_token_id, int) else tuple(self.eos_token_id)
        )
