"""Bodies of requests that are beyond a limit, or made to take long: 400, soon, in little memory."""

from __future__ import annotations

import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcore.inference.load import LoadedModel
from lmcore_serve.api.chat import ChatBody
from lmcore_serve.api.completions import CompletionBody
from lmcore_serve.api.megatron import GenerateBody
from lmcore_serve.errors import ApiError
from lmcore_serve.http.body import MAX_DEPTH, MAX_KEYS, MAX_PARTS, BodyReader, RequestBody
from lmcore_serve.state import MAX_ITEMS, MAX_PROMPTS, Limits, ServerState

from .conftest import Server, running_server
from .test_chat import TEMPLATE, with_template

COMPLETIONS, CHAT, MEGATRON = "/v1/completions", "/v1/chat/completions", "/api"
SIZE = 4 * 2**20 - 200
HOSTILE = {
    "nulls": (COMPLETIONS, b'{"prompt": [null' + b",null" * 830_000 + b"]}"),
    "lists": (COMPLETIONS, b'{"prompt": [[]' + b",[]" * 1_390_000 + b"]}"),
    "ids": (COMPLETIONS, b'{"prompt": [1' + b",1" * 2_000_000 + b"]}"),
    "id lists": (COMPLETIONS, b'{"prompt": [[1]' + b",[1]" * 1_000_000 + b"]}"),
    "texts": (COMPLETIONS, b'{"prompt": [""' + b',""' * 1_390_000 + b"]}"),
    "a text": (COMPLETIONS, b'{"prompt": "' + b"a" * SIZE + b'"}'),
    "quotes": (COMPLETIONS, b'{"prompt": "' + rb"\"" * (SIZE // 2) + b'"}'),
    "stops": (COMPLETIONS, b'{"prompt": "a", "stop": [1' + b",1" * 180_000 + b"]}"),
    "a bias": (
        COMPLETIONS,
        b'{"prompt": "a", "logit_bias": {'
        + b",".join(b'"%d":1' % one for one in range(300_000))
        + b"}}",
    ),
    "fields": (COMPLETIONS, b"{" + b",".join(b'"%d":1' % one for one in range(380_000)) + b"}"),
    "one field": (COMPLETIONS, b'{"a":1' + b',"a":1' * 600_000 + b"}"),
    "a name": (COMPLETIONS, b'{"' + b"a" * SIZE + b'": 1}'),
    "a model": (COMPLETIONS, b'{"prompt": "a", "model": "' + b"m" * SIZE + b'"}'),
    "digits": (COMPLETIONS, b'{"prompt": "a", "seed": ' + b"9" * SIZE + b"}"),
    "quotation marks": (COMPLETIONS, b'"' * SIZE),
    "escapes": (COMPLETIONS, b'"\\' * (SIZE // 2)),
    "objects": (COMPLETIONS, b'{"a":' * (SIZE // 5)),
    "depth": (COMPLETIONS, b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}"),
    "closed": (COMPLETIONS, b"]" * SIZE),
    "open": (COMPLETIONS, b"[" * SIZE),
    "parts": (CHAT, b'{"messages": [{"role": "u", "content": [{}' + b",{}" * 1_390_000 + b"]}]}"),
    "messages": (CHAT, b'{"messages": [{}' + b",{}" * 1_390_000 + b"]}"),
    "a message": (CHAT, b'{"messages": [{"role": "u", "content": "' + b"a" * SIZE + b'"}]}'),
    "tool calls": (
        CHAT,
        b'{"messages": [{"role": "u", "content": "a", "tool_calls": [0' + b",0" * 90_000 + b"]}]}",
    ),
    "prompts": (MEGATRON, b'{"prompts": [1' + b",1" * 2_000_000 + b"]}"),
    "other": (MEGATRON, b'{"prompts": {"a": [{}' + b",{}" * 1_000_000 + b"]}}"),
}


@pytest.fixture(scope="module")
def chat(loaded: LoadedModel) -> Iterator[Server]:
    """A server of a model with a template."""
    templates = []

    def change(model: Any) -> Any:
        changed = with_template(model, TEMPLATE)
        templates.append(changed.template)
        return changed

    with running_server(loaded, change=change) as made:
        yield made
    for one in templates:
        one.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies(chat: Server, name: str) -> None:
    """Each is refused within seconds on any machine, while the state of the server is answered."""
    path, body = HOSTILE[name]
    times: list[float] = []
    ends = threading.Event()

    def watch() -> None:
        while not ends.wait(0.01):
            begin = time.monotonic()
            assert chat.ask("/health").status == 200
            times.append(time.monotonic() - begin)

    watching = threading.Thread(target=watch)
    watching.start()
    begin = time.monotonic()
    reply = chat.ask(path, body)
    taken = time.monotonic() - begin
    ends.set()
    watching.join()
    assert reply.status == (404 if name == "a model" else 400)
    assert len(reply.body) < 2000
    assert taken < 5
    assert max(times, default=0) < 5


@pytest.mark.parametrize("name", HOSTILE)
def test_memory_of_hostile_bodies(name: str) -> None:
    """The memory of a parsed body is a small multiple of its size, and is free after the error."""
    path, body = HOSTILE[name]
    kind = {COMPLETIONS: CompletionBody, CHAT: ChatBody, MEGATRON: GenerateBody}[path]
    reader = BodyReader(96 * 128, 5)
    tracemalloc.start()
    try:
        for _ in range(2):
            with suppress(ApiError):
                reader._checked(body, kind)
            left, peak = tracemalloc.get_traced_memory()
            assert peak < 64 * 2**20
            assert left < 2**20
    finally:
        tracemalloc.stop()


class Anything(RequestBody):
    """Body with any value."""

    value: Any = None


@pytest.mark.parametrize(
    "limit, made",
    [
        (MAX_PARTS - 3, lambda count: [""] * count),
        (MAX_PARTS - 3, lambda count: [[]] * count),
        (MAX_DEPTH - 1, lambda count: json.loads("[" * count + "]" * count)),
        (MAX_KEYS, lambda count: {str(one): 1 for one in range(count)}),
        (100 + MAX_PARTS + 1, lambda count: [1] * count),
    ],
    ids=["texts", "lists", "depth", "keys", "values"],
)
def test_the_limits(limit: int, made: Any) -> None:
    """A body at a limit is taken, one more refused; text within strings does not count."""
    reader = BodyReader(100, 5)
    for count, taken in ((limit, True), (limit + 1, False)):
        raw = json.dumps({"value": made(count)}).encode()
        if taken:
            assert reader._checked(raw, Anything).value == made(count)
        else:
            with pytest.raises(ApiError) as caught:
                reader._checked(raw, Anything)
            assert caught.value.status == 400
    held = '[{,"\\' * MAX_PARTS
    assert reader._checked(json.dumps({"value": held}).encode(), Anything).value == held


@pytest.mark.parametrize(
    "positions, items",
    [
        (MAX_ITEMS // MAX_PROMPTS, MAX_ITEMS // MAX_PROMPTS * MAX_PROMPTS),
        (MAX_ITEMS // MAX_PROMPTS + 1, MAX_ITEMS),
        (10**9, MAX_ITEMS),
    ],
    ids=["below the cap", "above it", "far above it"],
)
def test_the_cap_of_values(positions: int, items: int) -> None:
    """The token ids of all prompts are taken, up to the cap; one value more is refused."""
    models: Any = {
        "small": SimpleNamespace(positions=1),
        "it": SimpleNamespace(positions=positions),
    }
    state = ServerState(models, Limits())
    assert state.max_items == items <= MAX_ITEMS
    reader, most = BodyReader(state.max_items, 5), items + MAX_PARTS
    # As many commas as values are taken: the last of these follows the last comma.
    assert len(reader._checked(values(most + 1), Anything).value) == most + 1
    with pytest.raises(ApiError, match=f"more than {most} values") as caught:
        reader._checked(values(most + 2), Anything)
    assert caught.value.status == 400


def values(count: int) -> bytes:
    """Return a body with a list of numbers."""
    return b'{"value": [1' + b",1" * (count - 1) + b"]}"


@pytest.mark.parametrize(
    "kind, limit, made",
    [
        (ChatBody, 2048, lambda count: {"messages": [{"role": "user", "content": "a"}] * count}),
        *(
            (
                ChatBody,
                100,
                lambda length, name=name: {
                    "messages": [{"role": "user", "content": "a", name: "b" * length}]
                },
            )
            for name in ("role", "name")
        ),
        (CompletionBody, 1000, lambda length: {"prompt": "a", "stop": "b" * length}),
        (CompletionBody, 16, lambda count: {"prompt": "a", "stop": ["b"] * count}),
    ],
)
def test_limits_of_fields(kind: type[RequestBody], limit: int, made: Any) -> None:
    """The documented number of messages, stop texts and characters is taken, and no more."""
    reader = BodyReader(2**20, 5)
    assert isinstance(reader._checked(json.dumps(made(limit)).encode(), kind), kind)
    with pytest.raises(ApiError) as caught:
        reader._checked(json.dumps(made(limit + 1)).encode(), kind)
    assert caught.value.status == 400


def test_bodies_wait_for_each_other_a_limited_time(loaded: LoadedModel) -> None:
    """Beyond it the request is refused, and may be sent again; small ones do not wait."""
    with running_server(loaded, limits=Limits(check_seconds=0.2)) as server:
        entered, ends = threading.Event(), threading.Event()
        real = BodyReader._checked

        def slow(self: BodyReader, raw: bytes, kind: Any) -> Any:
            if len(raw) > 20_000:
                entered.set()
                ends.wait(10)
            return real(self, raw, kind)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BodyReader, "_checked", slow)
            late = server.ask(COMPLETIONS, {"prompt": "a" * 30_000})
            assert server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status == 200
            ends.set()
    assert (late.status, late.headers["retry-after"]) == (503, "1")
    assert "0.2 seconds" in late.message


def test_bodies_of_all_requests_together(loaded: LoadedModel) -> None:
    """Clients that send slowly cannot fill the memory: 503 beyond a number of largest bodies."""
    limits = Limits(max_body_bytes=100_000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"
    with running_server(loaded, limits=limits) as server:
        sockets = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(18)]
        for one in sockets:
            one.sendall(head + b" " * 99_000)
        sockets[0].settimeout(10)
        replies = []
        for one in sockets:
            one.settimeout(0.5)
            try:
                replies.append(one.recv(1000))
            except TimeoutError:
                replies.append(b"")
        refused = [one for one in replies if one]
        assert 1 <= len(refused) <= 2
        assert all(one.startswith(b"HTTP/1.1 503 ") for one in refused)
        assert all(b"etry-after: 1" in one.lower() for one in refused)
        for one in sockets:
            one.close()
        end = time.monotonic() + 10
        while server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status != 200:
            assert time.monotonic() < end


@pytest.mark.parametrize(
    "path, body, field",
    [
        (COMPLETIONS, {"prompt": "a", "model": "\ud800"}, "model"),
        (COMPLETIONS, {"prompt": "a", "stop": ["b", "\udfff"]}, "stop"),
        (COMPLETIONS, {"prompt": ["a", "\ud83d"]}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "user": "\ud800"}, "user"),
        (COMPLETIONS, {"prompt": "a", "\ud800": 1}, "\\ud800"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"\ud800": 1}}, "logit_bias"),
        (CHAT, {"messages": [{"role": "\ud800", "content": "a"}]}, "messages"),
        (CHAT, {"messages": [{"role": "u", "content": "\ud800"}]}, "messages"),
        (
            CHAT,
            {"messages": [{"role": "u", "content": [{"type": "text", "text": "\ud800"}]}]},
            "messages",
        ),
        (
            CHAT,
            {
                "messages": [{"role": "u", "content": "a"}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"properties": {"\ud800": True}}},
                },
            },
            "response_format",
        ),
        (MEGATRON, {"prompts": ["\ud800"]}, None),
    ],
)
def test_surrogates(chat: Server, path: str, body: dict[str, Any], field: str | None) -> None:
    """A part of a pair is no character: the error names its place, wherever it is."""
    reply = chat.ask(path, body)
    assert reply.status == 400
    assert "surrogate" in reply.message
    if field is not None:
        assert reply.json["error"]["param"] == field


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=20,
)


@st.composite
def bodies(draw: st.DrawFn, kind: type[RequestBody]) -> bytes:
    """Return bytes like a body of a class: JSON with its fields, some of it damaged."""
    names = st.sampled_from(sorted(kind.model_fields)) | st.text(max_size=5)
    value = draw(st.dictionaries(names, _JSON, max_size=6) | _JSON)
    raw = json.dumps(value, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    if draw(st.booleans()):
        return raw
    at = draw(st.integers(0, len(raw)))
    return raw[:at] + draw(st.binary(max_size=8)) * draw(st.sampled_from([1, 20_000])) + raw[at:]


@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, GenerateBody])
def test_any_body(kind: type[RequestBody], examples: int) -> None:
    """All bytes give a body or an error 400, in bounded time and memory."""
    reader = BodyReader(96 * 128, 5)

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(raw=bodies(kind))
    def check(raw: bytes) -> None:
        begin = time.thread_time()
        tracemalloc.start()
        try:
            found = reader._checked(raw, kind)
        except ApiError as error:
            found = error
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        if isinstance(found, ApiError):
            assert found.status == 400
            assert len(str(found)) < 2000
        else:
            assert isinstance(found, kind)
        assert peak < 64 * 2**20
        assert time.thread_time() - begin < 5

    check()


def test_pairs_of_surrogates(chat: Server) -> None:
    """A whole pair is a character, as clients write it."""
    for text in ("\N{SAUROPOD}", "a\N{SAUROPOD}b"):
        reply = chat.ask(COMPLETIONS, {"prompt": text, "max_tokens": 0, "echo": True})
        assert reply.json["choices"][0]["text"] == text


@pytest.mark.parametrize(
    "body, problem",
    [
        (b'{"foo[bar]": 1}', "`foo[bar]` is not a field"),
        (b'{"prompt": "a", "response_format": "json"}', "`response_format` has to be an object"),
        (b'{"prompt": "a", "logit_bias": []}', "`logit_bias` has to be an object"),
        (b'{"int": 1}', "`int` is not a field"),
        (b'{"list[str]": 1}', "`list[str]` is not a field"),
        (b'{"": 1}', "`` is not a field"),
        (b'{"prompt": "a", "logit_bias": {"a[b]": "c"}}', "`logit_bias.a[b]`"),
        (b'{"prompt": "a", "stream_options": {"x[y]": 1}}', "`stream_options.x[y]` is not a field"),
        (b'{"prompt": "a", "prompt": "b"}', "`prompt` is given more than once"),
        (b'{"prompt": "a", "stream_options": {"b": 1, "b": 2}}', "`b` is given more than once"),
        (b'{"prompt": ["a", null]}', "`prompt.1`: input should be a valid string"),
        (b'{"prompt": [[1], ["a"]]}', "`prompt.1.0`: input should be a valid integer"),
        (b'{"prompt": "a", "stop": ["b", ""]}', "`stop.1`: string should have at least 1"),
        ("\N{ZERO WIDTH NO-BREAK SPACE}[]".encode(), "JSON object"),
        ('{"prompt": "a"}'.encode("utf-16-le"), "not JSON"),
        (b'{"prompt": "a"}}', "not JSON"),
    ],
)
def test_names_in_messages(chat: Server, body: bytes, problem: str) -> None:
    """They are the body's, also where they look like the name of a type."""
    reply = chat.ask(COMPLETIONS, body, method="POST")
    assert reply.status == 400
    assert problem in reply.message
