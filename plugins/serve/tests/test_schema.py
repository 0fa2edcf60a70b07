"""`/openapi.json`: what it says of errors, keys, limits and streams is what the server does."""

from __future__ import annotations

from typing import Any

import pytest

from lmcore.inference.load import LoadedModel

from .conftest import Server, running_server

PROBLEM = {"$ref": "#/components/schemas/Problem"}
PLAIN_PROBLEM = {"$ref": "#/components/schemas/PlainProblem"}


@pytest.fixture(scope="module")
def schema(server: Server) -> dict[str, Any]:
    """The schema of a server without keys."""
    found: dict[str, Any] = server.ask("/openapi.json").json
    return found


def body_of(schema: dict[str, Any], method: str, path: str, status: str) -> Any:
    """Schema of the body of a reply."""
    reply = schema["paths"][path][method]["responses"][status]
    return reply["content"]["application/json"]["schema"]


def test_errors_of_fields(schema: dict[str, Any]) -> None:
    """They are 400 in the form of their interface, not FastAPI's 422."""
    for methods in schema["paths"].values():
        for operation in methods.values():
            assert "422" not in operation["responses"]
    assert body_of(schema, "post", "/v1/completions", "400") == PROBLEM
    assert body_of(schema, "post", "/v1/chat/completions", "429") == PROBLEM
    assert body_of(schema, "put", "/api", "400") == PLAIN_PROBLEM
    assert not {"HTTPValidationError", "ValidationError"} & set(schema["components"]["schemas"])


def test_statuses_of_an_operation(schema: dict[str, Any]) -> None:
    """An operation has the statuses of its replies, with their headers."""
    api = schema["paths"]["/api"]["put"]["responses"]
    assert set(api) == {"200", "400", "408", "413", "429", "500", "503"}
    assert all("Retry-After" in api[busy]["headers"] for busy in ("429", "503"))
    models = schema["paths"]["/v1/models"]["get"]["responses"]
    assert set(models) == {"200", "408", "413", "500"}
    for reply in (*api.values(), *models.values()):
        assert "X-Request-Id" in reply["headers"]
    health = body_of(schema, "get", "/health", "503")
    assert health == {"$ref": "#/components/schemas/HealthReply"}


def test_keys_and_names(loaded: LoadedModel, schema: dict[str, Any]) -> None:
    """A server that checks them says so; `/health` needs no key."""
    assert "securitySchemes" not in schema["components"]
    with running_server(loaded, keys=["key"], hosts={"127.0.0.1"}) as server:
        found = server.ask("/openapi.json", headers={"Authorization": "Bearer key"}).json
    assert found["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, methods in found["paths"].items():
        for operation in methods.values():
            assert ("401" in operation["responses"]) == (path != "/health")
            assert ("security" in operation) == (path != "/health")
            assert "403" in operation["responses"]


def test_names_of_models(schema: dict[str, Any]) -> None:
    """A program that reads the schema knows which models there are."""
    for body in ("CompletionBody", "ChatBody"):
        name, none = schema["components"]["schemas"][body]["properties"]["model"]["anyOf"]
        assert name["enum"] == ["tiny"]
        assert none == {"type": "null"}
    (parameter,) = schema["paths"]["/v1/models/{name}"]["get"]["parameters"]
    assert parameter["schema"]["enum"] == ["tiny"]


def test_limits_are_exact(server: Server, schema: dict[str, Any]) -> None:
    """The largest seed of the schema is taken, the next one refused."""
    schemas = schema["components"]["schemas"]
    limit = schemas["CompletionBody"]["properties"]["seed"]["anyOf"][0]["maximum"]
    assert limit == schemas["GenerateBody"]["properties"]["random_seed"]["maximum"]
    for seed, status in ((limit, 200), (limit + 1, 400)):
        reply = server.ask("/v1/completions", {"prompt": "a", "max_tokens": 2, "seed": seed})
        assert reply.status == status


@pytest.mark.parametrize(
    "path, chunk",
    [("/v1/completions", "CompletionReply"), ("/v1/chat/completions", "ChatChunk")],
)
def test_events(schema: dict[str, Any], path: str, chunk: str) -> None:
    """An event has a chunk, an error, or the end."""
    content = schema["paths"][path]["post"]["responses"]["200"]["content"]
    event = content["text/event-stream"]["itemSchema"]
    end, data = event["properties"]["data"]["anyOf"]
    assert end == {"const": "[DONE]"}
    named = [one["$ref"].rpartition("/")[2] for one in data["contentSchema"]["anyOf"]]
    assert named == [chunk, "Problem"]
    assert set(named) <= set(schema["components"]["schemas"])
