"""Without Triton everything imports, references run, and asking for a kernel says why not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.arch.project import ROOT, name_of, python_files
from v4graph.ops.custom.hyper import hyper_leave

KERNELS = python_files("kernels")


def run_blocked(program: str) -> subprocess.CompletedProcess[str]:
    """`program` in a process that cannot import Triton."""
    head = f"import sys\nsys.modules['triton'] = None\nsys.path[:0] = {_paths()!r}\n"
    return subprocess.run(
        [sys.executable, "-c", head + program], capture_output=True, text=True, check=False
    )


def _paths() -> list[str]:
    return [str(ROOT), str(ROOT / "kernels")]


def test_asking_for_a_kernel_is_one_clear_error() -> None:
    done = run_blocked(
        "from v4graph.errors import ProgramError\n"
        "from v4graph.ops.custom.library import load_kernels\n"
        "try:\n    load_kernels('hyper')\n"
        "except ProgramError as error:\n    sys.stdout.write(str(error))\n"
    )
    assert done.returncode == 0, done.stderr
    assert "kernel module 'hyper' needs Triton, which is not installed" in done.stdout


@pytest.mark.parametrize(
    "module", ["attention", "compressor", "heads", "hyper", "index", "quantised", "rows"]
)
def test_operators_register(module: str) -> None:
    done = run_blocked(f"import v4graph_kernels\nimport v4graph.ops.custom.{module}\n")
    assert done.returncode == 0, done.stderr


def test_a_cpu_call_is_the_reference() -> None:
    x, y = torch.randn(2, 4, 8), torch.randn(2, 8)
    post, comb = torch.rand(2, 4), torch.rand(2, 4, 4)
    got = torch.ops.v4graph.hyper_leave(x, y, post, comb)
    expected = post[..., None] * y[:, None] + torch.einsum("tjk,tjd->tkd", comb, x)
    torch.testing.assert_close(got, expected)
    assert hyper_leave is torch.ops.v4graph.hyper_leave.default


@pytest.mark.parametrize("path", KERNELS, ids=name_of)
def test_kernels_import_torch_and_triton_only(path: Path) -> None:
    known = {"torch", "triton", "v4graph_kernels", "__future__"} | sys.stdlib_module_names
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            assert name.split(".")[0] in known, f"{name_of(path)}:{node.lineno}: imports {name}"
