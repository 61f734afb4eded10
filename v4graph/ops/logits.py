"""What a request's own rules make of the model's logits, and log-probabilities of tokens.

A rule may look at the tokens before the one that is chosen. In a verification row i stands behind
i drafts, and sees them: so a round decides what decoding token by token would have decided.

Axes: R requests, W rows of each, V vocabulary, L table length, k drafts, B biases, E end ids,
N banned sequences of at most M tokens. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rules:
    """The rules of R requests; neutral values change no bit of the logits."""

    num_prompt_tokens: Tensor
    """`[R]` int64."""
    min_tokens: Tensor
    """`[R]` int64; 0 is none."""
    end_ids: Tensor
    """`[R, E]` int64: what ends the request; -1 is no entry."""
    bias_ids: Tensor
    """`[R, B]` int64; -1 is no entry."""
    biases: Tensor
    """`[R, B]` float32."""
    bad_words: Tensor
    """`[R, N, M]` int64: banned sequences, right-aligned behind -1; all -1 is no entry."""
    repetition: Tensor
    """`[R]` float32; 1 is neutral."""
    presence: Tensor
    """`[R]` float32; 0 is neutral."""
    frequency: Tensor
    """`[R]` float32; 0 is neutral."""


@dataclass(frozen=True)
class Prefix:
    """The tokens before each row's own: known ones, then the first of the drafts."""

    token_ids: Tensor
    """`[R, L]` int64."""
    num_tokens: Tensor
    """`[R]` int64, how many of them are known."""
    drafts: Tensor
    """`[R, k]` int64; k may be 0."""
    num_drafts: Tensor
    """`[R, W]` int64, how many of them each row stands behind."""

    @property
    def length(self) -> Tensor:
        """`[R, W]` int64, tokens before each row's own."""
        return self.num_tokens[:, None] + self.num_drafts


def process_logits(logits: Tensor, prefix: Prefix, rules: Rules) -> Tensor:
    """The logits `[R, W, V]` that a request's token is chosen from, float32.

    In this order:

    1. `logit_bias` is added.
    2. Repetition penalty r, over prompt and generated tokens: a positive logit is divided by r,
       another one multiplied (Keskar et al., arXiv 1909.05858, section 4.1; for negative logits as
       vLLM and transformers do).
    3. Frequency and presence penalty, over generated tokens: `logit - count * frequency -
       (count > 0) * presence` (OpenAI's API reference).
    4. -inf for end ids until `min_tokens` are generated, and for a token that would complete a
       banned sequence among the generated ones.
    """
    prompt, generated = _counts(prefix, rules.num_prompt_tokens, logits)
    logits = logits + _scattered(rules.bias_ids, rules.biases, logits[:, 0])[:, None]
    by = torch.where((prompt + generated) > 0, rules.repetition[:, None, None], 1.0)
    logits = torch.where(logits > 0, logits / by, logits * by)
    logits = logits - generated * rules.frequency[:, None, None]
    logits = logits - (generated > 0) * rules.presence[:, None, None]
    return torch.where(_banned(prefix, rules, logits) > 0, float("-inf"), logits)


def _counts(prefix: Prefix, num_prompt: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """How often each token is in the prompt `[R, 1, V]` and generated `[R, W, V]`, float32."""
    place = torch.arange(prefix.token_ids.shape[1], device=logits.device)
    in_prompt = place < num_prompt[:, None]
    known = place < prefix.num_tokens[:, None]
    empty = torch.zeros_like(logits[:, 0])
    prompt = empty.scatter_add(1, prefix.token_ids, (in_prompt & known).to(torch.float32))
    generated = empty.scatter_add(1, prefix.token_ids, (known & ~in_prompt).to(torch.float32))
    generated = generated[:, None].expand_as(logits)
    if prefix.drafts.shape[1]:
        index = torch.arange(prefix.drafts.shape[1], device=logits.device)
        seen = (index < prefix.num_drafts[..., None]).to(torch.float32)
        drafts = prefix.drafts[:, None].expand_as(seen)
        generated = generated.scatter_add(2, drafts, seen)
    return prompt[:, None], generated


def _scattered(ids: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """Sums `[..., V]` of `values [..., n]` at `ids [..., n]`; -1 counts for nothing."""
    used = torch.where(ids >= 0, values, 0.0)
    return torch.zeros_like(like).scatter_add(-1, ids.clamp_min(0), used)


def _banned(prefix: Prefix, rules: Rules, logits: Tensor) -> Tensor:
    """Above 0 where a token must not follow: `[R, W, V]`."""
    R, W = prefix.num_drafts.shape
    too_short = prefix.length - rules.num_prompt_tokens[:, None] < rules.min_tokens[:, None]
    ends = rules.end_ids[:, None].expand(R, W, -1)
    end_ban = too_short[..., None].expand_as(ends)
    head, last = rules.bad_words[..., :-1], rules.bad_words[..., -1]
    tail = _tail(prefix, rules.num_prompt_tokens, head.shape[-1])
    same = (head[:, None] == tail[:, :, None]) | (head < 0)[:, None]
    lasts = last[:, None].expand(R, W, -1)
    ids = torch.cat((ends, lasts), dim=-1)
    ban = torch.cat((end_ban, same.all(-1)), dim=-1)
    return _scattered(ids, ban.to(torch.float32), logits)


def _tail(prefix: Prefix, num_prompt: Tensor, count: int) -> Tensor:
    """The last `count` generated tokens before each row's own, `[R, W, count]`; -2 for none."""
    back = torch.arange(count, 0, -1, device=num_prompt.device)
    place = prefix.length[..., None] - back
    last = prefix.token_ids.shape[1] - 1
    ids = prefix.token_ids.gather(1, place.clamp(0, last).flatten(1)).view_as(place)
    if prefix.drafts.shape[1]:
        draft = (place - prefix.num_tokens[:, None, None]).clamp(0, prefix.drafts.shape[1] - 1)
        drafted = prefix.drafts.gather(1, draft.flatten(1)).view_as(place)
        ids = torch.where(place < prefix.num_tokens[:, None, None], ids, drafted)
    return torch.where(place >= num_prompt[:, None, None], ids, -2)


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of logits, at the chosen tokens and at the likeliest ones.

    Args:
        logits: `[R, W, V]` float32, as the model gave them.
        tokens: `[R, W]` int64; -1 for none. count: how many of the likeliest, at most V.

    Returns:
        Of the chosen tokens `[R, W]` (of any token where there is none), and of the likeliest
        `[R, W, count]` in descending order, behind their ids `[R, W, count]`.
    """
    all_of_them = logits.log_softmax(-1)
    own = all_of_them.gather(-1, tokens.clamp_min(0)[..., None])[..., 0]
    best = all_of_them.topk(min(count, logits.shape[-1]), dim=-1)
    return own, best.indices, best.values
