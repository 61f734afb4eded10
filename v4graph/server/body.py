"""JSON bodies in which every key is there once.

The standard parser keeps the last of equal keys: what the client asked for first would be dropped
in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException


class DuplicateKeyError(HTTPException):
    """A key is there twice in an object; `path` leads to it from the body's top.

    It is an HTTPException because FastAPI words every other fault of a parser itself.
    """

    def __init__(self, path: str) -> None:
        super().__init__(400, f"{path}: this key is there twice in one object; give it once")
        self.path = path


class StrictRoute(APIRoute):
    """A route whose JSON body is parsed by `parse`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return handle


class _StrictRequest(Request):
    async def json(self) -> Any:
        return parse(await self.body())


def parse(content: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        DuplicateKeyError: an object has a key twice, at any depth.
    """
    repeated: dict[int, str] = {}

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            seen: set[str] = set()
            repeated[id(out)] = next(k for k, _ in pairs if k in seen or seen.add(k))
        return out

    value = json.loads(content, object_pairs_hook=build)
    if repeated and (path := _find(value, "", repeated)) is not None:
        raise DuplicateKeyError(path)
    return value


def _find(value: Any, path: str, repeated: dict[int, str]) -> str | None:
    """Path of the first key that is there twice; what an equal key replaced is not searched, for
    then its own object is one of these."""
    if isinstance(value, dict):
        if id(value) in repeated:
            return _below(path, repeated[id(value)])
        inner = [(_below(path, key), item) for key, item in value.items()]
    elif isinstance(value, list):
        inner = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return None
    found = (_find(item, below, repeated) for below, item in inner)
    return next((p for p in found if p is not None), None)


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
