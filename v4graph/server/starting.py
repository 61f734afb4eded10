"""Answers while the model is loaded and compiled: the socket is open from the first second on.

The standard library's server in a thread of its own: the main thread is busy, and FastAPI comes
later. Uvicorn then listens on the same sockets, so that no connection is refused in between.
"""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from v4graph.errors import ServeError

RETRY_AFTER_S = 10
_BACKLOG = 2048


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of `host`; port 0 picks one that is free.

    Raises:
        ServeError: the address cannot be used.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, proto, _, address in dict.fromkeys(found):
            made = socket.socket(family, kind, proto)
            sockets.append(made)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # All addresses of a host share the port that the first one was given.
            chosen = port or (sockets[0].getsockname()[1] if len(sockets) > 1 else 0)
            made.bind((address[0], chosen, *address[2:]))
            made.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        for made in sockets:
            made.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ServeError(
            f"{host}:{port}: cannot listen ({reason}); expected an address of this machine and a "
            "free port: --host, --port"
        ) from error
    return sockets


class Starting:
    """Serves 503 on some sockets until `stop`; `/health` says how far the start has come."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._done, self._of = 0, 0
        self._servers = [_Server(sock, self) for sock in sockets]
        self._threads = [
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
            for server in self._servers
        ]
        for thread in self._threads:
            thread.start()

    def progress(self, stage: str, done: int, total: int, what: str = "", /) -> None:
        """Note how many programs are compiled; other stages come before them."""
        if stage == "compile":
            self._done, self._of = done, total

    def stop(self) -> None:
        """Answer what has been accepted and leave the sockets open; idempotent."""
        for server in self._servers:
            server.shutdown()
            server.join()
        for thread in self._threads:
            thread.join()
        self._servers, self._threads = [], []

    def answer(self, path: str) -> dict[str, Any]:
        """The body for a path."""
        done, of = self._done, self._of
        if path.partition("?")[0] == "/health":
            return {"status": "compiling", "done": done, "of": of}
        message = f"the model is being loaded and compiled ({done} of {of} programs): try later"
        return {
            "error": {"message": message, "type": "server_error", "param": None, "code": "starting"}
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that `join` waits for open answers

    def __init__(self, sock: socket.socket, starting: Starting) -> None:
        super().__init__(sock.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = sock
        self.starting = starting

    def join(self) -> None:
        """Wait for the answers; the base class's way would close the socket too."""
        self.socket = self.socket.dup()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left: nothing to tell."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 5.0  # a slow client must not hold up the start

    def _respond(self) -> None:
        # An unread body would reset the connection before the answer is read.
        left = int(self.headers.get("Content-Length") or 0)
        while left > 0 and (part := self.rfile.read(min(left, 65536))):
            left -= len(part)
        body = json.dumps(self.server.starting.answer(self.path)).encode()
        self.send_response(503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Retry-After", str(RETRY_AFTER_S))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = _respond

    def log_message(self, format: str, *args: Any) -> None:
        """No line for each probe."""
