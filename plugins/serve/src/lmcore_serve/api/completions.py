"""`POST /v1/completions`: continuations of prompts, compatible with OpenAI's interface."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, Tag

from lmcore.generation.options import MAX_LOGPROBS
from lmcore.generation.request import Request as EngineRequest
from lmcore.generation.request import TokenProbability
from lmcore.generation.text.completion import Completion
from lmcore.generation.text.stream import TextStream
from lmcore_serve.api.fields import (
    SamplingBody,
    Usage,
    finish_reason,
    one_of,
)
from lmcore_serve.api.sse import event_stream, stream_schema
from lmcore_serve.errors import ApiError
from lmcore_serve.http.access_log import note
from lmcore_serve.http.body import body_of, schema_of
from lmcore_serve.state import MAX_PROMPTS, ServerState
from lmcore_serve.texts import Text, TextRequest, Texts

if TYPE_CHECKING:
    from lmcore_serve.served_model import Begin, ServedModel

__all__ = ["CompletionBody", "CompletionReply", "router"]

router = APIRouter()

_Ids = Annotated[list[int], Field(fail_fast=True, min_length=1)]


def _kind_of_prompt(value: Any) -> str | None:
    """Return the tag of the type of a prompt, by its first part."""
    if isinstance(value, list):
        kinds = {int: "ids", str: "texts", list: "lists"}
        return kinds.get(type(value[0])) if value else "ids"
    return "text" if isinstance(value, str) else None


class CompletionBody(SamplingBody):
    """Request for continuations of prompts."""

    prompt: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[_Ids, Tag("ids")]
        | Annotated[list[str], Field(fail_fast=True, min_length=1), Tag("texts")]
        | Annotated[list[_Ids], Field(fail_fast=True, min_length=1), Tag("lists")],
        one_of(
            _kind_of_prompt,
            "a text, a list of texts, a list of token ids, or a list of such lists",
        ),
        Field(description="Text, texts, or their token ids; an empty one begins a document."),
    ]
    max_tokens: Annotated[int | None, Field(ge=0, description="Most tokens of a text.")] = 16
    echo: Annotated[bool | None, Field(description="Begin each text with its prompt.")] = False
    logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=MAX_LOGPROBS,
            description="Return log-probabilities of the tokens and this many of the likeliest.",
        ),
    ] = None
    best_of: Annotated[int | None, Field(ge=1, description="As `n`, if it is given.")] = None
    suffix: Annotated[None, Field(description="Not supported.")] = None


class TokenLogprobs(BaseModel):
    """Log-probabilities of the tokens of a text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """A text."""

    index: int
    text: str
    logprobs: TokenLogprobs | None
    finish_reason: str | None


class CompletionReply(BaseModel):
    """All texts of a request, or the next part of one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class _Offsets:
    """Places of tokens in the text of a choice: of the character that a token is part of."""

    def __init__(self, model: ServedModel, prompt: Sequence[int] = ()) -> None:
        self._stream = TextStream(model.loaded.tokenizer, prompt)
        self._at = 0

    def next(self, token: int) -> int:
        at = self._at
        self._at += len(self._stream.push(token))
        return at


@dataclass(frozen=True)
class _Asked:
    """Prompts of a request, with how each is continued.

    Attributes:
        texts: Text of each prompt, for `echo`.
        begins: Begin of the texts of each prompt.
        requests: For each prompt as many as there are choices.
    """

    texts: list[str] = field(default_factory=list)
    begins: list[Begin] = field(default_factory=list)
    requests: list[TextRequest] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(begin.num_tokens for begin in self.begins)


@router.post(
    "/v1/completions",
    responses={
        200: {"model": CompletionReply, "content": stream_schema(CompletionReply)},
    },
    response_model=None,
    openapi_extra=schema_of(CompletionBody),
    summary="Continue prompts",
)
async def create_completion(
    body: Annotated[CompletionBody, Depends(body_of(CompletionBody))], request: Request
) -> Response:
    """Continue prompts."""
    state: ServerState = request.app.state.server
    model = state.model(body.model)
    if body.best_of is not None and body.best_of != body.num_choices:
        raise ApiError(400, "`best_of` has to equal `n`", field="best_of")
    if body.stream and body.echo and body.logprobs is not None:
        raise ApiError(400, "`echo` with `logprobs` cannot be streamed", field="stream")
    asked = await asyncio.to_thread(_asked, model, body)
    texts = Texts(model, asked.requests, state.limits.request_seconds, streams=bool(body.stream))
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
    }
    prompt_tokens = asked.num_prompt_tokens
    note(request.scope, model=model.name, prompt_tokens=prompt_tokens)
    if body.stream:
        return event_stream(_chunks(request, model, body, asked, texts, head))
    made = await texts.whole(request.receive)
    if made is None:
        return Response(status_code=499)
    generated = sum(len(one.tokens) for one in made)
    note(request.scope, generated_tokens=generated)
    choices = await asyncio.to_thread(_choices, model, body, asked, made)
    usage = Usage.of(prompt_tokens, generated)
    return JSONResponse({**head, "choices": choices, "usage": usage.model_dump()})


def _asked(model: ServedModel, body: CompletionBody) -> _Asked:
    """Return the checked prompts, and a request for each text."""
    asked = _Asked()
    if body.echo:
        model.require_continues("echo")
    given = body.prompt
    several: Sequence[Any]
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    if len(several) > MAX_PROMPTS:
        raise ApiError(
            400,
            f"`prompt` has {len(several)} prompts; at most {MAX_PROMPTS} are taken",
            field="prompt",
        )
    model.require_texts(len(several) * body.num_choices)
    for one in several:
        ids = model.encode(one, "prompt") if isinstance(one, str) else one
        asked.begins.append(model.begin(model.checked(ids, "prompt")))
        asked.texts.append(one if isinstance(one, str) else model.loaded.tokenizer.decode(one))
    options, seed = body.options(), body.first_seed
    echo, schema = bool(body.echo), body.schema_of_text
    rule = None if schema is None else model.json_schema(schema, "response_format")
    for begin in asked.begins:
        wanted = model.length(begin, body.max_tokens, "prompt", "max_tokens")
        if wanted == 0 and not echo:
            raise ApiError(400, "`max_tokens` 0 needs `echo` true", field="max_tokens")
        for _ in range(body.num_choices):
            completion = Completion(model.loaded.tokenizer, begin.before, body.stops)
            request = EngineRequest(
                begin.tokens,
                wanted,
                options,
                (seed + len(asked.requests)) % 2**63,
                model.stop_tokens,
                ends=completion.update,
                top_logprobs=body.logprobs,
                prompt_logprobs=echo and body.logprobs is not None,
                constraint=None if rule is None else rule.constraint(),
                source=begin.source,
            )
            asked.requests.append(TextRequest(request, completion))
    return asked


async def _chunks(
    request: Request,
    model: ServedModel,
    body: CompletionBody,
    asked: _Asked,
    texts: Texts,
    head: dict[str, Any],
) -> AsyncIterator[dict[str, Any]]:
    """Return the reply in parts: each with the new text of one choice."""
    extra: dict[str, Any] = {"usage": None} if body.ends_with_usage else {}
    generated = 0
    if body.echo:
        for index in range(len(asked.requests)):
            text = asked.texts[index // body.num_choices]
            yield {**head, "choices": [_choice(index, text, None, None)], **extra}
    offsets = [
        _Offsets(model, begin.before) for begin in asked.begins for _ in range(body.num_choices)
    ]
    async for index, update in texts.updates():
        generated += len(update.tokens)
        note(request.scope, generated_tokens=generated)
        logprobs = None
        if body.logprobs is not None:
            logprobs = _logprobs(model, update.logprobs, offsets[index], body.logprobs)
        choice = _choice(index, update.text, logprobs, finish_reason(update.end))
        yield {**head, "choices": [choice], **extra}
    if body.ends_with_usage:
        total = Usage.of(asked.num_prompt_tokens, generated)
        yield {**head, "choices": [], "usage": total.model_dump()}


def _choices(
    model: ServedModel, body: CompletionBody, asked: _Asked, made: Sequence[Text]
) -> list[dict[str, Any]]:
    choices = []
    for index, text in enumerate(made):
        number = index // body.num_choices
        whole, logprobs = text.text, None
        if body.echo:
            whole = asked.texts[number] + whole
        if body.logprobs is not None:
            prompt = asked.begins[number].before
            if body.echo:
                logprobs = _with_prompt(model, prompt, text, body.logprobs)
            else:
                offsets = _Offsets(model, prompt)
                logprobs = _logprobs(model, text.logprobs, offsets, body.logprobs)
        choices.append(_choice(index, whole, logprobs, finish_reason(text.end)))
    return choices


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _with_prompt(
    model: ServedModel, prompt: Sequence[int], text: Text, most: int
) -> dict[str, Any]:
    """Return the log-probabilities of the prompt, whose first token has none, and of the text.

    An end token is the last: tools of evaluation take the last token for the one that they asked
    to generate, and drop it.
    """
    offsets = _Offsets(model)
    offsets.next(prompt[0])
    end = [] if text.stop_logprob is None else [text.stop_logprob]
    rest = _logprobs(model, [*text.prompt_logprobs, *text.logprobs, *end], offsets, most)
    return {
        "tokens": [model.token_text(prompt[0]), *rest["tokens"]],
        "token_logprobs": [None, *rest["token_logprobs"]],
        "top_logprobs": [None, *rest["top_logprobs"]] if most else None,
        "text_offset": [0, *rest["text_offset"]],
    }


def _logprobs(
    model: ServedModel, found: Sequence[TokenProbability], offsets: _Offsets, most: int
) -> dict[str, Any]:
    return {
        "tokens": [model.token_text(one.token) for one in found],
        "token_logprobs": [one.logprob for one in found],
        "top_logprobs": [_top(model, one) for one in found] if most else None,
        "text_offset": [offsets.next(one.token) for one in found],
    }


def _top(model: ServedModel, found: TokenProbability) -> dict[str, float]:
    """Return the most probable tokens by text, and the token itself."""
    top: dict[str, float] = {}
    for token, logprob in (*found.top, (found.token, found.logprob)):
        # Tokens with the same text: the first is the most probable one.
        top.setdefault(model.token_text(token), logprob)
    return top
