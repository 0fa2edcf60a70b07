"""`/v1/completions`: texts, streams, log-probabilities and errors as OpenAI's clients expect."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import create_autospec

import pytest
from suite.selection import peer

from lmcore.generation.generate import recompute
from lmcore.generation.request import Request
from lmcore.generation.sampling.json_schema import JsonConstraint, JsonSchemas
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.inference.load import LoadedModel
from lmcore_serve.served_model import MAX_SCHEMA_BYTES, MAX_SCHEMA_VALUES, ServedModel

from .conftest import Reply, Server, running_server

PATH = "/v1/completions"


def ids(text: str) -> list[int]:
    """Return the tokens of a text."""
    return list(text.encode())


def expected_text(loaded: LoadedModel, prompt: str, length: int, **options: Any) -> str:
    """Return the text that recomputation gives."""
    sampling = SamplingOptions(**options) if options else SamplingOptions(greedy=True)
    request = Request(ids(prompt), length, sampling, 5, frozenset({256}))
    (found,) = recompute(loaded.model, [request], 257)
    return loaded.tokenizer.decode(found.tokens)


def test_a_text(server: Server, loaded: LoadedModel) -> None:
    """Temperature 0 is greedy; the reply counts the tokens."""
    reply = server.ask(PATH, {"prompt": "Hello", "max_tokens": 9, "temperature": 0})
    assert reply.status == 200
    (choice,) = reply.json["choices"]
    assert choice["text"] == expected_text(loaded, "Hello", 9)
    assert choice["finish_reason"] == "length"
    assert reply.json["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "total_tokens": 14,
    }
    assert reply.json["object"] == "text_completion"
    assert reply.json["model"] == "tiny"
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize(
    "prompt", [["ab", "cd"], [[97, 98], [99, 100]]], ids=["texts", "token ids"]
)
def test_several_prompts_and_choices(
    server: Server, loaded: LoadedModel, prompt: list[Any]
) -> None:
    """Choices are in the order of the prompts; each has the next seed."""
    reply = server.ask(
        PATH, {"prompt": prompt, "n": 2, "max_tokens": 6, "seed": 4, "temperature": 1.5}
    )
    found = reply.json["choices"]
    assert [one["index"] for one in found] == [0, 1, 2, 3]
    sampled = SamplingOptions(temperature=1.5)
    requests = [
        Request(ids(text), 6, sampled, 4 + number, frozenset({256}))
        for number, text in enumerate(["ab", "ab", "cd", "cd"])
    ]
    assert [one["text"] for one in found] == [
        loaded.tokenizer.decode(one.tokens) for one in recompute(loaded.model, requests, 257)
    ]


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1])
def test_seeds_of_64_bits(server: Server, seed: int) -> None:
    """Any of them draws the same text again."""
    body = {"prompt": "a", "n": 2, "max_tokens": 4, "seed": seed, "temperature": 2}
    found = [server.ask(PATH, body) for _ in range(2)]
    assert [one.status for one in found] == [200, 200]
    assert found[0].json["choices"] == found[1].json["choices"]


def test_a_stream_is_the_text_in_parts(server: Server) -> None:
    """With the same seed, tokens and log-probabilities equal the whole reply's."""
    body = {"prompt": "Hello", "max_tokens": 12, "seed": 9, "n": 2, "logprobs": 2}
    whole = server.ask(PATH, body).json
    reply = server.ask(PATH, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *parts, last = reply.events
    assert last["usage"] == whole["usage"]
    assert last["choices"] == []
    for index, choice in enumerate(whole["choices"]):
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        assert "".join(one["text"] for one in own) == choice["text"]
        assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + ["length"]
        for name in ("tokens", "text_offset"):
            joined = [value for one in own for value in one["logprobs"][name]]
            assert joined == choice["logprobs"][name]
        found = [value for one in own for value in one["logprobs"]["token_logprobs"]]
        assert found == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)


def test_stop_texts(server: Server, loaded: LoadedModel) -> None:
    """The text ends before the stop text, also in a stream."""
    whole = expected_text(loaded, "Hello", 30)
    stop = whole[10:13]
    body = {"prompt": "Hello", "max_tokens": 30, "temperature": 0, "stop": [stop, "never there"]}
    (choice,) = server.ask(PATH, body).json["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    events = server.ask(PATH, {**body, "stream": True}).events
    assert "".join(one["choices"][0]["text"] for one in events) == choice["text"]


def test_echo_scores_the_prompt(server: Server, loaded: LoadedModel) -> None:
    """Without new tokens, each token of the prompt but the first has a log-probability."""
    reply = server.ask(
        PATH, {"prompt": [ids("Hello")], "max_tokens": 0, "echo": True, "logprobs": 1}
    )
    (choice,) = reply.json["choices"]
    found = choice["logprobs"]
    assert choice["text"] == "Hello"
    assert found["tokens"] == list("Hello")
    assert found["text_offset"] == [0, 1, 2, 3, 4]
    import torch

    logits = loaded.model.logits(loaded.model(torch.tensor([ids("Hello")])))[0, :, :257]
    expected = logits.log_softmax(-1)
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx(
        expected[range(4), ids("ello")].tolist(), abs=1e-4
    )
    best = [max(top.values()) for top in found["top_logprobs"][1:]]
    assert best == pytest.approx(expected[:4].max(-1).values.tolist(), abs=1e-4)


def test_offsets_within_characters(server: Server) -> None:
    """A token that is a part of a character has the place of the character in the text."""
    body = {"prompt": "aé\N{SAUROPOD}b", "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = server.ask(PATH, body).json["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]


def test_echo_has_the_end_token(loaded: LoadedModel) -> None:
    """A tool drops the token that it asked for; it is not one of the prompt if the text ends."""
    (end,) = ids(expected_text(loaded, "Hello", 1))

    def ended(model: ServedModel) -> ServedModel:
        model.__dict__["stop_tokens"] = frozenset({end})
        return model

    with running_server(loaded, change=ended) as server:
        body = {"prompt": "Hello", "temperature": 0, "echo": True, "logprobs": 1}
        (one,) = server.ask(PATH, body | {"max_tokens": 1}).json["choices"]
        (none,) = server.ask(PATH, body | {"max_tokens": 0}).json["choices"]
    assert one["text"] == "Hello"
    assert one["finish_reason"] == "stop"
    found, expected = one["logprobs"], none["logprobs"]
    assert found["tokens"] == [*"Hello", chr(end)]
    assert found["token_logprobs"][:-1] == expected["token_logprobs"]
    assert found["token_logprobs"][-1] == max(found["top_logprobs"][-1].values())
    assert found["text_offset"] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "change, field, problem",
    [
        ({"prompt": None}, "prompt", "`prompt`"),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": [[]]}, "prompt", "at least 1"),
        ({"prompt": [1, "a"]}, "prompt", "`prompt"),
        ({"prompt": [257]}, "prompt", "outside the vocabulary"),
        ({"prompt": [-1]}, "prompt", "outside the vocabulary"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
        ({"prompt": "a" * 97}, "prompt", "97 tokens; the model has 96 positions"),
        ({"max_tokens": 95}, "max_tokens", "leave room for 92"),
        ({"max_tokens": 0}, "max_tokens", "needs `echo`"),
        ({"max_tokens": 2.5}, "max_tokens", "valid integer"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 0.5, "top_k": 3}, "top_k", "exclude each other"),
        ({"frequency_penalty": 2.1}, "frequency_penalty", "less than or equal to 2"),
        ({"repetition_penalty": 1e-9}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 13}, None, "room for 12"),
        ({"best_of": 3}, "best_of", "equal `n`"),
        ({"seed": -(2**63) - 1}, "seed", "greater than or equal to"),
        ({"seed": 2**63}, "seed", "less than or equal to"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"suffix": "b"}, "suffix", "`suffix` is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "`logit_bias` is not supported"),
        ({"stream_options": {}}, "stream_options", "needs `stream`"),
        ({"response_format": {"type": "yaml"}}, "response_format", "`response_format"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "`response_format`: `json_schema` is missing",
        ),
        ({"prompt": [82, "a"]}, "prompt", "`prompt.1`: input should be a valid integer"),
        ({"prompt": "a" * 100_000}, "prompt", "characters can fit in "),
        ({"prompt": {"a": 1}}, "prompt", "`prompt` has to be a text, a list of texts, a list"),
        ({"stop": 5}, "stop", "`stop` has to be a text or a list of texts"),
        ({"unknown": 1}, "unknown", "not a field"),
        ({"model": "other"}, "model", "this server has `tiny`"),
    ],
)
def test_wrong_requests(
    server: Server, change: dict[str, Any], field: str | None, problem: str
) -> None:
    """The error names the field and says what is wrong."""
    reply = server.ask(PATH, {"prompt": "Hello", "max_tokens": 4} | change)
    assert reply.status == (404 if "model" in change else 400)
    error = reply.json["error"]
    assert problem in error["message"]
    assert error["param"] == field
    assert error["type"] in {"invalid_request_error", "not_found_error"}


@pytest.mark.parametrize(
    "body, problem",
    [
        (b"", "the body must be a JSON object; it is empty"),
        (b"{", "not JSON"),
        (b'{"prompt": "\xff"}', "the body is not UTF-8"),
        (b'{"prompt": "\\ud800"}', "`prompt` has an unpaired surrogate (invalid Unicode)"),
        (b'{"prompt": "a", "temperature": NaN}', "`temperature`"),
        (b'{"prompt": "a", "temperature": 1e999}', "`temperature`"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "too many digits"),
        (b"[" * 40_000, "nested too deeply"),
        (b"null", "the body must be a JSON object; got null"),
        (b"[]", "the body must be a JSON object; got a list"),
        (b"7", "the body must be a JSON object; got a number"),
    ],
)
def test_bodies_that_are_no_request(server: Server, body: bytes, problem: str) -> None:
    """Text that is no JSON, no UTF-8 or no number is refused."""
    reply = server.ask(PATH, body, method="POST")
    assert reply.status == 400
    assert problem in reply.message


def test_broken_json_has_no_field(server: Server) -> None:
    """The place of the error in the text is not the name of a field."""
    error = server.ask(PATH, b'{"prompt": a', method="POST").json["error"]
    assert error["message"] == "the body is not JSON"
    assert error["param"] is None


def test_a_body_of_another_type(server: Server) -> None:
    """A page of another site can only send such: it is refused."""
    reply = server.ask(PATH, b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert reply.status == 400
    assert "Content-Type" in reply.message


def test_too_many_texts_are_refused_first(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is prepared for texts that the server never has room for."""
    monkeypatch.setattr("lmcore_serve.api.completions.Completion", None)
    reply = server.ask(PATH, {"prompt": ["a"] * 128, "n": 128})
    assert reply.status == 400
    assert "asks for 16384 texts" in reply.message


@pytest.mark.peer
def test_a_schema_is_compiled_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts of a request share it, and each follows it by itself."""
    peer("llguidance")
    compiled = create_autospec(JsonSchemas.compiled, side_effect=JsonSchemas.compiled)
    monkeypatch.setattr(JsonSchemas, "compiled", compiled)
    schema = {"enum": ["cat", "dog"], "x-guidance": {"whitespace_flexible": False}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    body = {"prompt": ["a", "b"], "n": 2, "seed": 1, "temperature": 2, "response_format": form}
    choices = server.ask(PATH, body).json["choices"]
    assert len(choices) == 4
    assert {json.loads(one["text"]) for one in choices} <= {"cat", "dog"}
    assert compiled.call_count == 1


MAX_TOKENS = 2
CIRCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


BEYOND_VALUES = f"values; at most {MAX_SCHEMA_VALUES} are taken"
BEYOND_BYTES = f"bytes; at most {MAX_SCHEMA_BYTES} are taken"


@pytest.mark.peer
@pytest.mark.parametrize(
    "schema, compiled, message",
    [
        ({"$ref": "#"}, 1, "refers to itself without end"),
        (CIRCLE, 1, "refers to itself without end"),
        ({"anyOf": [{"const": f"{one:09}"} for one in range(5000)]}, 0, BEYOND_VALUES),
        ({"enum": ["x" * 4_000_000]}, 0, BEYOND_BYTES),
        ({"enum": ["x" * 60_000]}, 1, None),
        ({"type": "string", "pattern": "(" * 500 + "a" + "){0,9}" * 500}, 1, "cannot be used"),
        ({"type": "array", "minItems": 10**9, "items": {"type": "integer"}}, 1, None),
    ],
    ids=["itself", "a circle", "alternatives", "a long text", "a text", "a pattern", "items"],
)
def test_schemas_made_to_take_long(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    schema: dict[str, Any],
    compiled: int,
    message: str | None,
) -> None:
    """Each is refused, or followed within its limits; the server continues to answer.

    A schema beyond the documented limits is not compiled at all, any other one once, and a text is
    asked for its next tokens no more often than it has tokens, and once when it is compiled.
    """
    peer("llguidance")
    compilation = create_autospec(JsonSchemas.compiled, side_effect=JsonSchemas.compiled)
    steps = create_autospec(JsonConstraint.allowed, side_effect=JsonConstraint.allowed)
    monkeypatch.setattr(JsonSchemas, "compiled", compilation)
    monkeypatch.setattr(JsonConstraint, "allowed", steps)
    reply = ask_with_schema(server, schema)
    assert reply.status == (200 if message is None else 400)
    assert message is None or message in reply.message
    assert compilation.call_count == compiled
    assert steps.call_count <= compiled * (1 + MAX_TOKENS)
    assert server.ask("/health").json["status"] == "ok"


def ask_with_schema(server: Server, schema: dict[str, Any]) -> Reply:
    """Return the reply to a request for a few tokens that follow a schema."""
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    return server.ask(PATH, {"prompt": "a", "max_tokens": MAX_TOKENS, "response_format": form})


@pytest.mark.peer
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_the_limits_of_a_schema(server: Server, beyond: int) -> None:
    """The last value and the last byte are taken, one more is refused with both numbers."""
    peer("llguidance")
    # The object, the list and its elements are values.
    values = {"enum": list(range(MAX_SCHEMA_VALUES - 2 + beyond))}
    size = len(json.dumps({"enum": [""]}))
    text = {"enum": ["x" * (MAX_SCHEMA_BYTES - size + beyond)]}
    for schema, most, unit in (
        (values, MAX_SCHEMA_VALUES, "values"),
        (text, MAX_SCHEMA_BYTES, "bytes"),
    ):
        reply = ask_with_schema(server, schema)
        if beyond <= 0:
            assert reply.status == 200, reply.message
            continue
        assert reply.status == 400
        assert f"has {most + 1} {unit}; at most {most} are taken" in reply.message
