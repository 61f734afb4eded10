"""Everything that needs a GPU, in one run: checks side by side, then timings one after another.

    python benchmarks/gpu_suite.py --out DIR [--only ops,nano,...] [--budget SECONDS]

Each part is a process of its own with a time limit; its output is DIR/NAME.log, what it measured
DIR/NAME.json, and DIR/suite.json says how each one ended. Checks: `ops` (every kernel against its
reference, `pytest -m gpu`), `nano` (v4-nano against the CPU), `rounds` (the acceptance gap at
k = 1..8). Timings: `cost` (rounds of v4-nano as CUDA graphs), `kernels` (each kernel at V4-Flash's
shapes), `flash_slice8` and `flash_slice24` (decoding, rounds and prefill at real dimensions).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent


@dataclass
class Part:
    """One process of the suite."""

    name: str
    command: list[str]
    limit: float
    """Seconds, less where the budget has less left."""
    timed: bool = False
    """Runs alone."""


def parts(out: Path) -> list[Part]:
    """All parts, in order."""
    python = sys.executable
    files = sorted((ROOT / "tests" / "kernels").glob("test_*.py"))
    quiet = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    rounds = [python, str(HERE / "gpu_rounds.py"), "--out"]
    more = ["--prefill", "8192,32768", "--long", "32768,65536", "--profile", "1,32"]
    quick = ["--prompts", "16", "--max-tokens", "64"]
    return [
        *(Part(f"ops_{f.stem.removeprefix('test_')}", [*quiet, str(f)], 150) for f in files),
        Part("nano", [python, str(HERE / "gpu_smoke.py")], 150),
        Part("rounds", [*rounds, str(out / "rounds"), "--parts", "gap", *quick], 150),
        Part(
            "cost",
            [*rounds, str(out / "cost"), "--parts", "cost", "--batches", "1", "--ks", "0,3"],
            180,
            True,
        ),
        Part("kernels", [python, str(HERE / "kernels.py"), str(out / "kernels.json")], 120, True),
        *(
            Part(
                name.replace("-", "_"),
                [python, str(HERE / "gpu_slice.py"), name, "--out", str(out / "slices"), *more],
                900,
                True,
            )
            for name in ("flash-slice8", "flash-slice24")
        ),
    ]


class Run:
    """A part that has been started."""

    def __init__(self, part: Part, out: Path, limit: float) -> None:
        self.part, self.begin, self.limit = part, time.monotonic(), limit
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with (out / f"{part.name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                part.command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
            )

    def result(self) -> dict[str, object]:
        """Wait for the end, or stop it at its limit."""
        left = max(self.limit - (time.monotonic() - self.begin), 0.1)
        try:
            code: int | str = self.process.wait(left)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = "stopped at its limit"
        seconds = round(time.monotonic() - self.begin, 1)
        print(f"{self.part.name}: {code} after {seconds} s", flush=True)
        return {"part": self.part.name, "exit": code, "seconds": seconds}


def main() -> None:
    """Run the chosen parts; exit status 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="beginnings of names, separated by commas")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for everything")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    begin, results = time.monotonic(), []

    def left() -> float:
        return args.budget - (time.monotonic() - begin)

    wanted = tuple(filter(None, args.only.split(",")))
    chosen = parts(args.out)
    chosen = [p for p in chosen if not wanted or p.name.startswith(wanted)]
    if not chosen:
        parser.error(f"--only {args.only}: names no part")
    together = [Run(p, args.out, min(p.limit, left())) for p in chosen if not p.timed]
    results += [run.result() for run in together]
    for part in (p for p in chosen if p.timed):
        if left() < 5:
            results.append({"part": part.name, "exit": "no time left", "seconds": 0.0})
            continue
        results.append(Run(part, args.out, min(part.limit, left())).result())
    (args.out / "suite.json").write_text(json.dumps(results, indent=1) + "\n")
    if any(r["exit"] not in (0, 5) for r in results):  # 5: a file without GPU tests
        raise SystemExit(1)


if __name__ == "__main__":
    main()
