"""Errors as replies: what OpenAI's clients read under /v1, and Megatron's client under /api."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from lmcore_serve.errors import ApiError

__all__ = ["PLAIN_PATH", "PlainProblem", "Problem", "add_handlers", "openai_problem", "reply"]

logger = logging.getLogger(f"lmcore.{__name__}")  # of the lines that lmcore formats

PLAIN_PATH = "/api"
"""Path whose errors are a message alone, as Megatron-LM's client reads them."""


class ProblemDetails(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Problem(BaseModel):
    """Body of a reply that is an error."""

    error: ProblemDetails


class PlainProblem(BaseModel):
    """Body of a reply of `PLAIN_PATH` that is an error."""

    message: str


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def openai_problem(error: ApiError) -> dict[str, Any]:
    """Return the body of a reply for an error."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = ProblemDetails(message=error.message, type=kind, param=error.field, code=error.code)
    return Problem(error=details).model_dump()


def reply(path: str, error: ApiError) -> Response:
    """Return the reply for an error, in the form of the interface that *path* belongs to."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    plain = PlainProblem(message=error.message).model_dump()
    body = plain if path == PLAIN_PATH else openai_problem(error)
    return JSONResponse(body, status_code=error.status, headers=headers)


def add_handlers(app: FastAPI) -> None:
    """Make an application answer each error by `reply`."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return reply(request.url.path, error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        found = ApiError(error.status_code, _of_path(request, error))
        answer = reply(request.url.path, found)
        answer.headers.update(error.headers or {})
        return answer

    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("an internal error", exc_info=error)
        return reply(request.url.path, ApiError(500, "an internal error; see the server's log"))

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)


def _of_path(request: Request, error: HTTPException) -> str:
    """Return the message for a path, or a method, that there is not."""
    path = request.url.path[:200]
    if error.status_code == 404:
        return (
            f"there is no path `{path}`; `/v1/completions`, `/v1/chat/completions`, `/v1/models` "
            f"and `{PLAIN_PATH}` are interfaces of this server"
        )
    if error.status_code == 405:
        return f"`{path}` takes {(error.headers or {}).get('Allow', 'another method')}"
    return str(error.detail)
