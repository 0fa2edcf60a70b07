"""The official client of OpenAI's interface, unchanged, against a server."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from suite.selection import peer

from lmcore.generation.chat.template import ChatTemplate
from lmcore.generation.generate import recompute
from lmcore.generation.request import Request
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.inference.load import LoadedModel
from lmcore.inference.text_model import Execution

from .conftest import Server, running_server

pytestmark = pytest.mark.peer

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
QUESTION = [{"role": "user", "content": "Hi"}]
KEY = "the key of this test"


@pytest.fixture(scope="module")
def openai() -> Any:
    """The package."""
    return peer("openai")


@pytest.fixture(scope="module")
def guarded(loaded: LoadedModel) -> Iterator[Server]:
    """A server with a key, of a model that chats."""
    template = ChatTemplate(loaded.tokenizer, {"default": TEMPLATE}, "test")
    with running_server(
        loaded,
        keys=[KEY],
        change=lambda model: dataclasses.replace(model, template=template),
    ) as made:
        yield made
    template.close()


def client_of(openai: Any, server: Server, **options: Any) -> Any:
    """Make a client of a server, which sends no request twice."""
    settings = {"api_key": KEY, "max_retries": 0, "timeout": 30.0} | options
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", **settings)


@pytest.fixture
def client(openai: Any, guarded: Server) -> Iterator[Any]:
    """A client of the server with a key."""
    with client_of(openai, guarded) as made:
        yield made


def greedy(loaded: LoadedModel, prompt: str, length: int) -> str:
    """Return the text that recomputation gives."""
    request = Request(
        list(prompt.encode()), length, SamplingOptions(greedy=True), 0, frozenset({256})
    )
    (found,) = recompute(loaded.model, [request], 257)
    return loaded.tokenizer.decode(found.tokens)


def test_models(client: Any) -> None:
    """They are listed and described."""
    (found,) = client.models.list()
    assert (found.id, found.object, found.owned_by) == ("tiny", "model", "lmcore")
    assert client.models.retrieve("tiny") == found


def test_a_completion(client: Any, loaded: LoadedModel) -> None:
    """The reply has the text, the reason of its end and the numbers of tokens."""
    reply = client.completions.create(model="tiny", prompt="Hello", max_tokens=9, temperature=0)
    assert reply.choices[0].text == greedy(loaded, "Hello", 9)
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (5, 9)


def test_a_stream_of_completions(client: Any, loaded: LoadedModel) -> None:
    """The parts join to the text; the last has the numbers of tokens."""
    with client.completions.create(
        model="tiny",
        prompt="Hello",
        max_tokens=9,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        parts = list(stream)
    text = "".join(choice.text for part in parts for choice in part.choices)
    assert text == greedy(loaded, "Hello", 9)
    assert len(parts) > 3
    assert parts[-1].usage.total_tokens == 14
    assert parts[-2].choices[0].finish_reason == "length"


def test_scores_of_a_prompt(client: Any) -> None:
    """Echo with log-probabilities has the prompt's tokens, the first without a value."""
    reply = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=1, echo=True, logprobs=2, temperature=0
    )
    found = reply.choices[0].logprobs
    assert reply.choices[0].text.startswith("Hello")
    assert found.tokens[:5] == list("Hello")
    assert found.token_logprobs[0] is None
    assert all(value < 0 for value in found.token_logprobs[1:])
    assert found.text_offset == list(range(6))
    assert all(len(top) in {2, 3} for top in found.top_logprobs[1:])


def test_several_texts_and_a_stop(client: Any, loaded: LoadedModel) -> None:
    """`n` texts differ by their seeds; a stop text ends one before it."""
    several = client.completions.create(
        model="tiny", prompt=["a", "b"], n=2, max_tokens=8, seed=3, temperature=1.5
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text != several.choices[1].text
    whole = greedy(loaded, "Hello", 20)
    stop = whole[6:8]
    ended = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=20, temperature=0, stop=[stop]
    )
    assert ended.choices[0].text == whole[: whole.index(stop)]
    assert ended.choices[0].finish_reason == "stop"


def test_a_chat(client: Any, loaded: LoadedModel) -> None:
    """The answer continues the conversation; each token has its bytes and alternatives."""
    reply = client.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        max_completion_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == greedy(loaded, "u:Hi;a:", 8)
    tokens = choice.logprobs.content
    assert bytes(byte for one in tokens for byte in one.bytes).decode() == choice.message.content
    for one in tokens:
        assert len(one.top_logprobs) == 3
        assert one.logprob == max(other.logprob for other in one.top_logprobs)
        assert math.exp(one.logprob) <= 1


def test_a_stream_of_a_chat(client: Any, loaded: LoadedModel) -> None:
    """The client's own accumulation of the parts gives the message, up to the stop text."""
    whole = greedy(loaded, "u:Hi;a:", 20)
    stop = whole[8:10]
    with client.chat.completions.stream(
        model="tiny", messages=QUESTION, max_tokens=20, temperature=0, stop=stop
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == whole[: whole.index(stop)]
    assert final.choices[0].message.content == "".join(deltas)
    assert final.choices[0].finish_reason == "stop"


def test_the_message_of_a_reply_is_taken_back(client: Any) -> None:
    """A reply's message can be appended to the next request's messages."""
    messages: list[Any] = [*QUESTION]
    first = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
    answer = first.choices[0].message
    for taken in (answer, answer.model_dump(), answer.to_dict()):
        more = [*messages, taken, {"role": "user", "content": "So"}]
        second = client.chat.completions.create(model="tiny", messages=more, max_tokens=4)
        assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_a_json_schema(client: Any) -> None:
    """The answer is JSON of the schema, which the client made from a class."""
    peer("llguidance")
    from pydantic import BaseModel

    class Choice(BaseModel):
        yes: bool

    reply = client.chat.completions.parse(
        model="tiny", messages=QUESTION, response_format=Choice, seed=1, max_tokens=60
    )
    (choice,) = reply.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Choice)
    assert json.loads(choice.message.content) == {"yes": choice.message.parsed.yes}


def test_a_wrong_key(openai: Any, guarded: Server) -> None:
    """It is an error of authentication, with the server's message."""
    with (
        client_of(openai, guarded, api_key="another") as client,
        pytest.raises(openai.AuthenticationError, match="API key is not known"),
    ):
        client.models.list()


def test_wrong_requests(openai: Any, client: Any) -> None:
    """Each has the exception of its status, with the message, the field and the code."""
    with pytest.raises(openai.BadRequestError, match="leave room for") as caught:
        client.completions.create(model="tiny", prompt="Hello", max_tokens=200)
    assert caught.value.param == "max_tokens"
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="less than or equal to 2"):
        client.completions.create(model="tiny", prompt="Hello", frequency_penalty=3)
    with pytest.raises(openai.BadRequestError, match="`tools` is not supported"):
        client.chat.completions.create(model="tiny", messages=QUESTION, tools=[])
    with pytest.raises(openai.NotFoundError, match="this server has `tiny`"):
        client.completions.create(model="other", prompt="Hello")


def test_a_full_queue_a_deadline_and_the_clients_own(openai: Any, loaded: LoadedModel) -> None:
    """A busy server is a rate limit that a retry passes; the client gives up when it wants."""

    class Pause(nullcontext[None]):
        def __enter__(self) -> None:
            time.sleep(0.02)

    slow = dataclasses.replace(loaded, execution=Execution(Pause))
    with running_server(slow, max_running=1, max_waiting=0) as server:
        patient = client_of(openai, server)
        asked = {"model": "tiny", "prompt": "a", "temperature": 0}

        def long_text() -> None:
            patient.completions.create(**asked, max_tokens=60)

        thread = threading.Thread(target=long_text)
        thread.start()
        while not server.models["tiny"].service.num_running:
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="queue of the server is full"):
            patient.completions.create(**asked, max_tokens=1)
        retrying = patient.with_options(max_retries=5)
        assert retrying.completions.create(**asked, max_tokens=1).choices
        thread.join()
        with pytest.raises(openai.APITimeoutError):
            patient.with_options(timeout=0.3).completions.create(**asked, max_tokens=90)
        patient.close()
