"""Whether an engine was built for what a request's sampling parameters ask."""

from __future__ import annotations

from v4graph.engine.request import SamplingParams
from v4graph.errors import RequestError
from v4graph.plan.types import Limits


def check_params(params: SamplingParams, limits: Limits, vocab_size: int) -> None:
    """Refuse what no program can do.

    Raises:
        RequestError: a temperature, rule or logprobs that the engine was built without, or a token
            id outside the vocabulary; `field` names the parameter.
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
