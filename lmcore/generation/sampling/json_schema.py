"""Text that is JSON of a schema: the tokens that may come next, by the library llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmcore.base.errors import ConfigError, MissingPackageError, RunError
from lmcore.data.tokenizer.token_bytes import token_bytes

if TYPE_CHECKING:
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["JsonSchema", "JsonSchemaError", "JsonSchemas"]

# White space without a limit is what a model that finds no next value writes until its last token.
_ONE_SPACE = {"whitespace_pattern": " ?"}
_WHITE_SPACE = {"whitespace_flexible", "whitespace_pattern"}

_NO_TEXT = "NoExtensionBias"
"""The library's word for a schema that no text follows, as one that is only a reference to itself.
"""
_LONGEST_SHOWN = 100
"""Characters of a line of the library's messages that are shown."""
_MOST_LINES = 10


class JsonSchemaError(RunError):
    """A schema that the library cannot follow, or no longer within its limits."""


class JsonSchemas:
    """Constraints of JSON schemas for texts of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Prepare the vocabulary, which takes a moment for a large one.

        Args:
            tokenizer: Tokenizer of the model.

        Raises:
            ConfigError: The bytes of its tokens depend on other tokens.
            MissingPackageError: llguidance is not installed.
        """
        self._library = _imported()
        table = token_bytes(tokenizer)
        if table is None:
            raise ConfigError(
                f"a JSON schema cannot be used with tokenizer `{tokenizer.name}`",
                why="the text of a token depends on the tokens before",
            )
        self._size = tokenizer.vocab_size
        # The end of a text is a token of its own if the vocabulary has none.
        self._end = tokenizer.eod if tokenizer.eod is not None else self._size
        words = [*table, None] if tokenizer.eod is None else table
        vocabulary = _Vocabulary(words, self._end, tokenizer)
        wrapper = self._library.TokenizerWrapper(vocabulary)
        self._tokenizer = self._library.LLTokenizer(wrapper, n_vocab=len(words))

    def compiled(self, schema: Mapping[str, Any] | bool) -> JsonSchema:  # noqa: FBT001
        """Return a schema that is compiled for the tokenizer, for any number of texts.

        Between two symbols of a text there is one space or none, unless the schema's `x-guidance`,
        which holds options of the library, allows other white space.

        Args:
            schema: JSON schema; an empty one allows any JSON.

        Raises:
            ConfigError: The schema is invalid, too large, or no text follows it.
        """
        library = self._library.LLMatcher
        try:
            grammar = library.grammar_from_json_schema(*_with_options(schema))
        except ValueError as error:
            raise _unusable(str(error)) from None
        matcher = library(self._tokenizer, grammar, log_level=0)
        problem = matcher.get_error()
        if problem:
            raise _unusable(problem)
        made = JsonSchema(matcher, self._size, self._end)
        try:
            # What no text can follow is an error of the first mask.
            made.constraint().allowed(self._size)
        except JsonSchemaError as error:
            raise _unusable(_reason(error.why or "", schema)) from None
        return made

    def constraint(self, schema: Mapping[str, Any] | bool) -> JsonConstraint:  # noqa: FBT001
        """Return the rule for one text of a schema; see `compiled`."""
        return self.compiled(schema).constraint()


class JsonSchema:
    """Compiled schema, from which each text gets a separate rule."""

    def __init__(self, matcher: Any, size: int, end: int) -> None:
        """Take a schema.

        Args:
            matcher: Matcher of llguidance at the begin of a text.
            size: Size of the vocabulary.
            end: Token that ends a text.
        """
        self._matcher, self._size, self._end = matcher, size, end

    def constraint(self) -> JsonConstraint:
        """Return the rule for one text; see `Constraint`."""
        return JsonConstraint(self._matcher.deep_copy(), self._size, self._end)


class JsonConstraint:
    """Rule for the tokens of one text; see `Constraint`."""

    def __init__(self, matcher: Any, size: int, end: int) -> None:
        """Begin with no text.

        Args:
            matcher: Matcher of llguidance.
            size: Size of the vocabulary.
            end: Token that ends a text.
        """
        self._matcher, self._size, self._end = matcher, size, end

    def allowed(self, size: int) -> torch.Tensor:
        """Return the tokens that may come next, bool [size].

        Raises:
            JsonSchemaError: The library has reached a limit.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._require_no_error()
        bits = np.unpackbits(mask, bitorder="little")[:size].astype(bool)
        return torch.from_numpy(bits)

    def accept(self, token: int) -> bool:
        """Take the next token; return True if the text is complete.

        Raises:
            JsonSchemaError: The library has reached a limit, or refuses the token.
        """
        self._matcher.consume_token(token)
        self._require_no_error()
        complete = bool(self._matcher.is_accepting())
        # Without a token for its end, a text ends as soon as it is complete.
        if self._end >= self._size:
            return complete
        stopped = bool(self._matcher.is_stopped())
        if stopped and not complete:
            raise JsonSchemaError("no token can continue the JSON text, which is not complete")
        return stopped

    def _require_no_error(self) -> None:
        # The library raises none: a matcher with an error allows the end of the text.
        problem = self._matcher.get_error()
        if problem:
            raise JsonSchemaError(
                "the JSON schema cannot be followed further",
                why=problem.partition("\n")[0],
                hint="use a simpler schema, with fewer alternatives and smaller limits",
            )


class _Vocabulary:
    """Vocabulary in the form that llguidance takes."""

    bos_token_id = None

    def __init__(self, words: list[bytes | None], end: int, tokenizer: Tokenizer) -> None:
        self.eos_token_id = end
        self.tokens = [b"" if word is None else word for word in words]
        self.special_token_ids = [number for number, word in enumerate(words) if word is None]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain)


def _unusable(problem: str) -> ConfigError:
    """Return the error for a schema; messages of the library repeat its texts, of any length."""
    lines = [line for line in problem.splitlines() if line[:_LONGEST_SHOWN].strip()]
    shown = [line[:_LONGEST_SHOWN] + "..." * (len(line) > _LONGEST_SHOWN) for line in lines]
    return ConfigError("the JSON schema cannot be used", why="\n".join(shown[:_MOST_LINES]))


def _reason(problem: str, schema: Mapping[str, Any] | bool) -> str:  # noqa: FBT001
    """Return the reason of the first mask's error in words."""
    if problem != _NO_TEXT:
        return problem
    refers = '"$ref"' in json.dumps(schema)
    return "the schema refers to itself without end" if refers else "no text follows it"


def _with_options(schema: Mapping[str, Any] | bool) -> tuple[str, dict[str, str] | None]:  # noqa: FBT001
    """Return a schema as text, and the defaults of the library's options for it."""
    if schema is False:  # which the library takes without options only
        return "false", None
    given = {} if schema is True else schema
    own = given.get("x-guidance")
    flexible = isinstance(own, dict) and _WHITE_SPACE & own.keys()
    return json.dumps(given), None if flexible else _ONE_SPACE


def _imported() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingPackageError(
            "llguidance", needed_for="a JSON schema", install="pip install llguidance"
        ) from None
    return llguidance
