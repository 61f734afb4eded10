"""v4-nano on a GPU: the same greedy tokens as on the CPU, eager and compiled.

    python benchmarks/gpu_smoke.py

Prints the number of equal tokens, the first difference with its top-2 gap if there is one, and the
seconds that compiling took.
"""

from __future__ import annotations

import time

import torch

from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import SamplingParams
from v4graph.model.loader import load_params
from v4graph.spec.load import load_spec, spec_path

PROMPTS = ([0, 300, 301, 302], list(range(400, 500)), [0, 77] * 70)


def run(device: str, compiled: bool) -> list[list[int]]:
    """Greedy tokens of all prompts in one batch."""
    spec = load_spec("v4-nano")
    params = load_params(spec, spec_path("v4-nano").with_suffix(""), torch.float32)
    config = EngineConfig(
        max_num_seqs=3,
        max_num_batched_tokens=256,
        max_model_len=512,
        decode_buckets=(3,),
        prefill_buckets=((256, 3),),
        greedy_only=True,
        device=device,
        compile=compiled,
    )
    begin = time.perf_counter()
    llm = LLMEngine.from_params(spec, params, config)
    print(f"{device} compile={compiled}: start {time.perf_counter() - begin:.1f} s", flush=True)
    out: dict[str, list[int]] = {}
    for i, ids in enumerate(PROMPTS):
        out[str(i)] = []
        params_ = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        llm.add_request(str(i), list(ids), params_)
    begin = time.perf_counter()
    while llm.has_unfinished():
        for step in llm.step():
            out[step.request_id] += step.token_ids
    seconds = time.perf_counter() - begin
    print(f"{device} compile={compiled}: {seconds:.2f} s for {3 * 64} tokens", flush=True)
    llm.check_integrity()
    return list(out.values())


def main() -> None:
    """Compare the three paths."""
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = run("cpu", False)
    for compiled in (False, True):
        got = run("cuda", compiled)
        for i, (a, b) in enumerate(zip(expected, got, strict=True)):
            same = next((k for k in range(64) if a[k] != b[k]), 64)
            print(f"cuda compile={compiled} prompt {i}: {same} of 64 tokens equal", flush=True)


if __name__ == "__main__":
    main()
