"""Typed reading of config.json fields that collects every fault before it gives up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from math import inf
from typing import Any

from v4graph.errors import SpecError

FIXED: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("deepseek_v4",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "num_key_value_heads": (1,),
    "topk_method": ("noaux_tc",),
}
"""Keys of which one value is supported; all but `model_type` may be absent."""

DEFAULTS: Mapping[str, Any] = {
    **{"vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43, "head_dim": 512},
    **{"num_attention_heads": 64, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024},
    **{"index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "sliding_window": 128},
    **{"n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1},
    **{"moe_intermediate_size": 2048, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0},
    **{"scoring_func": "sqrtsoftplus", "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6},
    **{"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "compress_rope_theta": 160000.0},
    **{"max_position_embeddings": 1048576, "bos_token_id": 0, "eos_token_id": 1},
}
"""What transformers 5.24 takes for keys that are absent; null is no absence."""

IRRELEVANT = frozenset(
    {
        *("_name_or_path", "architectures", "attribute_map", "auto_map", "dtype", "torch_dtype"),
        *("transformers_version", "use_cache", "return_dict", "is_encoder_decoder"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id"),
        *("attention_dropout", "initializer_range", "aux_loss_alpha", "seq_aux"),
        *("router_aux_loss_coef", "router_jitter_noise", "id2label", "label2id", "problem_type"),
        "chunk_size_feed_forward",
    }
)
"""Keys that say nothing about what an inference step computes."""

_MISSING: Any = object()


class Fields:
    """A JSON object of which every key must be read, fixed, irrelevant or ignored by request."""

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        errors: list[str],
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.values = values
        self.defaults = defaults or {}
        self.filled: dict[str, Any] = {}
        """Absent keys that were asked for, and the defaults that they got."""
        self.where = where
        self.errors = errors
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.values.get(key) is not None

    def any(self, key: str, default: Any = None) -> Any:
        """The value of `key` as it is; of an absent one `default`, or else that of `defaults`."""
        self._read.add(key)
        if key in self.values or default is not None or key not in self.defaults:
            return self.values.get(key, default)
        self.filled[key] = self.defaults[key]
        return self.filled[key]

    def fail(self, key: str, expected: str) -> None:
        """Note a fault of `key`: its value, or its absence, and what was expected."""
        self._read.add(key)
        if key in self.values:
            found = json.dumps(self.values[key])
            found = found if len(found) <= 120 else found[:117] + "..."
        else:
            found = "absent"
        self.errors.append(f"{self.where}: {key}: {found}; expected {expected}")

    def integer(self, key: str, least: int = 1, default: int = _MISSING) -> int:
        """An integer of at least `least`; a fault returns `least`."""
        value = self.any(key)
        if value is None and default is not _MISSING:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.fail(key, f"an integer of at least {least}")
            return least
        return value

    def number(self, key: str, default: float = _MISSING) -> float:
        """A positive number; a fault returns 1. Whole floats become integers, as YAML writes."""
        value = self.any(key)
        if value is None and default is not _MISSING:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            self.fail(key, "a positive number")
            return 1.0
        return value

    def choice(self, key: str, choices: Iterable[Any], default: Any = _MISSING) -> Any:
        """One of `choices`; a fault returns the first."""
        options = tuple(choices)
        value = self.any(key)
        if value is None and default is not _MISSING:
            return default
        # `True == 1` in Python, so compare types too.
        if not any(value == o and type(value) is type(o) for o in options):
            self.fail(key, " or ".join(json.dumps(o) for o in options))
            return options[0]
        return value

    def block(self, key: str) -> Fields | None:
        """The object under `key`; None when it is absent or null."""
        value = self.any(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(key, "an object")
            return None
        return Fields(value, f"{self.where}: {key}", self.errors)

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Note every key that nothing has read."""
        skip = set(ignored)
        for key in self.values:
            if key in self._read or key in skip:
                continue
            close = get_close_matches(key, self._read, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            self.errors.append(
                f"{self.where}: {key}: {json.dumps(self.values[key])[:80]}; expected no such key: "
                f"v4graph does not know what it changes{hint}"
            )


def raise_errors(errors: list[str]) -> None:
    """Raise one SpecError that lists all faults, if there are any."""
    if errors:
        raise SpecError("\n".join(errors))
