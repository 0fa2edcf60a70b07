"""`ServedModel`: a model that clients use, its tokens, and the checks of prompts before work."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcore.base.errors import LmcoreError, counted
from lmcore.data.tokenizer.pretrained.chat_files import end_tokens
from lmcore.data.tokenizer.token_bytes import token_bytes
from lmcore.generation.chat.template import ChatTemplate, TemplateError
from lmcore.generation.generate import room
from lmcore.generation.sampling.json_schema import JsonSchema, JsonSchemas
from lmcore.generation.text.prompt import source_and_prompt
from lmcore_serve.errors import ApiError

if TYPE_CHECKING:
    from lmcore.inference.load import LoadedModel
    from lmcore_serve.service import Service

__all__ = ["LONG_TOKEN", "MAX_SCHEMA_BYTES", "MAX_SCHEMA_VALUES", "Begin", "ServedModel"]

logger = logging.getLogger(f"lmcore.{__name__}")  # of the lines that lmcore formats

LONG_TOKEN = 64
"""Characters of a token, unless the vocabulary has longer ones."""
MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_VALUES = 2000
"""Values of a JSON schema, lists and objects included; it is compiled in at most about a second."""


class Begin(NamedTuple):
    """First tokens of a text, with the input of an encoder.

    Attributes:
        tokens: Tokens that it continues.
        source: Input of its encoder; empty without one.
        before: Tokens that precede the text: an answer has none.
    """

    tokens: Sequence[int]
    source: Sequence[int] = ()
    before: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the client's prompt, with the end that an encoder's input has."""
        return len(self.source) or len(self.tokens)


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model that clients use.

    Attributes:
        name: Name in requests.
        loaded: Model and tokenizer.
        service: Thread that generates.
        template: Chat template; None: the model does not chat.
        facts: Facts that the page shows of the model.
        created: Time of the start, in seconds since 1970.
    """

    name: str
    loaded: LoadedModel
    service: Service
    template: ChatTemplate | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _schema_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def answers(self) -> bool:
        """True if a prompt is the input of an encoder, and a text the decoder's answer."""
        return self.loaded.reads_source

    @property
    def positions(self) -> int:
        """Number of positions of the model."""
        return self.loaded.model.shape.max_position_embeddings

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary without padding."""
        return self.loaded.tokenizer.vocab_size

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end a text: of a document, and of an answer."""
        return end_tokens(self.loaded.tokenizer)

    def encode(self, text: str, name: str) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: Any text.
            name: Field of the request.

        Raises:
            ApiError: It is too long, or the tokenizer has no ids for it.
        """
        self._require_short(len(text), name)
        try:
            return list(self.loaded.tokenizer.encode(text))
        except (LmcoreError, UnicodeError) as error:
            what = error.what_and_why if isinstance(error, LmcoreError) else "it is not UTF-8"
            raise ApiError(400, f"`{name}` cannot be encoded: {what}", field=name) from None

    def _require_short(self, length: int, name: str) -> None:
        """Raise an error for characters of more tokens than positions, before any is made."""
        positions = self.positions
        if length <= positions * LONG_TOKEN:
            return
        longest = max((len(one) for one in self._bytes or () if one is not None), default=0)
        most = positions * max(LONG_TOKEN, longest)
        if length > most:
            raise ApiError(
                400,
                f"`{name}` has {length} characters; at most {most} characters can fit in "
                f"{positions} positions",
                field=name,
                code="context_length_exceeded",
            )

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]], name: str) -> list[int]:
        """Return the token ids of a conversation, with the beginning of an answer.

        Raises:
            ApiError: The model has no chat template, or it fails or refuses the messages.
        """
        if self.answers:
            raise ApiError(
                400,
                f"the model `{self.name}` has an encoder and answers each prompt by itself, not "
                "in a conversation; use `/v1/completions`",
                code="no_chat_template",
            )
        if self.template is None:
            raise ApiError(
                400,
                f"the model `{self.name}` has no chat template; use `/v1/completions`, or start "
                "the server with `--chat-template FILE`",
                code="no_chat_template",
            )
        self._require_short(sum(len(one["content"]) for one in messages), name)
        try:
            with self._lock:
                ids = self.template.prompt_tokens(messages)
        except TemplateError as error:
            logger.error("%s", error.what_and_why)  # noqa: TRY400 - of the template, not of ours
            raise ApiError(
                500,
                "the chat template of the server fails; see the server's log",
                code="chat_template_failed",
            ) from None
        except LmcoreError as error:
            raise ApiError(400, f"`{name}`: {error.what_and_why}", field=name) from None
        return self.checked(ids, name)

    def checked(self, ids: Sequence[int], name: str) -> list[int]:
        """Return token ids of a client, or the start of a document for none, which answers lack.

        Raises:
            ApiError: An id is outside the vocabulary, or a document has no start.
        """
        if not ids and not self.answers:
            eod = self.loaded.tokenizer.eod
            if eod is None:
                raise ApiError(
                    400,
                    f"`{name}` is empty, and the tokenizer has no end-of-document token to "
                    "start from",
                    field=name,
                )
            return [eod]
        wrong = [one for one in ids if not 0 <= one < self.vocab_size]
        if wrong:
            raise ApiError(
                400,
                f"`{name}` has the token id {wrong[0]}, outside the vocabulary of "
                f"{self.vocab_size} tokens",
                field=name,
            )
        return list(ids)

    def begin(self, prompt: Sequence[int]) -> Begin:
        """Return the first tokens of the text for the result of `checked`."""
        if not self.answers:
            return Begin(prompt, before=prompt)
        source, begin = source_and_prompt(self.loaded.tokenizer, prompt)
        return Begin(begin, source)

    def require_continues(self, name: str) -> None:
        """Refuse a request for prompts with their continuations from a model with an encoder.

        Args:
            name: Field of the request, or path, that asks for them.

        Raises:
            ApiError: The model has an encoder.
        """
        if self.answers:
            raise ApiError(
                400,
                f"`{name}`: the model `{self.name}` has an encoder, and answers a prompt instead "
                "of continuing it; use `/v1/completions` without `echo`",
                field=name,
            )

    def length(self, begin: Begin, wanted: int | None, name: str, length_name: str) -> int:
        """Return the number of tokens to generate.

        Args:
            begin: Begin of the text.
            wanted: Number that the client wants; None: as many as there is room for.
            name, length_name: Fields of the request with the prompt and the number.

        Raises:
            ApiError: The model has too few positions.
        """
        positions, length = self.positions, begin.num_tokens
        if length > positions:
            raise ApiError(
                400,
                f"`{name}` has {counted(length, 'token')}; the model has {positions} positions",
                field=name,
                code="context_length_exceeded",
            )
        free = room(positions, len(begin.tokens))
        if wanted is None:
            return free
        if wanted > free:
            given = "" if begin.source else f"`{name}` has {counted(length, 'token')} and "
            raise ApiError(
                400,
                f"{given}`{length_name}` is {wanted}; the model has {positions} positions, which "
                f"leave room for {free}",
                field=length_name,
                code="context_length_exceeded",
            )
        return wanted

    def require_texts(self, count: int) -> None:
        """Raise an error if a request asks for more texts than the server ever has room for.

        Args:
            count: Number of texts.

        Raises:
            ApiError: They are too many.
        """
        most = self.service.max_texts
        if count > most:
            raise ApiError(
                400, f"the request asks for {count} texts; the server has room for {most}"
            )

    def json_schema(self, schema: Mapping[str, Any] | bool, name: str) -> JsonSchema:  # noqa: FBT001
        """Return a schema from which each text gets a rule.

        Args:
            schema: JSON schema.
            name: Field of the request.

        Raises:
            ApiError: The schema is invalid or too large, or such rules are not available.
        """
        if (values := _num_values(schema)) > MAX_SCHEMA_VALUES:
            raise ApiError(
                400,
                f"`{name}`: the JSON schema has {values} values; at most {MAX_SCHEMA_VALUES} are "
                "taken",
                field=name,
            )
        if (size := len(json.dumps(schema))) > MAX_SCHEMA_BYTES:
            raise ApiError(
                400,
                f"`{name}`: the JSON schema has {size} bytes; at most {MAX_SCHEMA_BYTES} are taken",
                field=name,
            )
        try:
            with self._schema_lock:  # one at a time: each may need much processor time and memory
                return self._schemas.compiled(schema)
        except LmcoreError as error:
            raise ApiError(400, f"`{name}`: {error.what_and_why}", field=name) from None

    @cached_property
    def _schemas(self) -> JsonSchemas:
        return JsonSchemas(self.loaded.tokenizer)

    @cached_property
    def _bytes(self) -> list[bytes | None] | None:
        return token_bytes(self.loaded.tokenizer)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token in a text; of a special one its name."""
        table = self._bytes
        found = table[token] if table is not None and token < len(table) else None
        return self.loaded.tokenizer.decode([token]).encode() if found is None else found

    def token_text(self, token: int) -> str:
        """Return the text of a token alone; bytes that are no character become U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    @cached_property
    def tokens_that_begin_a_line(self) -> list[int]:
        """Ids of the tokens whose text begins with a line break."""
        return [one for one in range(self.vocab_size) if self.token_bytes(one)[:1] == b"\n"]


def _num_values(value: Any) -> int:
    """Return the number of values in a JSON value, itself included."""
    if isinstance(value, Mapping):
        return 1 + sum(map(_num_values, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(_num_values, value))
    return 1
