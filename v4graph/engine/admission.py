"""Whether an engine was built for what a request's sampling parameters ask."""

from __future__ import annotations

from collections.abc import Collection

from v4graph.engine.request import SamplingParams
from v4graph.errors import RequestError
from v4graph.plan.types import Limits


def check_params(
    params: SamplingParams, limits: Limits, vocab_size: int, eos: Collection[int] = ()
) -> None:
    """Refuse what no program can do.

    Args:
        eos: the model's own end ids.

    Raises:
        RequestError: a temperature, rule or logprobs that the engine was built without, a token id
            outside the vocabulary, or bans that leave no token; `field` names the parameter.
    """
    if limits.greedy_only and params.temperature > 0:
        raise RequestError(
            f"temperature {params.temperature:g}: this engine was built for greedy output",
            "temperature",
        )
    if params.rule_fields and not limits.logits_processing:
        name = params.rule_fields[0]
        raise RequestError(f"{name}: this engine was built without logits_processing", name)
    count = params.logprobs
    if count is not None and (not limits.max_logprobs or count > limits.max_logprobs):
        raise RequestError(
            f"logprobs {count}: this engine was built with max_logprobs {limits.max_logprobs}"
            + ("" if limits.max_logprobs else ", which is none at all"),
            "logprobs",
        )
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
        ("bad_words", [token for word in params.bad_words for token in word]),
    ):
        for token in ids:
            if token >= vocab_size:
                raise RequestError(f"{name}: token id {token} is not in 0..{vocab_size - 1}", name)
    banned = {word[0] for word in params.bad_words if len(word) == 1}
    if len(banned) == vocab_size:
        raise RequestError(
            f"bad_words: all {vocab_size} tokens of the vocabulary are banned; leave at least one",
            "bad_words",
        )
    if params.min_tokens and len(banned | params.end_ids(eos)) == vocab_size:
        raise RequestError(
            f"bad_words: all {vocab_size} tokens of the vocabulary are banned, or end ids that "
            f"min_tokens {params.min_tokens} keeps away; leave at least one",
            "bad_words",
        )
