"""Run the application under uvicorn and say when it is ready."""

from __future__ import annotations

import socket
import sys

import uvicorn
from fastapi import FastAPI


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, model_name: str) -> None:
        super().__init__(config)
        self._model_name = model_name

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            # For scripts that wait for this line, also behind a pipe.
            sys.stdout.write(f"ready: {self._model_name} at http://{host}:{port}/v1\n")
            sys.stdout.flush()


def run_server(
    app: FastAPI, model_name: str, sockets: list[socket.socket], log_level: str, grace: int
) -> None:
    """Serve on listening sockets until SIGINT or SIGTERM, then give open requests `grace` seconds.

    Raises:
        SystemExit: start-up failed.
    """
    config = uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=grace)
    server = _Server(config, model_name)
    server.run(sockets)
    if not server.started:
        raise SystemExit(3)
