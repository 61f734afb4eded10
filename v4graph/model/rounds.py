"""Speculative rounds by full recompute: the oracle that the engine's acceptance is held against.

No cache, no metadata, no request table: the main model runs once over the whole finished sequence,
and every MTP draft is made by running the draft layer over all rows of its branch from position 0;
DSpark blocks read rows that are made of that one run (`dspark_recompute.py`).

Shape suffixes: S tokens, N residual streams, D hidden, V vocabulary, B branches (one a round).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from v4graph.model.dspark_recompute import DsparkRecompute
from v4graph.model.recompute import Recomputed, RecomputeModel
from v4graph.spec.model import DsparkSpeculation, MtpSpeculation


@dataclass(frozen=True)
class Difference:
    """A token of the engine that the recompute would have chosen otherwise."""

    where: str
    num_tokens: int
    """Known tokens before the round."""
    index: int
    """Place within the round's drafts or tokens."""
    expected: int
    found: int
    gap: float
    """Logit of `expected` minus that of `found`; below 1e-4 either choice is rounding."""


@dataclass(frozen=True)
class EngineRound:
    """What the engine did in one verification of a request."""

    num_tokens: int
    """Known tokens before the round: the last of them was computed with the drafts."""
    drafts: tuple[int, ...]
    tokens: tuple[int, ...]
    """Committed: the accepted drafts and one token of the main model's own."""


class RoundOracle:
    """Greedy drafts, acceptance and tokens of any sequence, by full recompute in float32."""

    def __init__(
        self,
        model: RecomputeModel,
        mode: MtpSpeculation | DsparkSpeculation,
        max_rows: int = 1 << 14,
        token_shift: int = 1,
    ) -> None:
        """`max_rows` bounds the branch rows that are computed at once.

        A draft row with the streams at t takes the token at t + `token_shift`: 1 by definition
        (section 2.4); 0 is for showing what the wrong pairing costs.
        """
        self.model, self.mode, self.max_rows = model, mode, max_rows
        self.token_shift = token_shift

    @torch.no_grad()
    def check(self, ids: Sequence[int], rounds: Sequence[EngineRound]) -> list[Difference]:
        """Every difference between the engine's rounds and the recompute of them.

        Args:
            ids: the finished sequence, all tokens of the rounds included.
            rounds: in order; each begins where the one before ended, except after an abort.

        A draft is compared given the engine's drafts before it, a token given its tokens before
        it: one near-tie does not spoil what follows. Accepted counts follow from both: a round
        that commits a draft that it should have rejected differs in `tokens`.
        """
        device = next(iter(self.model.params.values())).device
        all_ids = torch.tensor([list(ids)], device=device)
        main = self._main(all_ids)
        out: list[Difference] = []
        for r in rounds:
            where = r.num_tokens - 1
            logits = main.logits[0, where : where + len(r.tokens)]
            out += _differences("token", r.num_tokens, r.tokens, logits)
            accepted = 0
            while accepted < len(r.drafts) and r.drafts[accepted] == r.tokens[accepted]:
                accepted += 1
                if accepted == len(r.tokens):
                    break
            if accepted + 1 != len(r.tokens):
                # A round that stopped short of an accepted draft, or went on behind a rejected one.
                wanted = (accepted + 1, len(r.tokens))
                out.append(Difference("count", r.num_tokens, accepted, *wanted, float("inf")))
        drafted = [r for r in rounds if r.drafts]
        known, forced = [r.num_tokens for r in drafted], [list(r.drafts) for r in drafted]
        logits = self._branches(all_ids[0], main, known, forced)
        for r, rows in zip(drafted, logits, strict=True):
            out += _differences("draft", r.num_tokens, r.drafts, rows[: len(r.drafts)])
        return out

    @torch.no_grad()
    def drafts(self, ids: Sequence[int], known: Sequence[int], k: int) -> list[list[int]]:
        """The `k` drafts behind each of the `known` lengths of a sequence."""
        device = next(iter(self.model.params.values())).device
        all_ids = torch.tensor(list(ids), device=device)
        main = self._main(all_ids[None])
        logits = self._branches(all_ids, main, list(known), [[None] * k for _ in known])
        return [rows.argmax(-1).tolist() for rows in logits]

    def rounds_of(self, ids: Sequence[int], num_tokens: int, k: int) -> list[tuple[int, int]]:
        """(drafts, accepted) of every whole round along a sequence from `num_tokens` known on."""
        known = range(num_tokens, len(ids) - k + 1)
        drafts = self.drafts(ids, known, k) if known else []
        out, n = [], num_tokens
        while n in known:
            accepted = 0
            while accepted < k and drafts[n - num_tokens][accepted] == ids[n + accepted]:
                accepted += 1
            out.append((k, accepted))
            n += accepted + 1
        return out

    def _main(self, ids: Tensor) -> Recomputed:
        mode = self.mode
        return self.model.forward(
            ids, mode.target_layer_ids if isinstance(mode, DsparkSpeculation) else ()
        )

    def _branches(
        self,
        ids_S: Tensor,
        main: Recomputed,
        known: list[int],
        drafts: list[list[int]] | list[list[None]],
    ) -> list[Tensor]:
        """Logits `[k, V]` of the drafts behind each known length.

        Args:
            drafts: what each branch goes on with; None is the layer's own choice.
        """
        out: list[Tensor] = []
        mode = self.mode
        if isinstance(mode, DsparkSpeculation):
            blocks = DsparkRecompute(self.model, mode, ids_S, main)
            step = max(self.max_rows // len(ids_S), 1)
            for begin in range(0, len(known), step):
                part = slice(begin, begin + step)
                out += blocks.drafts(known[part], drafts[part])
            return out
        begin = rows = 0
        for i, n in enumerate(known):
            rows += n + len(drafts[i])
            if i + 1 == len(known) or rows + n > self.max_rows:
                part = slice(begin, i + 1)
                out += self._together(ids_S, main.streams[0], known[part], drafts[part], mode)
                begin, rows = i + 1, 0
        return out

    def _together(
        self,
        ids_S: Tensor,
        streams_SND: Tensor,
        known: list[int],
        drafts: list[list[int]] | list[list[None]],
        mode: MtpSpeculation,
    ) -> list[Tensor]:
        """Draft i is that of layer i at the newest row, or of the last layer i - L + 1 rows behind.

        Layer i runs over all rows of the branch, with the streams of layer i - 1 and the tokens
        i + 1 places behind, drafts among them. The last layer goes on from rows of its own.
        """
        device, count = ids_S.device, len(known)
        k, layers = max(map(len, drafts)), self.mode.num_layers
        n_B, rows = torch.tensor(known, device=device), max(known) - 1
        # Rows 0 .. n - 2 are the main model's.
        x = streams_SND.new_zeros(count, rows + max(k - layers, 0), *streams_SND.shape[1:])
        tokens = ids_S.new_zeros(count, max(known) + k + 1)
        for b, n in enumerate(known):
            x[b, : n - 1] = streams_SND[: n - 1]
            tokens[b, :n] = ids_S[:n]
        branch, steps = torch.arange(count, device=device), []
        for i in range(k):
            layer, behind = min(i, layers - 1), max(i - layers + 1, 0)
            row_B, size = n_B - 2 + behind, rows + behind
            next_ids = tokens[:, layer + self.token_shift :][:, :size]
            y = self.model.draft_streams(x[:, :size], next_ids, mode, layer)
            row = y[branch, row_B]
            logits = self.model.draft_logits(row[:, None], layer)[:, 0]
            steps.append(logits)
            if i + 1 == k:
                break
            best = logits.argmax(-1).tolist()
            chosen = [
                own[i] if i < len(own) and own[i] is not None else best[b]
                for b, own in enumerate(drafts)
            ]
            tokens[branch, n_B + i] = torch.tensor(chosen, device=device)
            if i + 1 < layers:
                x[:, :rows] = y
            else:
                x[branch, row_B + 1] = row
        return list(torch.stack(steps, dim=1))


def _differences(
    where: str, num_tokens: int, found: Sequence[int], logits: Tensor
) -> list[Difference]:
    best = logits.argmax(-1)
    got = torch.tensor(list(found), device=logits.device)
    out = []
    for i in (best != got).nonzero().flatten().tolist():
        gap = float(logits[i, best[i]] - logits[i, got[i]])
        out.append(Difference(where, num_tokens, i, int(best[i]), int(got[i]), gap))
    return out
