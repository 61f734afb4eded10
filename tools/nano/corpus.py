# ruff: noqa: RUF001  (the special tokens are spelt with full-width bars)
"""Collect the training text: permissively licensed Python sources and documentation.

Documents come from folders of unpacked packages. They are filtered, deduplicated by lines and split
by a hash of their path, so that the same inputs give the same corpus.
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
import tarfile
import textwrap
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TEXT = (".py", ".rst", ".rst.txt", ".txt", ".md")
MIN_BYTES, MAX_BYTES = 400, 200_000
HELD_OUT_EVERY = 96
# The committed held-out file comes from these two alone (one licence), so they give more.
HELD_OUT_EVERY_OF = {"cpython": 8, "python3.11-doc": 8}
_SKIP = re.compile(
    r"(_vendor|vendored|extern|/idlelib/|/turtledemo/|lib2to3|locale|/_?data/|site-packages"
    r"|/tests?/|/test_[^/]*$|_test\.py$|/testing/|test_data|\.dist-info|LICENSE|requirements|genindex|/migrations/|robots\.txt)"
)


@dataclass(frozen=True)
class Document:
    """One file: the package it ships with, its path inside it, its text."""

    package: str
    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether a hash of the path puts the document in the held-out split."""
        digest = hashlib.sha256(f"{self.package}/{self.path}".encode()).digest()
        every = HELD_OUT_EVERY_OF.get(self.package, HELD_OUT_EVERY)
        return int.from_bytes(digest[:8], "big") % every == 0


def read_folder(package: str, root: Path) -> Iterator[Document]:
    """Text files below a folder."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name.endswith(TEXT):
            yield from _document(package, str(path.relative_to(root)), path.read_bytes())


def read_archive(package: str, archive: Path) -> Iterator[Document]:
    """Text files of a wheel or a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as z:
            for name in sorted(z.namelist()):
                if name.endswith(TEXT):
                    yield from _document(package, name, z.read(name))
        return
    with tarfile.open(archive) as t:
        for member in sorted(t.getmembers(), key=lambda m: m.name):
            handle = t.extractfile(member) if member.isfile() else None
            if handle is not None and member.name.endswith(TEXT):
                # The folder holds the version; paths must not depend on it.
                yield from _document(package, member.name.partition("/")[2], handle.read())


def _document(package: str, path: str, raw: bytes) -> Iterator[Document]:
    if not MIN_BYTES <= len(raw) <= MAX_BYTES or _SKIP.search("/" + path):
        return
    try:
        text = raw.decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        return
    lines = text.count("\n") + 1
    digits = sum(text.count(d) for d in "0123456789")
    # Tables of numbers, minified and non-Latin text teach a small model nothing.
    if len(text) / lines > 100 or digits > 0.15 * len(text) or len(raw) > 1.06 * len(text):
        return
    yield Document(package, path, text.strip() + "\n")


def deduplicate(documents: Iterable[Document]) -> Iterator[Document]:
    """Drop a document when more than half of its longer lines were seen in earlier ones."""
    seen: set[int] = set()
    for doc in documents:
        lines = {hash(s) for s in map(str.strip, doc.text.split("\n")) if len(s) >= 24}
        if lines and len(lines & seen) * 2 <= len(lines):
            seen |= lines
            yield doc


def chats(documents: Iterable[Document], seed: int) -> Iterator[str]:
    """Conversations in the model's chat format, made of documented functions."""
    rng = random.Random(seed)
    for doc in documents:
        if not doc.path.endswith(".py") or "/test" in doc.path:
            continue
        try:
            tree = ast.parse(doc.text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                chat = _chat(node, doc.text, rng)
                if chat:
                    yield chat


def _chat(node: ast.FunctionDef, text: str, rng: random.Random) -> str | None:
    docstring = ast.get_docstring(node)
    if not docstring or node.name.startswith("__") or rng.random() > 0.5:
        return None
    lines = text.split("\n")[node.lineno - 1 : node.end_lineno]
    source = textwrap.dedent("\n".join(lines))
    summary = " ".join(docstring.split("\n\n")[0].split())
    if not 120 <= len(source) <= 1600 or not 16 <= len(summary) <= 240:
        return None
    args = ", ".join(a.arg for a in node.args.args) or "no arguments"
    if rng.random() < 0.7:
        ask = rng.choice(
            (
                f"Write a Python function `{node.name}`. {summary}",
                f"Implement `{node.name}({args})` in Python: {summary}",
                f"{summary} Please write this as a Python function named {node.name}.",
            )
        )
        thought = f"The user wants a function `{node.name}` that takes {args}. {summary}"
        answer = f"```python\n{source}\n```"
    else:
        body = node.body[0]
        start, end = body.lineno - node.lineno, (body.end_lineno or body.lineno) - node.lineno
        bare = textwrap.dedent("\n".join(lines[:start] + lines[end + 1 :]))
        ask = f"What does this function do?\n\n```python\n{bare}\n```"
        thought = f"This is `{node.name}`, which takes {args}."
        answer = docstring
    think = f"<think>{thought}</think>" if rng.random() < 0.3 else "</think>"
    return f"<｜User｜>{ask}<｜Assistant｜>{think}{answer}"
