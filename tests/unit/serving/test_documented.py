"""docs/reference/http-api.md names every path and field, with its default and limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from lmcore.generation.load import LoadedModel
from lmcore.serving.api.chat import ChatBody
from lmcore.serving.api.completions import CompletionBody
from lmcore.serving.api.fields import SamplingBody
from lmcore.serving.api.megatron import GenerateBody

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
