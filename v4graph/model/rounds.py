"""Speculative rounds by full recompute: the oracle that the engine's acceptance is held against.

No cache, no metadata, no request table: the main model runs once over the whole finished sequence,
and every MTP draft is made by running the draft layer over all rows of its branch from position 0;
DSpark blocks read rows that are made of that one run (`dspark_recompute.py`), and prompt lookup is
a search in plain Python (`ngram_recompute.py`).

Shape suffixes: S tokens, N residual streams, D hidden, V vocabulary, B branches (one a round).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from v4graph.model.dspark_recompute import DsparkRecompute
from v4graph.model.ngram_recompute import search
from v4graph.model.recompute import Recomputed, RecomputeModel
from v4graph.spec.model import DsparkSpeculation, MtpSpeculation, NgramSpeculation

Drafting = MtpSpeculation | DsparkSpeculation | NgramSpeculation
"""Modes that draft."""


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
    """Token ids; where it is a number of drafts or tokens that differs, numbers."""
    gap: float
    """Logit of `expected` minus that of `found`; below 1e-4 either choice is rounding. Infinite
    where no logits decide: numbers, and drafts that are looked up."""


@dataclass(frozen=True)
class EngineRound:
    """What the engine did in one verification of a request."""

    num_tokens: int
    """Known tokens before the round: the last of them was computed with the drafts."""
    drafts: tuple[int, ...]
    tokens: tuple[int, ...]
    """Committed: the accepted drafts and one token of the main model's own."""


@dataclass(frozen=True)
class OwnRound:
    """What the recompute does by itself behind the same known tokens."""

    drafts: tuple[int, ...]
    tokens: tuple[int, ...]
    """The accepted drafts and one token of the main model's own."""


class RoundOracle:
    """Greedy drafts, acceptance and tokens of any sequence, by full recompute in float32."""

    def __init__(
        self,
        model: RecomputeModel,
        mode: Drafting,
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
        all_ids = self._tensor(ids)[None]
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
        if isinstance(self.mode, NgramSpeculation):
            for r in drafted:
                wanted = search(ids[: r.num_tokens], len(r.drafts), self.mode)
                # Where the search finds less, -1 stands for no token.
                wanted += [-1] * (len(r.drafts) - len(wanted))
                pairs = enumerate(zip(wanted, r.drafts, strict=True))
                out += [
                    Difference("draft", r.num_tokens, i, a, b, float("inf"))
                    for i, (a, b) in pairs
                    if a != b
                ]
            return out
        known, forced = [r.num_tokens for r in drafted], [list(r.drafts) for r in drafted]
        logits = self._branches(all_ids[0], main, known, forced)
        for r, rows in zip(drafted, logits, strict=True):
            out += _differences("draft", r.num_tokens, r.drafts, rows[: len(r.drafts)])
        return out

    @torch.no_grad()
    def drafts(self, ids: Sequence[int], known: Sequence[int], k: int) -> list[list[int]]:
        """The drafts, at most `k`, behind each of the `known` lengths of a sequence."""
        all_ids = self._tensor(ids)
        return self._drafts(all_ids, self._main(all_ids[None]), [(n, k) for n in known])

    @torch.no_grad()
    def own_rounds(
        self, ids: Sequence[int], known: Sequence[int], k: int, max_len: int
    ) -> list[OwnRound]:
        """What the recompute drafts and commits behind each of the `known` lengths of a sequence.

        Args:
            ids: the sequence; of it a round sees its known tokens only.
            k: drafts a round; fewer where the context ends.
            max_len: the context in tokens: a draft and one more token behind it must fit.
        """
        all_ids = self._tensor(ids)
        main = self._main(all_ids[None])
        counts = [(n, max(min(k, max_len - 1 - n), 0)) for n in known]
        best = main.logits[0].argmax(-1).tolist()
        out = []
        for n, drafts in zip(known, self._drafts(all_ids, main, counts), strict=True):
            tokens: list[int] = []
            while tokens == drafts[: len(tokens)] and len(tokens) <= len(drafts):
                prefix = [*ids[:n], *tokens]
                # The one run holds as long as the round goes the sequence's way.
                along = prefix == list(ids[: len(prefix)])
                tokens.append(best[len(prefix) - 1] if along else self._next(prefix))
            out.append(OwnRound(tuple(drafts), tuple(tokens)))
        return out

    def compare(
        self, ids: Sequence[int], rounds: Sequence[EngineRound], k: int, max_len: int
    ) -> tuple[list[Difference], list[OwnRound]]:
        """`check` with the numbers of drafts, and `own_rounds` of the same rounds."""
        own = self.own_rounds(ids, [r.num_tokens for r in rounds], k, max_len)
        out = self.check(ids, rounds)
        for r, o in zip(rounds, own, strict=True):
            if len(r.drafts) != len(o.drafts):
                numbers = len(o.drafts), len(r.drafts)
                out.append(Difference("num_drafts", r.num_tokens, 0, *numbers, float("inf")))
        return out, own

    def _next(self, ids: Sequence[int]) -> int:
        return int(self._main(self._tensor(ids)[None]).logits[0, -1].argmax())

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(list(ids), device=next(iter(self.model.params.values())).device)

    def _drafts(
        self, ids_S: Tensor, main: Recomputed, counts: list[tuple[int, int]]
    ) -> list[list[int]]:
        """Drafts behind each (known length, most drafts)."""
        if isinstance(self.mode, NgramSpeculation):
            ids = ids_S.tolist()
            return [search(ids[:n], k, self.mode) for n, k in counts]
        some = [(n, k) for n, k in counts if k]
        rows = self._branches(ids_S, main, [n for n, _ in some], [[None] * k for _, k in some])
        chosen = iter(logits.argmax(-1).tolist() for logits in rows)
        return [next(chosen)[:k] if k else [] for _, k in counts]

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
        assert not isinstance(mode, NgramSpeculation)  # noqa: S101 (it has no logits)
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
        k, layers = max(map(len, drafts)), mode.num_layers
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
