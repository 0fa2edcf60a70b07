"""Requests that schemathesis makes from the server's own schema, valid ones and wrong ones."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from suite.selection import peer

from lmcore.generation.chat.template import ChatTemplate
from lmcore.inference.load import LoadedModel
from lmcore_serve.state import Limits

from .conftest import Server, running_server

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
KEY = "key"


def run(server: Server, examples: int, seed: int) -> tuple[list[Any], list[str], list[int]]:
    """Try all operations; return checks, problems of the run, and the status of each reply."""
    peer("schemathesis")
    from schemathesis import openapi
    from schemathesis.config import SchemathesisConfig
    from schemathesis.engine import events, from_schema

    headers = {"Authorization": f"Bearer {KEY}"}
    config = SchemathesisConfig.from_dict(
        {
            "seed": seed,
            "headers": headers,
            "request-timeout": 30,
            "continue-on-failure": True,
            "generation": {"max-examples": examples, "database": "none", "no-shrink": True},
            "phases": {"stateful": {"enabled": False}},
            # What each field allows may contradict another field, or not fit the model.
            "checks": {"positive_data_acceptance": {"enabled": False}},
        }
    )
    schema = openapi.from_url(
        f"http://127.0.0.1:{server.port}/openapi.json", config=config, headers=headers
    )
    checks, problems, statuses = [], [], []
    for event in from_schema(schema).execute():
        if isinstance(event, events.ScenarioFinished):
            recorder = event.recorder
            checks += [one for found in recorder.checks.values() for one in found]
            replies = [one.response for one in recorder.interactions.values()]
            statuses += [one.status_code for one in replies if one is not None]
        elif isinstance(event, events.NonFatalError | events.FatalError):
            problems.append(str(event))
    return checks, problems, statuses


@pytest.mark.slow  # most of its time goes into the cases that the schema itself asks for
@pytest.mark.parametrize("examples", [4, pytest.param(300, marks=pytest.mark.full)])
def test_every_operation(loaded: LoadedModel, examples: int) -> None:
    """No reply is a server error, and each is as the schema says; wrong data is refused."""
    template = ChatTemplate(loaded.tokenizer, {"default": TEMPLATE}, "test")
    with running_server(
        loaded,
        keys=[KEY],
        hosts={"127.0.0.1"},
        max_running=8,
        max_waiting=128,
        limits=Limits(request_seconds=20),
        change=lambda model: dataclasses.replace(model, template=template),
    ) as server:
        checks, problems, statuses = run(server, examples, seed=3)
        assert server.ask("/health").json["status"] == "ok"
    template.close()
    assert {json.loads(line)["status"] for line in server.log} >= set(statuses)
    assert problems == []
    failed = [one for one in checks if one.status.value == "failure"]
    assert [f"{one.name}: {one.failure_info.failure}" for one in failed] == []
    assert {one.name for one in checks} >= {
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
        "ignored_auth",
        "unsupported_method",
    }
    for status in (200, 400, 401, 404, 405):
        assert statuses.count(status) > 5
