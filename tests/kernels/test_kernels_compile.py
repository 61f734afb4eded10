"""Every kernel compiles for an H200 and fits its shared memory; no GPU is needed for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.project import ROOT

SHARED_BYTES = 232448
"""Most that a block of an sm_90 device may use."""


_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("attention", "hyper")]
_QUICK = ("rows", "heads", "compressor", "index", "quantised", "prefill")


@pytest.mark.parametrize("group", [*_QUICK, *_SLOW])
def test_compiles_for_sm_90(group: str, tmp_path: Path) -> None:
    """The interpreter runs programs that the compiler refuses."""
    pytest.importorskip("triton.backends.nvidia", reason="no NVIDIA compiler in this Triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(ROOT / "kernels"), env.get("PYTHONPATH", "")]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels", group],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines
    for name, shared, spilled in lines:
        assert int(shared) <= SHARED_BYTES, f"{name}: {shared} bytes of shared memory"
        assert int(spilled) <= 256, f"{name}: {spilled} bytes spilled"
