"""docs/reference/http-api.md names every path and field, with its default and limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from lmcore.inference.load import LoadedModel
from lmcore_serve import served_model
from lmcore_serve import server as server_module
from lmcore_serve.api import chat, fields
from lmcore_serve.api.chat import ChatBody
from lmcore_serve.api.completions import CompletionBody
from lmcore_serve.api.fields import SamplingBody
from lmcore_serve.api.megatron import GenerateBody
from lmcore_serve.command.serve import ServeSection
from lmcore_serve.http import access_log, body, guard, log_limit
from lmcore_serve.state import MAX_ITEMS, MAX_PROMPTS, Limits

from .conftest import Server, running_server

PAGE = Path(__file__).parents[3] / "docs/reference/http-api.md"


def rows(title: str) -> dict[str, str]:
    """Return the text of each field's row in a chapter."""
    text = PAGE.read_text(encoding="utf-8")
    (chapter,) = re.findall(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    found = {}
    for line in chapter.splitlines():
        if line.startswith("| `"):
            for name in re.findall(r"`(\w+)`", line.split("|")[1]):
                found[name] = line
    return found


@pytest.mark.parametrize(
    "title, body, base",
    [
        ("`PUT /api`", GenerateBody, None),
        ("Fields of both `/v1` interfaces", SamplingBody, None),
        ("`POST /v1/completions`", CompletionBody, SamplingBody),
        ("`POST /v1/chat/completions`", ChatBody, SamplingBody),
    ],
)
def test_fields(title: str, body: type[BaseModel], base: type[BaseModel] | None) -> None:
    """A chapter has exactly the fields of its request, and the numbers of their limits."""
    own = set(body.model_fields) - set(base.model_fields if base else ())
    documented = rows(title)
    assert set(documented) == own
    for name in own:
        field = body.model_fields[name]
        if isinstance(field.default, bool):
            assert f"| {str(field.default).lower()} |" in documented[name]
        elif isinstance(field.default, int | float):
            assert f"| {field.default} |" in documented[name]


def test_limits() -> None:
    """The table of limits has the numbers that are enforced."""
    text = PAGE.read_text(encoding="utf-8")
    (chapter,) = re.findall(r"^## Limits\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    documented = {
        cells[1].strip().partition(" (")[0]: [int(one) for one in re.findall(r"\d+", cells[2])]
        for line in chapter.splitlines()
        if len(cells := line.split("|")) == 5 and re.search(r"\d", cells[2])
    }
    limits = Limits()
    assert limits.max_body_bytes == ServeSection.max_body_kb * 1024
    assert limits.max_connections == ServeSection.max_connections
    assert documented == {
        "head of a request": [server_module.MAX_HEAD_BYTES // 1024],
        "time to send the head, from the start of the connection or the previous reply": [
            limits.head_seconds
        ],
        "idle connection after a reply": [server_module.KEEP_ALIVE_SECONDS],
        "open connections": [limits.max_connections],
        "connections that wait to be opened": [server_module._MOST_WAITING],
        "connections in the system's queue": [server_module._QUEUE],
        "time without progress in reading a reply": [limits.unread_seconds],
        "body": [limits.max_body_bytes // 1024],
        "time to send the body": [limits.body_seconds],
        "bodies of all requests": [guard._MAX_BODIES],
        "strings, lists and objects in a body, names of fields included": [body.MAX_PARTS],
        "values in a body": [body.MAX_PARTS, MAX_PROMPTS, MAX_ITEMS],
        "nesting of lists and objects": [body.MAX_DEPTH],
        "fields of an object": [body.MAX_KEYS],
        "time until a body is parsed and checked, bodies before it included": [
            limits.check_seconds
        ],
        "characters of a prompt or conversation": [served_model.LONG_TOKEN],
        "JSON schema": [
            served_model.MAX_SCHEMA_BYTES // 1024,
            served_model.MAX_SCHEMA_VALUES,
        ],
        "prompts, texts of a prompt": [MAX_PROMPTS],
        "messages of a conversation": [chat._MAX_MESSAGES],
        "`role` and `name` of a message": [chat._MAX_NAME_LENGTH],
        "stop texts": [fields._MAX_STOPS, fields._MAX_STOP_LENGTH],
        "log lines of requests that reach no model": [
            access_log._AT_ONCE,
            access_log._PER_SECOND,
        ],
        "log lines of the same message of the server": [
            log_limit.REPEATS,
            1,
            round(1 / log_limit.REPEATS_PER_SECOND),
        ],
    }
    assert MAX_PROMPTS == fields.MAX_CHOICES


def test_paths(server: Server) -> None:
    """Every path of the schema is in the table, and the other way round."""
    schema: dict[str, Any] = server.ask("/openapi.json").json
    served = {
        f"{method.upper()} {path}"
        for path, methods in schema["paths"].items()
        for method in methods
    }
    text = PAGE.read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `((?:GET|PUT|POST) [^`]+)` \|", text, re.MULTILINE))
    assert documented == served | {"GET /"}


def test_statuses(loaded: LoadedModel) -> None:
    """Every status of the schema is explained; the status of a wrong method is no operation's."""
    with running_server(loaded, keys=["key"], hosts={"127.0.0.1"}) as server:
        schema = server.ask("/openapi.json", headers={"Authorization": "Bearer key"}).json
    statuses = {
        status
        for methods in schema["paths"].values()
        for one in methods.values()
        for status in one["responses"]
    }
    text = PAGE.read_text(encoding="utf-8")
    (chapter,) = re.findall(r"^## Errors\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    documented = set(re.findall(r"\b[45]\d\d\b", chapter.split("Under")[0]))
    assert documented | {"200"} == statuses | {"405"}
