"""Text that is JSON of a schema, whatever the model would rather write."""

from __future__ import annotations

import builtins
import dataclasses
import json
from typing import Any

import pytest
import torch
from suite.selection import peer

from lmcore.base.errors import ConfigError, MissingPackageError, RunError
from lmcore.data.tokenizer import ByteTokenizer, NullTokenizer
from lmcore.generation.next_token import extend
from lmcore.generation.request import Continuation, Request
from lmcore.generation.sampling.json_schema import JsonConstraint, JsonSchemas
from lmcore.generation.sampling.logits import new_generator

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}


def written(schemas: JsonSchemas, schema: dict[str, Any], seed: int, size: int) -> Continuation:
    """Generate a text from random logits under the rule of a schema."""
    request = Request(
        [0],
        3000,
        seed=seed,
        stop_tokens=frozenset({256}),
        constraint=schemas.constraint(schema),
    )
    text = Continuation(request, new_generator(seed))
    generator = torch.Generator().manual_seed(seed)
    while not text.ended:
        extend([text], torch.randn(1, 300, generator=generator), size)
    return text


@pytest.mark.peer
@pytest.mark.parametrize("seed", range(5))
def test_texts_are_of_the_schema(seed: int) -> None:
    """Random logits give JSON with these properties."""
    peer("llguidance")
    schemas = JsonSchemas(ByteTokenizer())
    text = written(schemas, SCHEMA, seed, 257)
    assert text.finish_reason == "stop"
    value = json.loads(bytes(text.tokens))
    assert value.keys() == {"name", "kind", "ages"}
    assert len(value["name"]) <= 4
    assert value["kind"] in {"cat", "dog"}
    assert all(isinstance(age, int) for age in value["ages"])
    assert len(value["ages"]) <= 2


@pytest.mark.peer
@pytest.mark.parametrize("schema", [{}, {"type": "nope"}, {"$ref": "http://example.org/x"}])
def test_schemas(schema: dict[str, Any]) -> None:
    """An empty schema is any JSON; an invalid one is refused with the library's reason."""
    peer("llguidance")
    schemas = JsonSchemas(ByteTokenizer())
    if not schema:
        assert schemas.constraint(schema).allowed(257)[ord("{")]
        return
    with pytest.raises(ConfigError, match="JSON schema"):
        schemas.constraint(schema)


@pytest.mark.peer
@pytest.mark.parametrize(
    "schema, text, accepted",
    [
        ({"type": "object"}, '{"a": [1, {}]}', 14),
        ({"type": "object"}, '{"a":[1,{}]}', 12),
        ({"type": "object"}, "{  ", 2),
        ({"type": "object"}, "{\n", 1),
        ({"type": "object", "x-guidance": {"whitespace_flexible": True}}, "{\n\t ", 4),
        ({"type": "object", "x-guidance": {"whitespace_flexible": False}}, "{ ", 1),
        ({"type": "object", "x-guidance": {"item_separator": ";"}}, '{"a":1;"b":  ', 12),
        (True, "[  ", 2),
    ],
)
def test_white_space(schema: dict[str, Any] | bool, text: str, accepted: int) -> None:
    """Symbols have one space between them at most, unless the schema says otherwise."""
    peer("llguidance")
    matcher = JsonSchemas(ByteTokenizer()).constraint(schema)._matcher
    assert matcher.try_consume_tokens(list(text.encode())) == accepted


@pytest.mark.peer
@pytest.mark.parametrize("schema", [False, {"x-guidance": {"nope": 5}}])
def test_impossible_schemas(schema: dict[str, Any] | bool) -> None:
    """A schema of no text, or with options that the library lacks, is refused."""
    peer("llguidance")
    with pytest.raises(ConfigError, match="JSON schema cannot be used"):
        JsonSchemas(ByteTokenizer()).constraint(schema)


@pytest.mark.peer
@pytest.mark.parametrize(
    "schema, why",
    [
        ({"$ref": "#"}, "the schema refers to itself without end"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "refers to itself without"),
        ({"type": "string", "pattern": "[" * 5000}, "unclosed character class"),
        ({"type": "string", "pattern": "(a"}, "\n    ^\n"),
        ({"type": "nope" * 300}, "Invalid type: nope"),
    ],
)
def test_reasons(schema: dict[str, Any], why: str) -> None:
    """They are in words, and texts of the schema in them are shortened."""
    peer("llguidance")
    with pytest.raises(ConfigError) as caught:
        JsonSchemas(ByteTokenizer()).constraint(schema)
    found = caught.value.why or ""
    assert why in found
    assert len(found) < 300


@pytest.mark.peer
def test_a_vocabulary_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text ends as soon as it is complete."""
    peer("llguidance")
    tokenizer = ByteTokenizer()
    tokenizer.eod = None  # type: ignore[assignment]
    tokenizer.vocab_size = 256
    table = [bytes([byte]) for byte in range(256)]
    monkeypatch.setattr("lmcore.generation.sampling.json_schema.token_bytes", lambda _: table)
    text = written(JsonSchemas(tokenizer), SCHEMA, 1, 256)
    assert text.finish_reason == "stop"
    assert json.loads(bytes(text.tokens))["kind"] in {"cat", "dog"}


@pytest.mark.peer
def test_texts_of_a_compiled_schema() -> None:
    """Each text has a separate state."""
    peer("llguidance")
    schema = JsonSchemas(ByteTokenizer()).compiled({"enum": ["cat", "dog"]})
    first, second = schema.constraint(), schema.constraint()
    assert [first.accept(one) for one in b'"cat"'] == [False] * 4 + [True]
    assert [second.accept(one) for one in b'"dog"'] == [False] * 4 + [True]


@pytest.mark.peer
def test_a_limit_of_the_library() -> None:
    """A text that it cannot follow any further ends with the error, not as if it were complete."""
    library = peer("llguidance")
    schemas = JsonSchemas(ByteTokenizer())
    grammar = library.LLMatcher.grammar_from_json_schema("true")
    limits = library.LLParserLimits(max_items_in_row=5)
    matcher = library.LLMatcher(schemas._tokenizer, grammar, limits=limits, log_level=0)
    request = Request([0], 9, stop_tokens=frozenset({256}))
    request = dataclasses.replace(request, constraint=JsonConstraint(matcher, 257, 256))
    text = Continuation(request, new_generator(0))
    logits = torch.zeros(1, 300)
    logits[0, ord("{")] = 99
    extend([text], logits, 257)
    assert isinstance(text.error, RunError)
    assert "max is 5" in str(text.error.why)
    assert "\n" not in str(text.error.why)
    assert text.finish_reason is None


@pytest.mark.peer
def test_tokens_without_bytes() -> None:
    """A tokenizer whose tokens have no bytes is refused."""
    peer("llguidance")
    with pytest.raises(ConfigError, match="NullTokenizer"):
        JsonSchemas(NullTokenizer(10))


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package to install is named."""
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "llguidance":
            raise ModuleNotFoundError("No module named 'llguidance'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingPackageError, match="llguidance"):
        JsonSchemas(ByteTokenizer())
