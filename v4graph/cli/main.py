"""The `v4graph` command: its subcommands, and how faults of the user are told."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from v4graph.cli.bench import app as bench_app
from v4graph.cli.explain import app as explain_app
from v4graph.cli.generate import generate
from v4graph.cli.import_checkpoint import import_command
from v4graph.cli.make_random import make_random
from v4graph.cli.serve import serve
from v4graph.errors import V4GraphError
from v4graph.server.version import package_version

USER_FAULT = 2
TRACEBACK = "--traceback"


class Group(TyperGroup):
    """Prints a user's fault as one message; `--traceback` may stand anywhere."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        if TRACEBACK in args:
            args = [TRACEBACK, *(arg for arg in args if arg != TRACEBACK)]
        return super().make_context(info_name, args, *rest, **extra)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except V4GraphError as error:
            if ctx.params.get("traceback"):
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(USER_FAULT) from error


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A declarative inference engine for the DeepSeek-V4 family.",
)
app.command()(generate)
app.command()(serve)
app.add_typer(explain_app, name="explain")
app.add_typer(bench_app, name="bench")
app.command("import")(import_command)
app.command("make-random")(make_random)


@app.command()
def schema() -> None:
    """Print the JSON schema of a spec, for editors."""
    import json

    from v4graph.spec.load import schema as spec_schema

    typer.echo(json.dumps(spec_schema(), indent=2))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(package_version())


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"v4graph {package_version()}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    traceback: Annotated[
        bool, typer.Option(TRACEBACK, help="Show where a fault of yours was found.")
    ] = False,
) -> None:
    """Options that go with every command."""


if __name__ == "__main__":
    app()
