"""Errors as replies: what OpenAI's clients read under /v1, and Megatron's client under /api."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from lmcore.serving.errors import ApiError

__all__ = ["PLAIN_PATH", "PlainProblem", "Problem", "add_handlers", "openai_problem", "reply"]

logger = logging.getLogger(__name__)

_MOST_SHOWN = 10

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


def add_handlers(
    app: FastAPI,
    gone: Mapping[str, str],
    unsupported: Collection[str],
    expected: Mapping[str, str],
) -> None:
    """Make an application answer each error by `reply`.

    Args:
        app: Application.
        gone: Messages for fields that an interface no longer has.
        unsupported: Fields of OpenAI's interfaces that these do not have.
        expected: Values of fields that may be of several types.
    """

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return reply(request.url.path, _of_fields(error.errors(), gone, unsupported, expected))

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

    app.add_exception_handler(RequestValidationError, invalid)
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
    if error.status_code == 400:  # the framework's own, of the body
        return _of_body(error.__cause__)
    return str(error.detail)


def _of_body(cause: BaseException | None) -> str:
    """Return the message for a body that could not be parsed."""
    match cause:
        case UnicodeDecodeError():
            return "the body is not UTF-8"
        case RecursionError():
            return "the body is nested too deeply"
        case ValueError():
            return "the body has a number of too many digits"
        case _:
            return "the body is not JSON"


def _of_fields(
    problems: Sequence[Mapping[str, Any]],
    gone: Mapping[str, str],
    unsupported: Collection[str],
    expected: Mapping[str, str],
) -> ApiError:
    """Return one error for all fields that are wrong."""
    messages: list[str] = []
    fields: list[str] = []
    for name, of_name in _by_field(problems).items():
        found = list(dict.fromkeys(_message(one, gone, unsupported) for one in _relevant(of_name)))
        if len(found) > 1 and name is not None and name in expected:
            found = [f"`{name}` has to be {expected[name]}"]
        messages += found
        if name is not None:
            fields.append(name)
    shown = list(dict.fromkeys(messages))
    more = [f"and {len(shown) - _MOST_SHOWN} more"] if len(shown) > _MOST_SHOWN else []
    return ApiError(
        400, "; ".join(shown[:_MOST_SHOWN] + more), field=fields[0][:100] if fields else None
    )


def _by_field(
    problems: Sequence[Mapping[str, Any]],
) -> dict[str | None, list[Mapping[str, Any]]]:
    """Return the problems of each field of the body; None: of the body itself."""
    found: dict[str | None, list[Mapping[str, Any]]] = {}
    for one in problems:
        place = [str(part) for part in one["loc"] if part != "body"]
        # The place of an error of JSON is a position in the text.
        name = place[0] if place and one["type"] != "json_invalid" else None
        found.setdefault(name, []).append(one)
    return found


def _relevant(problems: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the problems of a field without what only follows from another of them."""
    # Of a union, the types that the value does not have; of an object of another kind, its fields.
    kept = [one for one in problems if not _is_of_other_type(one)] or problems
    if all(len(one["loc"]) > 2 and _is_type_name(str(one["loc"][2])) for one in kept):
        kept = [one for one in kept if not one["type"].endswith("_type")] or kept
    kinds = [one["loc"][:-1] for one in kept if one["type"] == "literal_error"]
    return [
        one
        for one in kept
        if one["type"] == "literal_error" or not any(one["loc"][: len(at)] == at for at in kinds)
    ]


def _message(
    problem: Mapping[str, Any], gone: Mapping[str, str], unsupported: Collection[str]
) -> str:
    """Return what is wrong with a place of the body."""
    kind, place = problem["type"], [str(part) for part in problem["loc"] if part != "body"]
    if kind == "json_invalid":
        return "the body is not JSON"
    if not place:
        return "the body has to be a JSON object, with the header `Content-Type: application/json`"
    # The names of types within a union are not places of the body.
    where = ".".join(part for part in place if not _is_type_name(part))[:100]
    only_empty = kind == "too_long" and problem["ctx"]["max_length"] == 0
    if kind == "none_required" or only_empty:
        return f"`{where}` is not supported"
    if kind == "extra_forbidden":
        if where in unsupported:
            return f"`{where}` is not supported"
        return gone.get(where, f"`{where}` is not a field of this request")
    said = str(problem["ctx"]["error"]) if kind == "value_error" else problem["msg"]
    return f"`{where}`: {said[:1].lower()}{said[1:]}"


def _is_of_other_type(problem: Mapping[str, Any]) -> bool:
    """Return True if a value has not the type of a part of a union."""
    return problem["type"].endswith("_type") and _is_type_name(str(problem["loc"][-1]))


def _is_type_name(part: str) -> bool:
    return "[" in part or part in {"str", "int", "float", "bool", "none", "constrained-str"}
