"""Options that `generate` and `serve` share, and the engine that they describe.

Nothing heavy is imported before a command runs, so that `v4graph --help` is quick.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from v4graph.cli.progress import show_progress

if TYPE_CHECKING:
    from v4graph.engine.engine import LLMEngine
    from v4graph.program.build import Progress
    from v4graph.text.tokenizer import Tokenizer

Dtype = Literal["float32", "bfloat16"]
Kernels = Literal["auto", "reference", "operators"]
WeightFormat = Literal["auto", "decoded", "stored"]

SpecArgument = Annotated[
    str, typer.Argument(metavar="SPEC", help="Name of a shipped spec, or path of a YAML file.")
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Checkpoint directory; the one beside the spec file, of its name, if left out.",
    ),
]
MaxModelLenOption = Annotated[
    int | None, typer.Option(min=1, help="Longest prompt and output together, in tokens.")
]
MaxNumSeqsOption = Annotated[int, typer.Option(min=1, help="Requests that run at once.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Compute dtype.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
CompileOption = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Compile the step programs.")
]
CheckedOption = Annotated[
    bool, typer.Option("--checked", help="Poison buffers and check the stamps of every step.")
]
SpeculativeOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Speculative mode of the spec, or none; the spec's first if left out.",
    ),
]
NumDraftTokensOption = Annotated[
    int | None, typer.Option(min=1, help="Draft tokens of a round; the mode's own if left out.")
]
KvMemoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of the page pools, such as 512MiB; enough for all sequences if left out "
        "(on a GPU, what is free).",
    ),
]
OverlapOption = Annotated[
    bool,
    typer.Option(
        "--overlap/--no-overlap", help="Launch a round before the last one's tokens are read."
    ),
]
PrefixCacheOption = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Keep pages, and start a prompt behind the longest prefix that is kept.",
    ),
]
KernelsOption = Annotated[
    Kernels,
    typer.Option(
        help="Functions that the compiler fuses, or registered operators (Triton kernels on a GPU)."
    ),
]
WeightFormatOption = Annotated[
    WeightFormat,
    typer.Option(help="Keep FP8 and FP4 weights as stored, or decode them when loading."),
]

AllowNonfiniteOption = Annotated[
    bool,
    typer.Option(
        "--allow-nonfinite",
        help="Load weights that are NaN or infinite; requests that they reach end with an error.",
    ),
]


def num_bytes(option: str, text: str | None) -> int:
    """Bytes of a size such as `1000`, `512MiB` or `3.5GB`; 0 for None.

    Raises:
        PlanError: anything else.
    """
    if text is None:
        return 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]i?)?B?", text.strip())
    units = {"": 1, **{u: 1000**i for i, u in enumerate("kMGT", 1)}}
    units |= {f"{u}i": 1024**i for i, u in enumerate("kMGT", 1)}
    size = int(float(found[1]) * units[found[2] or ""]) if found else 0
    if size < 1:
        from v4graph.errors import PlanError

        raise PlanError(f"{option} {text!r}: expected a size such as 1000000, 512MiB or 3.5GB")
    return size


@dataclass
class StageTimes:
    """Seconds that each stage of starting an engine took."""

    seconds: dict[str, float] = field(default_factory=dict)
    _latest: float = field(default_factory=time.perf_counter)

    def note(self, stage: str) -> None:
        """Charge the time since the last note to a stage."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._latest
        self._latest = now


def build_engine(
    spec_name: str,
    weights: Path | None,
    config: dict[str, Any],
    quiet: bool = False,
    watch: Progress | None = None,
) -> tuple[LLMEngine, StageTimes]:
    """Load a spec and start its engine, and tell how far it is on stderr.

    Args:
        spec_name: name of a shipped spec, or a path.
        weights: checkpoint directory, or None for the one beside the spec file.
        config: fields of `EngineConfig`.
        quiet: show no bar, and lines only of a slow start.
        watch: told the progress too.
    """
    from v4graph.spec.load import load_spec

    spec = load_spec(spec_name)
    directory = weights_directory(spec_name, weights)
    # After the checks above: importing the engine imports torch.
    from v4graph.engine.engine import EngineConfig, LLMEngine

    times = StageTimes()
    with show_progress(quiet) as show:

        def progress(stage: str, done: int, total: int, what: str = "", /) -> None:
            times.note(stage)
            show(stage, done, total, what)
            if watch is not None:
                watch(stage, done, total, what)

        engine = LLMEngine.from_spec(spec, directory, EngineConfig(**config), progress)
    return engine, times


def load_tokenizer(spec_name: str, weights: Path | None, bos_token_id: int | None) -> Tokenizer:
    """The tokenizer of the checkpoint that `build_engine` loads."""
    from v4graph.text.tokenizer import Tokenizer

    return Tokenizer.from_directory(weights_directory(spec_name, weights), bos_token_id)


def weights_directory(spec_name: str, weights: Path | None) -> Path:
    """The checkpoint directory: as given, or the one beside the spec file.

    Raises:
        WeightsError: it does not exist.
    """
    from v4graph.errors import WeightsError
    from v4graph.spec.load import spec_path

    directory = weights or spec_path(spec_name).with_suffix("")
    if not directory.is_dir():
        raise WeightsError(
            f"{directory}: no such checkpoint directory; pass the directory that holds the "
            "safetensors and tokenizer.json with --weights"
        )
    return directory
