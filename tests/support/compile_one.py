"""A process that compiles two regions, runs them and prints what they return."""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from v4graph.ops.norm import rms_norm
from v4graph.program.compiler import Compiler


def main() -> None:
    torch.set_num_threads(1)
    compiler = Compiler()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, 1e-6)

    def double(x: Tensor) -> Tensor:
        return (x @ x.t()) * 2

    x = torch.linspace(-1, 1, 64).view(4, 16)
    out = compiler.region("norm", norm, 4)(x, torch.arange(16.0))
    compiler.keep()
    out = compiler.region("double", double, 4)(out)
    compiler.seal()
    sys.stdout.write(json.dumps(out.tolist()))


if __name__ == "__main__":
    main()
