"""A small spec that uses every block, for tests that break one line of it."""

SMALL = """\
name: small
vocab_size: 100
hidden_size: 64
max_position_embeddings: 256
eos_token_id: 1
residual: {kind: hyper_connections, streams: 2}
rope:
  main: {theta: 10000, dim: 8}
  far: {theta: 10000, dim: 8, yarn: {factor: 4, original_max_position: 64}}
cache_groups:
  window: {kind: sliding_window, window: 16, row: {dim: 32}}
  kv: {kind: compressed, ratio: 4, overlap: true, row: {dim: 32}, page_tokens: 16}
  keys: {kind: compressed, ratio: 4, overlap: true, row: {dim: 16}, page_tokens: 16}
  kv_state: {kind: compressor_state, of: kv}
  keys_state: {kind: compressor_state, of: keys}
  far_kv: {kind: compressed, ratio: 8, row: {dim: 32}, page_tokens: 16}
  far_state: {kind: compressor_state, of: far_kv}
attention:
  swa:
    kind: sliding_attention
    heads: 4
    head_dim: 32
    q_lora_rank: 16
    o_groups: 2
    o_lora_rank: 8
    rope: main
    caches: {window: window}
  csa:
    like: swa
    kind: compressed_sparse_attention
    rope: far
    indexer: {heads: 2, dim: 16, topk: 4}
    caches: {window: window, compressed: kv, state: kv_state, index: keys, index_state: keys_state}
  hca:
    like: swa
    kind: heavily_compressed_attention
    rope: far
    caches: {window: window, compressed: far_kv, state: far_state}
ffn:
  hash: {kind: hash_moe, experts: 4, topk: 2, intermediate: 32}
  routed: {like: hash, kind: moe}
layers:
  - {attention: swa, ffn: hash}
  - {attention: [csa, hca], ffn: routed, count: 2}
speculative:
  none: {kind: none}
  mtp: {kind: mtp, num_draft_tokens: 2, attention: swa, ffn: routed}
weights: {linear: bf16}
"""


def changed(*replacements: tuple[str, str]) -> str:
    """SMALL with each (old, new) applied to the first occurrence of `old`."""
    text = SMALL
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text
