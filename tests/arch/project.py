"""The files of the project, for tests that read its own source."""

from __future__ import annotations

import io
import subprocess
import tokenize
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SKIPPED = {"build", "dist", "__pycache__"}


@cache
def project_files() -> tuple[Path, ...]:
    """Files that git tracks; in an unpacked archive all files outside hidden and build folders."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False
    )
    if listed.returncode == 0 and listed.stdout:
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        found = [p for p in ROOT.rglob("*") if not _is_skipped(p.relative_to(ROOT))]
    return tuple(sorted(p for p in found if p.is_file()))


def _is_skipped(path: Path) -> bool:
    return any(part in _SKIPPED or part.startswith(".") for part in path.parts[:-1])


def name_of(path: Path) -> str:
    """The path below the project's root, as messages show it."""
    return path.relative_to(ROOT).as_posix()


def python_files(*folders: str) -> list[Path]:
    """Python files of the folders, e.g. `v4graph`; of the whole project without any."""
    python = [p for p in project_files() if p.suffix == ".py"]
    return [p for p in python if not folders or p.relative_to(ROOT).parts[0] in folders]


def text_of(path: Path) -> str | None:
    """The text of a file; None for a binary one."""
    raw = path.read_bytes()
    if b"\0" in raw[:8192]:
        return None
    return raw.decode("utf-8", errors="replace")


def tokens(source: str) -> list[tokenize.TokenInfo]:
    """Python tokens of `source`."""
    return list(tokenize.generate_tokens(io.StringIO(source).readline))
