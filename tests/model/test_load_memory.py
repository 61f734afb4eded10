"""Peak memory of loading, measured in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import Tiny
from v4graph.model.export import plan_shards, write_checkpoint
from v4graph.model.random_weights import RandomWeights
from v4graph.spec.model import ModelSpec

MB = 1_000_000

# VmHWM and not getrusage: the kernel hands ru_maxrss down from the process that forked this one,
# so under a large pytest it would hide what is measured.
CHILD = """
import sys, torch
from pathlib import Path
from v4graph.model import loader
from v4graph.spec.model import ModelSpec

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

spec = ModelSpec.model_validate_json(Path(sys.argv[2]).read_text())
torch.empty(1).exponential_()
before = status("VmRSS")
params = getattr(loader, sys.argv[3])(spec, Path(sys.argv[1]), torch.bfloat16)
sizes = [p.nbytes if isinstance(p, torch.Tensor) else p.num_bytes for p in params.values()]
sys.stdout.write(f"{sum(sizes)} {status('VmHWM') - before}")
"""


def spec() -> ModelSpec:
    """About 200 MB of FP8 and FP4, in layers and experts as the published files have them."""
    data = Tiny(kinds=("csa", "hca", "csa"), hidden=512, heads=8, experts=64, vocab=4096).data()
    for ffn in data["ffn"].values():
        ffn["intermediate"] = 1024
    data["weights"] = {"linear": "fp8_block", "experts": "fp4", "other": "bf16"}
    return ModelSpec.model_validate(data)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    weights = RandomWeights(spec())
    write_checkpoint(directory, plan_shards(weights.entries, 25 * MB), weights.tensor, None)
    (directory / "spec.json").write_text(spec().model_dump_json())
    return directory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("load", ["load_params", "load_quantised"])
def test_peak_memory_is_little_more_than_the_parameters(load: str, checkpoint: Path) -> None:
    stored = sum(p.stat().st_size for p in checkpoint.glob("*.safetensors"))
    assert stored > 200 * MB
    result = subprocess.run(
        [sys.executable, "-c", CHILD, str(checkpoint), str(checkpoint / "spec.json"), load],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    size, peak = map(int, result.stdout.split())
    assert (
        size == pytest.approx(stored, rel=0.02) if load == "load_quantised" else size > 3 * stored
    )
    # One mapped file of 25 MB, one decoded tensor, and what torch allocates for itself.
    assert peak < size + 80 * MB, f"{peak / MB:.0f} MB to load {size / MB:.0f} MB"
