"""Draw the README's plot from measured results.

    python benchmarks/plot.py OURS.json THEIRS.json -o docs/images/decode-h200.svg

OURS is a result of `gpu_slice.py`, THEIRS a file of the same rows from another engine, both in
`benchmarks/results`. Needs matplotlib (`pip install -e '.[bench]'`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

FLOOR, OURS, THEIRS = "#9aa4b2", "#2563eb", "#d97706"
"""Colours that read on a white page and in print."""


def decode_rows(result: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The decode rows of the shortest context, by batch size."""
    rows = [r for r in result["rows"] if r["what"] == "decode"]
    shortest = min(r["prompt"] for r in rows)
    return {r["batch"]: r for r in rows if r["prompt"] == shortest}


def draw(ours: dict[str, Any], theirs: dict[str, Any], out: Path) -> None:
    """Bars of milliseconds a decode step: what memory allows, the other engine, v4graph."""
    a, b = decode_rows(ours), decode_rows(theirs)
    batches = sorted(a.keys() & b.keys())
    series = [
        ("least time by the bytes to read", FLOOR, [a[n]["floor_ms"] for n in batches]),
        (theirs["engine"], THEIRS, [b[n]["ms"] for n in batches]),
        ("v4graph", OURS, [a[n]["ms"] for n in batches]),
    ]
    # One id salt and no date: the same results give the same file.
    mpl.rcParams.update({"svg.hashsalt": "v4graph", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    width = 0.27
    for i, (label, colour, values) in enumerate(series):
        places = [j + (i - 1) * width for j in range(len(batches))]
        bars = axes.bar(places, values, width, label=label, color=colour)
        axes.bar_label(bars, [f"{v:.1f}" for v in values], padding=2, fontsize=8)
    axes.set_xticks(range(len(batches)), [str(n) for n in batches])
    axes.set_xlabel("requests in the batch, each with 1,024 tokens of context")
    axes.set_ylabel("milliseconds a decode step")
    title = "First 24 layers of V4-Flash, random weights, one H200 (lower is better)"
    axes.set_title(title, size=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(out, metadata={"Date": None}, facecolor="white")


def main() -> None:
    """Read both results and write the picture."""
    parser = argparse.ArgumentParser(description="Draw the README's plot from measured results.")
    parser.add_argument("ours", type=Path)
    parser.add_argument("theirs", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    draw(json.loads(args.ours.read_text()), json.loads(args.theirs.read_text()), args.out)


if __name__ == "__main__":
    main()
