"""OpenAPI schema of a server: what each path takes, and every reply that it can give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lmcore_serve.http.problems import PLAIN_PATH, PlainProblem, Problem

__all__ = ["add_schema"]

_DESCRIPTIONS = {
    400: "A field is wrong, or the prompt is too long",
    401: "The API key is missing or not known",
    403: "The header `Host` does not name this server",
    404: "There is no such model",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "The queue is full",
    500: "The reply could not be made",
    503: "The server stops or has too much to do, or the text took too long",
}
_EVERYWHERE = (408, 413, 500)
_OF_PATHS: Mapping[str, tuple[int, ...]] = {
    "/api": (400, 429, 503),
    "/v1/completions": (400, 404, 429, 503),
    "/v1/chat/completions": (400, 404, 429, 503),
    "/v1/models": (),
    "/v1/models/{name}": (404,),
    "/health": (),
    "/metrics": (),
}
_REQUEST_ID = {
    "description": "Name of the request in the access log.",
    "schema": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
}
_RETRY_AFTER = {
    "description": "Seconds after which the client may try again.",
    "schema": {"type": "string", "pattern": "^[0-9]+$"},
}
_HEADERS: Mapping[int, Mapping[str, Any]] = {
    401: {
        "WWW-Authenticate": {
            "description": "Kind of the key.",
            "schema": {"type": "string", "enum": ["Bearer"]},
        }
    },
    429: {"Retry-After": _RETRY_AFTER},
    503: {"Retry-After": _RETRY_AFTER},
}
_KEY = {"type": "http", "scheme": "bearer", "description": "A key of the server's file."}


def add_schema(
    app: FastAPI,
    bodies: Sequence[type[BaseModel]],
    open_paths: Sequence[str],
    names: Sequence[str],
    *,
    keys: bool,
    hosts: bool,
) -> None:
    """Make `/openapi.json` of an application say what its endpoints and its guard reply.

    Args:
        app: Application.
        bodies: Classes of bodies of requests, and of events of streams.
        open_paths: Paths that need no key.
        names: Names of the models.
        keys: True if the other paths need one.
        hosts: True if a request has to name the server.
    """

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _complete_models(made["components"]["schemas"], bodies, names)
            if keys:
                made["components"]["securitySchemes"] = {"key": _KEY}
            for path, operations in made["paths"].items():
                needs_key = keys and path not in open_paths
                for operation in operations.values():
                    _complete(operation, path, needs_key=needs_key, hosts=hosts)
                    for parameter in operation.get("parameters", []):
                        parameter["schema"]["enum"] = list(names)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]


def _complete_models(
    schemas: dict[str, Any], bodies: Sequence[type[BaseModel]], names: Sequence[str]
) -> None:
    """Put pydantic's own schemas of some classes, with the names of models, for FastAPI's."""
    # FastAPI's errors of validation, in place of which this server replies 400.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    # FastAPI rounds limits to floats, of which none is the largest seed.
    classes: list[type[BaseModel]] = [Problem, PlainProblem, *bodies]
    own = models_json_schema(
        [(one, "validation") for one in classes], ref_template="#/components/schemas/{model}"
    )[1]
    schemas.update(_with_any_of(own["$defs"]))
    for name in ("CompletionBody", "ChatBody"):
        schemas[name]["properties"]["model"]["anyOf"][0]["enum"] = list(names)


def _with_any_of(schema: Any) -> Any:
    """Return a schema with `anyOf` for `oneOf`: of types that differ, which is quicker to check."""
    if isinstance(schema, dict):
        return {
            "anyOf" if name == "oneOf" else name: _with_any_of(one) for name, one in schema.items()
        }
    return [_with_any_of(one) for one in schema] if isinstance(schema, list) else schema


def _complete(operation: dict[str, Any], path: str, *, needs_key: bool, hosts: bool) -> None:
    """Add the errors and headers of the replies of an operation."""
    statuses = {*_EVERYWHERE, *_OF_PATHS[path]}
    statuses |= ({401} if needs_key else set()) | ({403} if hosts else set())
    if needs_key:
        operation["security"] = [{"key": []}]
    responses = operation["responses"]
    responses.pop("422", None)
    responses.update({str(one): _problem(path, one) for one in sorted(statuses)})
    for response in responses.values():
        response.setdefault("headers", {})["X-Request-Id"] = _REQUEST_ID


def _problem(path: str, status: int) -> dict[str, Any]:
    name = PlainProblem.__name__ if path == PLAIN_PATH else Problem.__name__
    return {
        "description": _DESCRIPTIONS[status],
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
        "headers": dict(_HEADERS.get(status, {})),
    }
