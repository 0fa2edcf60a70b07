"""`POST /v1/chat/completions`: answers in a conversation, compatible with OpenAI's interface."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, Tag

from lmcore.generation.options import MAX_LOGPROBS
from lmcore.generation.request import Request as EngineRequest
from lmcore.generation.request import TokenProbability
from lmcore.generation.text.completion import Completion
from lmcore_serve.api.fields import (
    SamplingBody,
    Usage,
    finish_reason,
    one_of,
    text_or_list,
)
from lmcore_serve.api.sse import event_stream, stream_schema
from lmcore_serve.errors import ApiError
from lmcore_serve.http.access_log import note
from lmcore_serve.http.body import body_of, schema_of
from lmcore_serve.state import ServerState
from lmcore_serve.texts import Text, TextRequest, Texts

if TYPE_CHECKING:
    from lmcore_serve.served_model import ServedModel

__all__ = ["ChatBody", "ChatChunk", "ChatReply", "router"]

router = APIRouter()

_MAX_MESSAGES = 2048
_MAX_NAME_LENGTH = 100
"""Characters of what a template may write before each message."""

_Nothing = Annotated[None, Field(description="Accepted, as a client's message of a reply has it.")]


class TextPart(BaseModel):
    """Part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """Message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Annotated[str, Field(min_length=1, max_length=_MAX_NAME_LENGTH)]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("list")],
        one_of(text_or_list, "a text or a list of parts of the type `text`"),
    ]
    name: Annotated[str, Field(max_length=_MAX_NAME_LENGTH)] | None = None
    # What clients send back of a reply.
    refusal: _Nothing = None
    annotations: _Nothing | Annotated[list[Any], Field(max_length=0)] = None
    audio: _Nothing = None
    function_call: _Nothing = None
    tool_calls: _Nothing | Annotated[list[Any], Field(max_length=0)] = None

    def plain(self) -> dict[str, Any]:
        """Return the message for a template."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ChatBody(SamplingBody):
    """Request for answers in a conversation."""

    messages: Annotated[
        list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=_MAX_MESSAGES)
    ]
    max_tokens: Annotated[int | None, Field(ge=1, description="Most tokens of an answer.")] = None
    max_completion_tokens: Annotated[
        int | None, Field(ge=1, description="Newer name of `max_tokens`.")
    ] = None
    logprobs: Annotated[
        bool | None, Field(description="Reply the log-probabilities of tokens.")
    ] = False
    top_logprobs: Annotated[
        int | None,
        Field(ge=0, le=MAX_LOGPROBS, description="Number of most probable tokens at each place."),
    ] = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of most probable tokens to reply; None: no probabilities."""
        if not self.logprobs:
            if self.top_logprobs:
                raise ApiError(400, "`top_logprobs` needs `logprobs` true", field="top_logprobs")
            return None
        return self.top_logprobs or 0


class ChatToken(BaseModel):
    """Log-probability of a token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenWithTop(ChatToken):
    """Log-probability of a token, and of the most probable ones at its place."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the tokens of an answer."""

    content: list[ChatTokenWithTop]
    refusal: None = None


class Answer(BaseModel):
    """Message of the model."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """An answer."""

    index: int
    message: Answer
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatReply(BaseModel):
    """All answers of a request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class AnswerPart(BaseModel):
    """Next part of a message of the model."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatPart(BaseModel):
    """Next part of an answer."""

    index: int
    delta: AnswerPart
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(BaseModel):
    """Next part of a reply."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatPart]
    usage: Usage | None = None


@router.post(
    "/v1/chat/completions",
    responses={200: {"model": ChatReply, "content": stream_schema(ChatChunk)}},
    response_model=None,
    openapi_extra=schema_of(ChatBody),
    summary="Answer in a conversation",
)
async def create_chat_completion(
    body: Annotated[ChatBody, Depends(body_of(ChatBody))], request: Request
) -> Response:
    """Answer in a conversation."""
    state: ServerState = request.app.state.server
    model = state.model(body.model)
    prompt, wanted = await asyncio.to_thread(_wanted, model, body)
    texts = Texts(model, wanted, state.limits.request_seconds, streams=bool(body.stream))
    head = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": model.name,
    }
    note(request.scope, model=model.name, prompt_tokens=len(prompt))
    if body.stream:
        return event_stream(_chunks(request, model, body, len(prompt), texts, head))
    made = await texts.whole(request.receive)
    if made is None:
        return Response(status_code=499)
    generated = sum(len(one.tokens) for one in made)
    note(request.scope, generated_tokens=generated)
    choices = await asyncio.to_thread(_choices, model, body, made)
    usage = Usage.of(len(prompt), generated)
    return JSONResponse({**head, "choices": choices, "usage": usage.model_dump()})


def _wanted(model: ServedModel, body: ChatBody) -> tuple[list[int], list[TextRequest]]:
    """Return the tokens of the conversation, and a request for each answer."""
    model.require_texts(body.num_choices)
    prompt = model.chat_tokens([message.plain() for message in body.messages], "messages")
    begin = model.begin(prompt)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(
            400, "`max_tokens` and `max_completion_tokens` exclude each other", field="max_tokens"
        )
    name = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    length = model.length(begin, body.max_tokens or body.max_completion_tokens, "messages", name)
    if length == 0:
        raise ApiError(
            400,
            f"`messages` have {len(prompt)} tokens, which leave no room for an answer: the model "
            f"has {model.positions} positions",
            field="messages",
            code="context_length_exceeded",
        )
    options, seed, schema = body.options(), body.first_seed, body.schema_of_text
    rule = None if schema is None else model.json_schema(schema, "response_format")
    wanted = []
    for number in range(body.num_choices):
        completion = Completion(model.loaded.tokenizer, prompt, body.stops)
        request = EngineRequest(
            prompt,
            length,
            options,
            (seed + number) % 2**63,
            model.stop_tokens,
            ends=completion.update,
            top_logprobs=body.num_logprobs,
            constraint=None if rule is None else rule.constraint(),
        )
        wanted.append(TextRequest(request, completion))
    return prompt, wanted


def _choices(model: ServedModel, body: ChatBody, made: Sequence[Text]) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "message": {"role": "assistant", "content": text.text, "refusal": None},
            "logprobs": _logprobs(model, body, text.logprobs),
            "finish_reason": finish_reason(text.end),
        }
        for index, text in enumerate(made)
    ]


async def _chunks(
    request: Request,
    model: ServedModel,
    body: ChatBody,
    prompt_tokens: int,
    texts: Texts,
    head: dict[str, Any],
) -> AsyncIterator[dict[str, Any]]:
    """Return the answers in parts: each with the new text of one."""
    extra: dict[str, Any] = {"usage": None} if body.ends_with_usage else {}
    generated = 0
    for index in range(body.num_choices):
        yield {**head, "choices": [_part(index, {"role": "assistant", "content": ""})], **extra}
    async for index, update in texts.updates():
        generated += len(update.tokens)
        note(request.scope, generated_tokens=generated)
        if update.text or update.tokens:
            part = _part(index, {"content": update.text})
            part["logprobs"] = _logprobs(model, body, update.logprobs)
            yield {**head, "choices": [part], **extra}
        if update.end is not None:
            end = _part(index, {}) | {"finish_reason": finish_reason(update.end)}
            yield {**head, "choices": [end], **extra}
    if body.ends_with_usage:
        total = Usage.of(prompt_tokens, generated)
        yield {**head, "choices": [], "usage": total.model_dump()}


def _part(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _logprobs(
    model: ServedModel, body: ChatBody, found: Sequence[TokenProbability]
) -> dict[str, Any] | None:
    if not body.logprobs:
        return None

    def described(token: int, logprob: float) -> dict[str, Any]:
        content = model.token_bytes(token)
        return {
            "token": content.decode(errors="replace"),
            "logprob": logprob,
            "bytes": list(content),
        }

    return {
        "content": [
            described(one.token, one.logprob)
            | {"top_logprobs": [described(*other) for other in one.top]}
            for one in found
        ],
        "refusal": None,
    }
