"""Serve a model: `python serve.py v4-nano --port 8000`, the same as `v4graph serve`."""

import sys

from v4graph.cli.main import app

if __name__ == "__main__":
    app(["serve", *sys.argv[1:]], prog_name="serve.py")
