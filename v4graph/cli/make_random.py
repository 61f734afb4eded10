"""`v4graph make-random`: write a checkpoint of random weights for a spec."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from v4graph.cli.options import DeviceOption, SpecArgument, num_bytes
from v4graph.cli.progress import show_progress
from v4graph.errors import PlanError
from v4graph.words import counted


def make_random(
    spec: SpecArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Directory to write.")
    ],
    seed: Annotated[int, typer.Option(min=0, help="Seed of every tensor.")] = 0,
    scale: Annotated[
        float, typer.Option(help="Factor on the standard deviation of matrices.")
    ] = 1.0,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Write the first layers only, and the draft layers.")
    ] = None,
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes of tensors in a file, such as 5GB.")
    ] = "5GB",
    device: DeviceOption = "auto",
    force: Annotated[
        bool, typer.Option("--force", help="Replace the checkpoint in a directory that has files.")
    ] = False,
) -> None:
    """Write a checkpoint of random weights in the published formats, for tests and measurements.

    Its text is noise. One seed gives one checkpoint, whatever the shard size; a GPU draws other
    values than a CPU. There is no tokenizer in it: use --prompt-ids, or copy a tokenizer.json.
    """
    from v4graph.spec.load import load_spec
    from v4graph.spec.shorten import first_layers

    loaded = load_spec(spec)
    if layers is not None:
        loaded = first_layers(loaded, layers)
    shard_bytes = num_bytes("--shard-size", shard_size)
    if not 1e-4 <= scale <= 1e4:
        raise PlanError(f"--scale {scale}: expected 0.0001 to 10000")

    # After the checks above: these import torch.
    from v4graph.engine.engine import EngineConfig
    from v4graph.model.export import plan_shards, prepare_directory, write_checkpoint
    from v4graph.model.random_weights import RandomWeights
    from v4graph.spec.hf_export import official_config

    weights = RandomWeights(loaded, seed, scale, EngineConfig(device=device).torch_device())
    shards = plan_shards(weights.entries, shard_bytes)
    total = sum(entry.num_bytes for entry in weights.entries)
    config = official_config(loaded)
    prepare_directory(output, total, len(weights.entries), force)
    for missing in config.missing:
        typer.echo(f"note: no config.json: it has no key for {missing}", err=True)
    values = None if config.missing else config.values
    with show_progress(quiet=not sys.stderr.isatty()) as show:
        write_checkpoint(output, shards, weights.tensor, values, show)
    typer.echo("note: no tokenizer files: run it with --prompt-ids", err=True)
    if layers is not None and values is not None:
        typer.echo(f"note: v4graph import {output} -o SPEC.yaml writes the spec of it", err=True)
    typer.echo(
        f"wrote {output}: {counted(len(weights.entries), 'tensor', form=',')}, {total:,} bytes, "
        f"{counted(len(shards), 'safetensors file')}, seed {seed}"
    )
