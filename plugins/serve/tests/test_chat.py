"""`/v1/chat/completions`: answers to a conversation through the model's template."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lmcore.generation.chat.template import ChatTemplate
from lmcore.generation.generate import recompute
from lmcore.generation.request import Request
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.inference.load import LoadedModel
from lmcore_serve.served_model import ServedModel

from .conftest import Server, running_server

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def with_template(model: ServedModel, source: str) -> ServedModel:
    """Return the model with a template."""
    template = ChatTemplate(model.loaded.tokenizer, {"default": source}, "test")
    return dataclasses.replace(model, template=template)


@pytest.fixture(scope="module")
def chat(loaded: LoadedModel) -> Iterator[Server]:
    """A server of a model with a template."""
    template = ChatTemplate(loaded.tokenizer, {"default": TEMPLATE}, "test")
    with running_server(
        loaded, change=lambda model: dataclasses.replace(model, template=template)
    ) as made:
        yield made
    template.close()


def talk(*contents: str) -> list[dict[str, Any]]:
    """Make a conversation, the user's messages first."""
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": one} for at, one in enumerate(contents)]


def test_an_answer(chat: Server, loaded: LoadedModel) -> None:
    """It continues the rendered conversation, by default to the end of the context."""
    reply = chat.ask(PATH, {"messages": talk("Hi", "Yo", "So"), "temperature": 0, "logit_bias": {}})
    assert reply.status == 200
    prompt = list(b"u:Hi;a:Yo;u:So;a:")
    request = Request(prompt, 96, SamplingOptions(greedy=True), 0, frozenset({256}))
    request = dataclasses.replace(request, max_tokens=96 - len(prompt) + 1)
    (expected,) = recompute(loaded.model, [request], 257)
    (choice,) = reply.json["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": loaded.tokenizer.decode(expected.tokens),
        "refusal": None,
    }
    assert reply.json["usage"]["prompt_tokens"] == len(prompt)


def test_a_stream(chat: Server) -> None:
    """The role, then the parts with their log-probabilities, then the end."""
    body = {
        "messages": talk("Hi"),
        "max_completion_tokens": 8,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    (whole,) = chat.ask(PATH, body).json["choices"]
    events = chat.ask(PATH, {**body, "stream": True}).events
    assert events[0]["object"] == "chat.completion.chunk"
    parts = [event["choices"][0] for event in events]
    assert parts[0]["delta"] == {"role": "assistant", "content": ""}
    content = "".join(part["delta"].get("content", "") for part in parts)
    assert content == whole["message"]["content"]
    assert parts[-1]["finish_reason"] == whole["finish_reason"] == "length"
    tokens = [one for part in parts if part["logprobs"] for one in part["logprobs"]["content"]]
    assert [one["token"] for one in tokens] == [
        one["token"] for one in whole["logprobs"]["content"]
    ]
    assert all(len(one["top_logprobs"]) == 2 for one in tokens)


def test_a_reply_is_made_beside_the_loop(chat: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of a whole reply keep no other request waiting."""
    threads = set()
    real = ServedModel.token_bytes

    def noted(self: ServedModel, token: int) -> bytes:
        threads.add(threading.current_thread().name)
        return real(self, token)

    monkeypatch.setattr(ServedModel, "token_bytes", noted)
    body = {"messages": talk("Hi"), "max_tokens": 3, "logprobs": True, "temperature": 0}
    assert len(chat.ask(PATH, body).json["choices"][0]["logprobs"]["content"]) == 3
    assert all(name.startswith("asyncio_") for name in threads)


def test_parts_of_a_message(chat: Server) -> None:
    """Text in parts is the text."""
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    body = {"max_tokens": 5, "temperature": 0}
    replies = [
        chat.ask(PATH, {"messages": [{"role": "user", "content": content}], **body}).json
        for content in ("Hi", parts)
    ]
    assert replies[0]["choices"] == replies[1]["choices"]


def test_a_reply_is_sent_back(chat: Server) -> None:
    """Clients append the message of a reply with all fields that they know of it."""
    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    messages = talk("Hi", "Yo", "So")
    body = {"max_tokens": 5, "temperature": 0}
    plain = chat.ask(PATH, {"messages": messages, **body}).json
    messages[1] |= empty | {"tool_calls": None}
    assert chat.ask(PATH, {"messages": messages, **body}).json["choices"] == plain["choices"]
    messages[1]["tool_calls"] = [{"id": "a"}]
    refused = chat.ask(PATH, {"messages": messages, **body})
    assert refused.message == "`messages.1.tool_calls` is not supported"


def test_parts_that_are_no_text(chat: Server) -> None:
    """One message, of the place in the request."""
    part = {"type": "image_url", "image_url": {"url": "a"}}
    reply = chat.ask(PATH, {"messages": [{"role": "user", "content": [part]}]})
    assert reply.message == "`messages.0.content.0.type`: input should be 'text'"


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"messages": []}, "at least 1"),
        ({"messages": [{"role": "user"}]}, "`messages.0.content`"),
        ({"messages": [{"content": "a"}]}, "`messages.0.role`"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "no tools"),
        ({"messages": talk("a" * 100)}, "105 tokens"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "exclude each other"),
        ({"top_logprobs": 2}, "needs `logprobs`"),
        ({"tools": []}, "`tools` is not supported"),
        ({"logit_bias": {"5": 1}}, "`logit_bias` is not supported"),
    ],
)
def test_wrong_requests(chat: Server, change: dict[str, Any], problem: str) -> None:
    """Each is refused with what is wrong."""
    reply = chat.ask(PATH, {"messages": talk("Hi"), "max_tokens": None} | change)
    assert reply.status == 400
    assert problem in reply.message


def test_a_model_without_a_template(server: Server) -> None:
    """The error says what to do."""
    reply = server.ask(PATH, {"messages": talk("Hi")})
    assert reply.status == 400
    assert "--chat-template" in reply.message


@pytest.mark.parametrize("source", ["{% for", "{{ 1 / 0 }}"])
def test_a_template_that_fails(
    loaded: LoadedModel, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The client cannot correct it: 500, and the log says what is wrong."""
    with running_server(loaded, change=lambda model: with_template(model, source)) as server:
        reply = server.ask(PATH, {"messages": talk("Hi")})
        template = server.models["tiny"].template
        assert template is not None
        template.close()
    assert (reply.status, reply.json["error"]["code"]) == (500, "chat_template_failed")
    assert "the chat template of `test`" in caplog.text
