"""The ASGI application: all endpoints of a server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib import resources
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

import lmcore
from lmcore.serving.api import chat, completions, megatron, models
from lmcore.serving.http.access_log import AccessLog
from lmcore.serving.http.guard import Guard
from lmcore.serving.http.metrics import Metrics
from lmcore.serving.http.problems import Problem, add_handlers
from lmcore.serving.state import ServerState

__all__ = ["create_app"]

_PAGE = resources.files("lmcore.serving") / "page"
_PAGE_HEADERS = {
    # The page needs nothing from elsewhere, and nobody else shows it in a frame.
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "A field is wrong, or the prompt is too long"},
    401: {"model": Problem, "description": "The API key is missing or not known"},
    403: {"model": Problem, "description": "The header `Host` does not name this server"},
    404: {"model": Problem, "description": "There is no such model or path"},
    405: {"model": Problem, "description": "The path has another method"},
    408: {"model": Problem, "description": "The body did not arrive in time"},
    413: {"model": Problem, "description": "The body is too large"},
    429: {"model": Problem, "description": "The queue is full"},
    500: {"model": Problem, "description": "The text could not be generated"},
    503: {"model": Problem, "description": "The server stops, or the text took too long"},
}
_PLAIN_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": str, "description": one["description"]} for status, one in _ERRORS.items()
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
    )
    app.state.server = state
    app.state.metrics = Metrics(state.models)
    app.include_router(megatron.router, responses=_PLAIN_ERRORS)
    for module in (completions, chat, models):
        app.include_router(module.router, responses=_ERRORS)
    app.include_router(_facts, responses={401: _ERRORS[401], 403: _ERRORS[403]})
    app.mount("/page", StaticFiles(packages=[("lmcore.serving", "page")]), name="page")
    add_handlers(app, megatron.GONE)
    guarded = Guard(
        app,
        keys,
        hosts,
        max_body_bytes=state.limits.max_body_bytes,
        body_seconds=state.limits.body_seconds,
    )
    return AccessLog(guarded, log, app.state.metrics)


@_facts.get("/health", summary="Say whether the server can generate")
async def health(request: Request) -> Response:
    """Say whether the server can generate, with the number of texts of each model."""
    state: ServerState = request.app.state.server
    alive = all(one.service.is_alive for one in state.models.values())
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
