"""Data flows one way, and what needs no torch loads without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.project import ROOT

HEAVY = ("torch", "triton", "fastapi", "transformers")
LIGHT = (
    "v4graph.spec.load",
    "v4graph.spec.hf_config",
    "v4graph.plan.lower",
    "v4graph.plan.buffers",
    "v4graph.plan.cache",
    "v4graph.plan.weight_totals",
    "v4graph.text.chat",
    "v4graph.text.output",
    "v4graph.text.tokenizer",
    "v4graph.cli.main",
)


def test_import_contracts_hold() -> None:
    # A process of its own: the linter imports nothing, but it caches what it has read.
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", LIGHT)
def test_module_loads_without(module: str, tmp_path: Path) -> None:
    program = (
        "import importlib, sys\n"
        f"for name in {HEAVY!r}: sys.modules[name] = None\n"
        f"importlib.import_module({module!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
