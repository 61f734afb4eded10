"""The HTTP application: an OpenAI-compatible front of one engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Response

from v4graph.engine.async_engine import AsyncEngine
from v4graph.server.body import StrictRoute
from v4graph.server.chat import add_chat
from v4graph.server.common import check_model
from v4graph.server.completions import add_completions
from v4graph.server.errors import install_error_handlers
from v4graph.server.generation import Serving
from v4graph.server.metrics import ServerMetrics
from v4graph.server.responses import Model, ModelList
from v4graph.server.version import package_version
from v4graph.text.tokenizer import Tokenizer


def create_app(async_engine: AsyncEngine, tokenizer: Tokenizer, model_name: str) -> FastAPI:
    """Build the application.

    Args:
        async_engine: started with the application, shut down with it.
        tokenizer: the checkpoint's tokenizer.
        model_name: the name that requests and answers carry.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async_engine.start()
        try:
            yield
        finally:
            await async_engine.shutdown()

    # No BaseHTTPMiddleware here: it wraps receive(), which hides a client that leaves.
    app = FastAPI(title="v4graph", version=package_version(), lifespan=lifespan)
    app.router.route_class = StrictRoute
    install_error_handlers(app)
    metrics = ServerMetrics(async_engine, model_name)
    serving = Serving(async_engine, tokenizer, metrics, model_name, int(time.time()))
    _add_status_routes(app, serving)
    add_completions(app, serving)
    add_chat(app, serving)
    return app


def _add_status_routes(app: FastAPI, serving: Serving) -> None:
    model = Model(
        id=serving.model_name,
        object="model",
        created=serving.created,
        owned_by="v4graph",
        max_model_len=serving.engine.max_model_len,
    )

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine thread runs, 503 after it has ended."""
        if (error := serving.engine.error) is not None:
            raise error
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Version of the package."""
        return {"version": package_version()}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(serving.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> ModelList:
        """The served model."""
        return ModelList(object="list", data=[model])

    @app.get("/v1/models/{model_id:path}")
    async def one_model(model_id: str) -> Model:
        """One model by name."""
        check_model(serving, model_id)
        return model
