"""What the documentation says exists does exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from tests.arch.project import ROOT, name_of, project_files, python_files
from v4graph.cli.main import app

PAGES = [p for p in project_files() if p.suffix == ".md"]
_CODE = re.compile(r"```.*?```|`[^`\n]+`|^    \S.*$", re.S | re.M)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]+)(?:#[^)]*)?\)")


def _code(page: Path) -> list[str]:
    """Every code block and code span of a page."""
    return _CODE.findall(page.read_text())


def _commands() -> dict[str, set[str]]:
    """Subcommands of `v4graph`, each with its own subcommands, and the options of either."""
    root = typer.main.get_command(app)
    out = {}
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        out[name] = set(getattr(command, "commands", {}))
    return out


def _options() -> set[str]:
    found: set[str] = set()
    pending = [typer.main.get_command(app)]
    while pending:
        command = pending.pop()
        pending += getattr(command, "commands", {}).values()
        for parameter in command.params:
            found |= {*parameter.opts, *parameter.secondary_opts}
    return found | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, re.M))
    for code in _code(page):
        for line in code.strip("`").splitlines():
            if not re.match(r"\s*make\s", line):
                continue
            words = [w for w in shlex.split(line.strip("` "), comments=True)[1:] if "=" not in w]
            assert set(words) <= targets, f"{line!r}: unknown make target"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_options_exist(page: Path) -> None:
    commands, options = _commands(), _options()
    for code in _code(page):
        for line in code.replace("\\\n", " ").splitlines():
            found = re.search(
                r"(?:^|[\s`])v4graph ([a-z-]+)(?: ([a-z-]+))?(.*)", line.split("  #")[0]
            )
            if not found or found[1] not in commands:
                # Only what begins a line or a span is a command; elsewhere it may be prose.
                assert not re.match(r"\s*`?v4graph [a-z-]+", line), f"{line!r}: unknown command"
                continue
            inner = commands[found[1]]
            if inner and found[2]:
                assert found[2] in inner, f"{line!r}: unknown subcommand {found[2]}"
            for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", line):
                assert option in options, f"{line!r}: unknown option {option}"


def test_the_option_table_of_serve_is_whole() -> None:
    """docs/serving.md lists every option of `v4graph serve`, and the defaults that are numbers."""
    text = (ROOT / "docs" / "serving.md").read_text()
    table = text.split("| option | default | meaning |\n|---|---|---|\n")[1].split("\n\n")[0]
    rows: dict[str, str] = {}
    for line in table.splitlines():
        _, first, default, _, _ = line.split("|")
        rows |= dict.fromkeys(re.findall(r"--[a-z][a-z-]*", first), default)
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = [p for p in serve.params if p.param_type_name == "option" and p.name != "help"]
    assert {o for p in options for o in (*p.opts, *p.secondary_opts)} == set(rows)
    for p in options:
        if isinstance(p.default, int) and not isinstance(p.default, bool):
            assert str(p.default) in rows[p.opts[0]], f"{p.opts[0]}: the default is {p.default}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{name_of(page)}: dead link {target}"


def test_structure_names_every_module() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    listed = set(re.findall(r"`([a-z_0-9/]+\.py)`", text))
    modules = {
        name_of(p).removeprefix("v4graph/")
        for p in python_files("v4graph")
        if p.name != "__init__.py"
    }
    missing = sorted(modules - listed)
    assert not missing, f"docs/structure.md: no line for {', '.join(missing)}"
    gone = sorted(m for m in listed - modules if not (ROOT / m).exists())
    assert not gone, f"docs/structure.md: these do not exist: {', '.join(gone)}"
