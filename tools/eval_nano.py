"""Measure v4-nano: held-out losses, draft agreement, index ties and greedy acceptance.

    python tools/eval_nano.py --out figures.json

Runs on a CPU in float32 in some minutes. Greedy text comes from transformers, so acceptance is
measured on text that no code of this project produced.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from nano.fast import FastModel
from nano.tokenizer import BOS, EOS
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from v4graph.model.params import stack_experts
from v4graph.model.recompute import RecomputeModel
from v4graph.spec.load import load_spec
from v4graph.spec.model import ModelSpec, SparseAttention

DEPTH = 3


def load_params(folder: Path) -> dict[str, Tensor]:
    """All weights, bf16 widened to float32."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    params = stack_experts(tensors)
    return {k: v.float() if v.dtype == torch.bfloat16 else v for k, v in params.items()}


def documents(path: Path) -> list[str]:
    """The texts of a held-out file, without their header lines."""
    return [t for t in re.split(r"^=== .+ ===\n", path.read_text(), flags=re.MULTILINE) if t]


def windows(ids: list[list[int]], length: int) -> Iterator[Tensor]:
    """Packed `[1, length + 2]` windows of documents, each between BOS and EOS."""
    stream = torch.tensor([t for doc in ids for t in (BOS, *doc, EOS)])
    for start in range(0, len(stream) - length - 2, length):
        yield stream[start : start + length + 2][None]


@torch.no_grad()
def teacher_forced(
    spec: ModelSpec, params: dict[str, Tensor], parts: list[Tensor], tokenizer: Tokenizer
) -> dict[str, object]:
    """Losses of every head, and how drafts relate to the main head, on given text."""
    length = parts[0].shape[1] - 2
    model, head = FastModel(spec, params, length), params["head.weight"]
    nats, agree, overlap = [0.0] * (DEPTH + 1), [0.0] * DEPTH, [0.0] * DEPTH
    correct, num_bytes = 0.0, 0
    for ids in parts:
        hidden, streams, _ = model.main(ids[:, :-2].contiguous())
        main = F.linear(hidden, head).log_softmax(-1)[0]
        target = ids[0, 1:-1]
        nats[0] += float(F.nll_loss(main, target))
        correct += float((main.argmax(-1) == target).float().mean())
        num_bytes += len(tokenizer.decode(target.tolist(), skip_special_tokens=False).encode())
        for d, (row, _) in enumerate(model.drafts(streams, ids[:, :-1].contiguous(), DEPTH)):
            draft = F.linear(row[:, d:-1], head).log_softmax(-1)[0]
            teacher = main[d + 1 :]
            nats[d + 1] += float(F.nll_loss(draft, ids[0, d + 2 : -1]))
            agree[d] += float((draft.argmax(-1) == teacher.argmax(-1)).float().mean())
            overlap[d] += float(torch.minimum(draft.exp(), teacher.exp()).sum(-1).mean())
    n = len(parts)
    tokens = n * length
    return {
        "tokens": tokens,
        "nats_per_token": [x / n for x in nats],
        "bits_per_byte": nats[0] / n * tokens / num_bytes / math.log(2),
        "bytes_per_token": num_bytes / tokens,
        "main_top1": correct / n,
        "draft_top1_agreement": [x / n for x in agree],
        "draft_overlap": [x / n for x in overlap],
    }


class TieCounter(RecomputeModel):
    """Records the gap between the last selected and the first rejected index score."""

    gaps: dict[str, list[Tensor]]

    def index_select(
        self,
        p: str,
        a: SparseAttention,
        x: Tensor,
        q_low: Tensor,
        causal_BSW: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        scores = self.index_scores(p, a, x, q_low, cos, sin)
        scores = scores.masked_fill(~causal_BSW, float("-inf")).sort(-1, descending=True).values
        edge = scores[..., a.indexer.topk - 1] - scores[..., a.indexer.topk]
        live = causal_BSW[..., :-1].sum(-1) > a.indexer.topk
        live[:, :1024] = False
        self.gaps.setdefault(p, []).append(edge[live])
        return super().index_select(p, a, x, q_low, causal_BSW, cos, sin)


@torch.no_grad()
def ties(spec: ModelSpec, params: dict[str, Tensor], parts: list[Tensor]) -> dict[str, object]:
    """Exact and near ties at the edge of the selection, queries at 1024 to 2047."""
    model = TieCounter(spec, params)
    model.gaps = {}
    for ids in parts:
        model.forward(ids[:, :-2])
    out: dict[str, object] = {}
    for layer, values in model.gaps.items():
        gap = torch.cat(values)
        out[layer] = {
            "queries": len(gap),
            "exact_ties": int((gap == 0).sum()),
            "share_below_1e-6": float((gap < 1e-6).float().mean()),
            "share_below_1e-4": float((gap < 1e-4).float().mean()),
            "median_gap": float(gap.median()),
        }
    return out


@torch.no_grad()
def greedy_acceptance(
    spec: ModelSpec, params: dict[str, Tensor], prompts: Tensor, folder: Path, new: int
) -> dict[str, object]:
    """Rounds of recurrent drafting along greedy continuations of `prompts [N, P]`."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    text = oracle.generate(
        prompts, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=2
    )
    width = text.shape[1]
    padded = F.pad(text, (0, -(width - 2) % 64))
    model, head = FastModel(spec, params, padded.shape[1] - 2), params["head.weight"]
    match, argmax = [], []
    for ids in padded.split(8):
        hidden, streams, _ = model.main(ids[:, :-2].contiguous())
        argmax.append(F.linear(hidden, head).argmax(-1))
        rows = model.drafts(streams, ids[:, :-1].contiguous(), DEPTH)
        guesses = torch.stack([F.linear(r, head).argmax(-1) for r, _ in rows], dim=-1)
        match.append(guesses == ids[:, 2:, None])
    hits, own = torch.cat(match), torch.cat(argmax)
    start = prompts.shape[1] - 1
    produced = text[:, start + 1 :]
    same = (own[:, start : start + produced.shape[1]] == produced).float().mean()
    out: dict[str, object] = {"prompts": len(text), "same_as_transformers": float(same)}
    for k in range(1, DEPTH + 1):
        accepted, rounds, by_position = 0, 0, [0] * k
        for i in range(len(text)):
            s = start
            while s + k + 1 < width:
                n = 0
                while n < k and bool(hits[i, s + n, n]):
                    by_position[n] += 1
                    n += 1
                accepted, rounds, s = accepted + n, rounds + 1, s + n + 1
        out[f"k={k}"] = {
            "rounds": rounds,
            "tokens_per_round": 1 + accepted / rounds,
            "draft_acceptance": accepted / rounds / k,
            "accepted_by_position": [x / rounds for x in by_position],
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("specs/v4-nano"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=10**6)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()
    spec, params = load_spec("v4-nano"), load_params(args.folder)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    ids = [tokenizer.encode(t).ids for t in documents(args.folder / "heldout.txt")]
    parts = list(windows(ids, 2048))[: args.windows]
    figures: dict[str, object] = {}
    for name, measure in (
        ("teacher_forced", lambda: teacher_forced(spec, params, parts, tokenizer)),
        ("ties", lambda: ties(spec, params, parts[:8])),
        (
            "greedy",
            lambda: greedy_acceptance(
                spec,
                params,
                torch.tensor([[BOS, *d[:127]] for d in ids if len(d) >= 127][: args.prompts]),
                args.folder,
                args.new,
            ),
        ),
    ):
        figures[name] = measure()
        print(name, json.dumps(figures[name], indent=1), flush=True)
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
