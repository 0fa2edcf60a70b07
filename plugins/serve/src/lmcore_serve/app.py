"""The ASGI application: all endpoints of a server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib import resources
from typing import Literal

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

import lmcore
from lmcore_serve.api import chat, completions, megatron, models
from lmcore_serve.http.access_log import AccessLog
from lmcore_serve.http.body import BodyReader
from lmcore_serve.http.guard import OPEN_PATHS, Guard
from lmcore_serve.http.metrics import Metrics
from lmcore_serve.http.problems import add_handlers
from lmcore_serve.http.schema import add_schema
from lmcore_serve.state import ServerState

__all__ = ["create_app"]

_PAGE = resources.files("lmcore_serve") / "page"
_PAGE_HEADERS = {
    # The page needs nothing from elsewhere, and nobody else shows it in a frame.
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_facts = APIRouter()


def create_app(
    state: ServerState,
    *,
    keys: Sequence[str] = (),
    hosts: Collection[str] | None = None,
    log: Callable[[str], None] | None = None,
) -> ASGIApp:
    """Return the application of a server.

    Args:
        state: Models and limits.
        keys: API keys; without any, everybody may use the server.
        hosts: Names that a request may call this server by; None: any.
        log: Function that takes each line of the access log; None: no log.
    """
    app = FastAPI(
        title="lmcore",
        version=lmcore.__version__,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a client would get an empty reply
    )
    app.state.server = state
    app.state.metrics = Metrics(state.models)
    app.state.bodies = BodyReader(state.max_items, state.limits.check_seconds)
    routers = (megatron.router, completions.router, chat.router, models.router, _facts)
    for router in routers:
        app.include_router(router)
    app.mount("/page", StaticFiles(packages=[("lmcore_serve", "page")]), name="page")
    add_handlers(app)
    bodies = (megatron.GenerateBody, completions.CompletionBody, chat.ChatBody, chat.ChatChunk)
    names = list(state.models)
    add_schema(app, bodies, OPEN_PATHS, names, keys=bool(keys), hosts=hosts is not None)
    guarded = Guard(
        app,
        keys,
        hosts,
        max_body_bytes=state.limits.max_body_bytes,
        body_seconds=state.limits.body_seconds,
    )
    paths = [
        route.path for router in routers for route in router.routes if isinstance(route, APIRoute)
    ]
    return AccessLog(guarded, log, app.state.metrics, paths)


class NumTexts(BaseModel):
    """Number of texts of a model."""

    running: int
    waiting: int


class HealthReply(BaseModel):
    """State of a server."""

    status: Literal["ok", "failed"]
    models: dict[str, NumTexts]


@_facts.head("/health", include_in_schema=False)  # as load balancers ask
@_facts.get(
    "/health",
    responses={
        200: {"model": HealthReply},
        503: {"model": HealthReply, "description": "The server cannot generate"},
    },
    response_model=None,
    summary="Say whether the server can generate",
)
async def health(request: Request) -> Response:
    """Say whether the server can generate, with the number of texts of each model."""
    state: ServerState = request.app.state.server
    services = [one.service for one in state.models.values()]
    # No request can be answered in time while a step takes longer than a whole request may.
    most = state.limits.request_seconds
    alive = all(one.is_alive and one.seconds_without_step <= most for one in services)
    found = {
        name: {"running": one.service.num_running, "waiting": one.service.num_waiting}
        for name, one in state.models.items()
    }
    body = {"status": "ok" if alive else "failed", "models": found}
    return JSONResponse(body, status_code=200 if alive else 503)


@_facts.get(
    "/metrics", summary="Numbers in Prometheus' text format", response_class=PlainTextResponse
)
async def metrics(request: Request) -> Response:
    """Return the numbers of the server."""
    numbers: Metrics = request.app.state.metrics
    return Response(numbers.text(), media_type=CONTENT_TYPE_LATEST)


@_facts.get("/", include_in_schema=False)
async def page() -> Response:
    """Return the page."""
    content = (_PAGE / "index.html").read_bytes()
    return Response(content, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)
