"""`v4graph serve`: an OpenAI-compatible HTTP endpoint of one model."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from v4graph.cli.options import (
    AllowNonfiniteOption,
    CheckedOption,
    CompileOption,
    DeviceOption,
    DtypeOption,
    KernelsOption,
    KvMemoryOption,
    MaxModelLenOption,
    MaxNumSeqsOption,
    NumDraftTokensOption,
    OverlapOption,
    PrefixCacheOption,
    SpecArgument,
    SpeculativeOption,
    WeightFormatOption,
    WeightsOption,
    build_engine,
    load_tokenizer,
    num_bytes,
    weights_directory,
)

LogLevel = Literal["critical", "error", "warning", "info", "debug"]


def serve(
    spec: SpecArgument,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in the API; the spec's if left out.")
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Of the HTTP server.")] = "info",
    grace: Annotated[int, typer.Option(min=0, help="Seconds for open requests when stopped.")] = 30,
    weights: WeightsOption = None,
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: MaxNumSeqsOption = 8,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    compiled: CompileOption = True,
    checked: CheckedOption = False,
    kernels: KernelsOption = "auto",
    weight_format: WeightFormatOption = "auto",
    allow_nonfinite: AllowNonfiniteOption = False,
    speculative: SpeculativeOption = None,
    num_draft_tokens: NumDraftTokensOption = None,
    overlap: OverlapOption = True,
    prefix_cache: PrefixCacheOption = True,
    kv_memory: KvMemoryOption = None,
) -> None:
    """Serve a model until interrupted; says when it is ready."""
    from v4graph.server.starting import Starting, listen
    from v4graph.spec.load import load_spec

    config = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "dtype": dtype,
        "device": device,
        "compile": compiled,
        "checked": checked,
        "kernels": kernels,
        "weight_format": weight_format,
        "allow_nonfinite": allow_nonfinite,
        "speculative": speculative,
        "num_draft_tokens": num_draft_tokens,
        "overlap": overlap,
        "prefix_cache": prefix_cache,
        "kv_memory_bytes": num_bytes("--kv-memory", kv_memory) or None,
    }
    # Faults of the command are told before anyone is told to wait.
    load_spec(spec)
    weights_directory(spec, weights)
    sockets = listen(host, port)
    starting = Starting(sockets)
    try:
        shown = f"[{host}]" if ":" in host else host
        bound = sockets[0].getsockname()[1]
        typer.echo(f"listening at http://{shown}:{bound}; 503 until the model is ready", err=True)
        engine, stages = build_engine(spec, weights, config, watch=starting.progress)
        for stage, seconds in stages.seconds.items():
            typer.echo(f"{stage}: {seconds:.1f} s", err=True)
        tokenizer = load_tokenizer(spec, weights, engine.spec.bos_token_id)
        name = served_model_name or engine.spec.name

        from v4graph.engine.async_engine import AsyncEngine
        from v4graph.server.app import create_app
        from v4graph.server.run import run_server

        app = create_app(AsyncEngine(engine), tokenizer, name)
    finally:
        starting.stop()
    run_server(app, name, sockets, log_level, grace)
