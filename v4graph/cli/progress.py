"""What a command says while it loads and compiles: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from v4graph.program.build import Progress

INTERVAL_S = 10.0
"""Between two lines."""
_DOING = {"load": "loading weights", "compile": "compiling"}


@contextmanager
def show_progress(quiet: bool) -> Iterator[Progress]:
    """A function that shows progress on stderr.

    Args:
        quiet: no bar, no first and last line; lines in between still tell that a start is slow.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        with progress_lines(quiet) as show:
            yield show
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True, disable=quiet) as bar:
        tasks: dict[str, Any] = {}

        def show_bar(stage: str, done: int, total: int, what: str = "", /) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show_bar


@contextmanager
def progress_lines(quiet: bool, interval_s: float = INTERVAL_S) -> Iterator[Progress]:
    """Lines on stderr: one at the start, one every `interval_s` seconds, one at the end."""
    begin = time.monotonic()
    ended = threading.Event()
    latest = ["loading"]

    def show(stage: str, done: int, total: int, what: str = "", /) -> None:
        doing = " ".join(filter(None, (_DOING.get(stage, stage), what)))
        latest[0] = f"{doing}: {done} of {total} done"

    def speak() -> None:
        # A thread: one program may compile for a minute without a call of `show`.
        while not ended.wait(interval_s):
            typer.echo(f"{latest[0]}, {time.monotonic() - begin:.0f} s so far", err=True)

    if not quiet:
        typer.echo("loading and compiling; a first start takes minutes", err=True)
    thread = threading.Thread(target=speak, name="v4graph-progress", daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        thread.join()
    if not quiet:
        typer.echo(f"loaded and compiled after {time.monotonic() - begin:.1f} s", err=True)
