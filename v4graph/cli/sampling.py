"""Options of `generate` that become sampling parameters, and log-probabilities as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from v4graph.errors import RequestError

if TYPE_CHECKING:
    from v4graph.engine.request import TokenLogprobs
    from v4graph.text.tokenizer import Tokenizer

TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopPOption = Annotated[float, typer.Option(help="Sample from the likeliest that sum to this.")]
TopKOption = Annotated[int, typer.Option(help="Sample from this many; 0 is all.")]
MinPOption = Annotated[
    float, typer.Option(help="Sample from tokens of at least this share of the likeliest's.")
]
RepetitionOption = Annotated[
    float, typer.Option(help="Above 1: tokens of prompt and output become less likely.")
]
PresenceOption = Annotated[
    float, typer.Option(help="Taken from the logit of every token of the output.")
]
FrequencyOption = Annotated[
    float, typer.Option(help="Taken as often as the token is in the output.")
]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=BIAS", help="Added to a token's logit, -100..100; repeatable."),
]
BadWordsOption = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Text it never writes; repeatable.")
]
MinTokensOption = Annotated[int, typer.Option(help="No EOS or stop ends it before so many tokens.")]
LogprobsOption = Annotated[
    int | None,
    typer.Option(help="Log-probabilities of each token and of so many others; with --json."),
]
SeedOption = Annotated[int | None, typer.Option(help="Seed of the sampling of each prompt.")]


def parse_logit_bias(items: Sequence[str]) -> dict[int, float]:
    """`ID=BIAS` options as numbers.

    Raises:
        RequestError: another form, or a token id twice.
    """
    out: dict[int, float] = {}
    for item in items:
        token, _, bias = item.partition("=")
        try:
            number, value = int(token), float(bias)
        except ValueError as error:
            raise RequestError(
                f"--logit-bias: expected ID=BIAS like 42=-5.5, got {item!r}", "logit_bias"
            ) from error
        if number in out:
            raise RequestError(f"--logit-bias: token id {number} is there twice", "logit_bias")
        out[number] = value
    return out


def told(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """Log-probabilities of an output's tokens, with their text if there is a tokenizer; minus
    infinity, which JSON does not have, is null."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        text = {} if tokenizer is None else {"token": tokenizer.token_text(token_id)}
        value = logprob if math.isfinite(logprob) else None
        return {"token_id": token_id, **text, "logprob": value}

    return [
        one(entry.token_id, entry.logprob) | {"top": [one(*pair) for pair in entry.top]}
        for entry in entries
    ]
