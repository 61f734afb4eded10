"""Turn every fault into an OpenAI-shaped error: message, type, param, code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from v4graph.engine.async_engine import EngineDeadError
from v4graph.errors import NonFiniteLogitsError, RequestError
from v4graph.server.body import DuplicateKeyError
from v4graph.server.protocol import UnsupportedFieldError


class ApiError(Exception):
    """A fault with its HTTP status and its OpenAI fields."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "message": _encodable(message),
                "type": kind,
                "param": None if param is None else _encodable(param),
                "code": code,
            },
        }


def as_api_error(error: Exception, prompt_param: str = "prompt") -> ApiError:
    """The API form of an exception; `prompt_param` is the request's name for its prompt."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        param = prompt_param if error.field in ("prompt", "prompt_ids") else error.field
        code = "unsupported_field" if isinstance(error, UnsupportedFieldError) else None
        return ApiError(400, str(error), param, code)
    if isinstance(error, NonFiniteLogitsError):
        return ApiError(500, str(error), kind="server_error", code="nonfinite_logits")
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), kind="server_error", code="engine_dead")
    return ApiError(500, f"internal error: {type(error).__name__}", kind="server_error")


def install_error_handlers(app: FastAPI) -> None:
    """Give all faults of an app, validation and routing included, the OpenAI shape."""

    def respond(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, status_code=error.status)

    async def on_fault(_: Request, error: Exception) -> JSONResponse:
        return respond(as_api_error(error))

    async def on_validation(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)  # noqa: S101 (registered for it)
        return respond(_validation_error(error.errors()))

    async def on_http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)  # noqa: S101 (registered for it)
        fault = ApiError(error.status_code, str(error.detail))
        if isinstance(error, DuplicateKeyError):
            fault = ApiError(400, str(error.detail), error.path, "duplicate_key")
        return JSONResponse(fault.body, status_code=fault.status, headers=error.headers)

    for kind in (ApiError, RequestError, EngineDeadError, Exception):
        app.add_exception_handler(kind, on_fault)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)


def _encodable(text: str) -> str:
    # JSON bodies may hold lone surrogates, and errors quote the body.
    return text.encode(errors="backslashreplace").decode()


def _validation_error(errors: Sequence[Any]) -> ApiError:
    first = errors[0]
    path = list(first["loc"])[1:]  # the first entry is "body"
    if first["type"] == "json_invalid":
        detail = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not valid JSON: {detail}", code="invalid_json")
    param = ""
    for key in path:
        param += f"[{key}]" if isinstance(key, int) else f".{key}" if param else str(key)
    # A check of a whole field tells where in it the fault lies.
    param += first.get("ctx", {}).get("path", "")
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"{param}: this field is not supported", param, code="unsupported_field"
        )
    if not param:
        return ApiError(400, "the body must be a JSON object (Content-Type: application/json)")
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}", param, code=first["type"])
