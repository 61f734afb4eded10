"""Rules that hold for every source file, checked on the files themselves."""

from __future__ import annotations

import ast
import re
import tokenize

import pytest

from tests.arch.project import ROOT, name_of, project_files, python_files, text_of, tokens

MAX_LINES = 420
PRINTING = ("v4graph/cli/", "benchmarks/", "tools/")
# Spelt in pieces, so that this file does not name them itself.
_WORKPLACE = (
    "/wor" + "k/",
    "../sha" + "red",
    "/opt/" + "pypi",
    "/opt/" + "wheels",
    ".libr" + "ary/",
)
# Held-out text of v4-nano is other people's prose.
_QUOTED = ("specs/v4-nano/heldout.txt", "specs/v4-nano/tokenizer.json")

MAY_CATCH_ALL = {
    "v4graph/engine/async_engine.py": "the engine thread tells its clients of any fault",
    "v4graph/server/common.py": "a fault after a stream has begun becomes its last event",
    "v4graph/server/generation.py": "a fault of one prompt ends its siblings, then goes on",
    "v4graph/text/tokenizer.py": "the tokenizers library raises bare Exception",
}


def _report(faults: list[str]) -> None:
    assert not faults, "\n".join(faults)


def test_the_project_has_files() -> None:
    assert (ROOT / "pyproject.toml") in project_files()
    assert len(python_files("v4graph")) > 20


def test_files_stay_small() -> None:
    faults = []
    for path in python_files("v4graph", "tests", "tools", "benchmarks", "kernels"):
        lines = len(path.read_text().splitlines())
        if lines > MAX_LINES:
            faults.append(f"{name_of(path)}: {lines} lines, at most {MAX_LINES}: split it")
    _report(faults)


def test_todos_have_a_number() -> None:
    faults = []
    for path in python_files():
        for token in tokens(path.read_text()):
            if token.type != tokenize.COMMENT:
                continue
            for found in re.finditer(r"\b(?:TODO|FIXME|XXX)\b(\(#\d+\))?", token.string):
                if not found[1]:
                    faults.append(f"{name_of(path)}:{token.start[0]}: expected TODO(#number)")
    _report(faults)


def test_nothing_prints_outside_the_terminal_tools() -> None:
    faults = []
    for path in python_files("v4graph", "kernels", "tests"):
        if name_of(path).startswith(PRINTING):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print":
                faults.append(f"{name_of(path)}:{node.lineno}: print()")
    _report(faults)


def test_only_named_places_catch_everything() -> None:
    faults, used = [], set()
    for path in python_files("v4graph", "kernels"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ExceptHandler):
                continue
            named = (
                [n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)] if node.type else []
            )
            if node.type is None or {"Exception", "BaseException"} & set(named):
                used.add(name_of(path))
                if name_of(path) not in MAY_CATCH_ALL:
                    faults.append(f"{name_of(path)}:{node.lineno}: catches everything")
    faults += [
        f"{name}: catches nothing broad; drop it here" for name in MAY_CATCH_ALL.keys() - used
    ]
    _report(faults)


def test_no_workplace_is_mentioned() -> None:
    faults = []
    for path in project_files():
        text = None if name_of(path) in _QUOTED else text_of(path)
        for number, line in enumerate((text or "").splitlines(), 1):
            faults += [f"{name_of(path)}:{number}: {word}" for word in _WORKPLACE if word in line]
    _report(faults)


@pytest.mark.parametrize("folder", ["v4graph", "tools", "benchmarks"])
def test_modules_say_what_they_are(folder: str) -> None:
    faults = []
    for path in python_files(folder):
        tree = ast.parse(path.read_text())
        if tree.body and not ast.get_docstring(tree):
            faults.append(f"{name_of(path)}: no module docstring")
    _report(faults)
