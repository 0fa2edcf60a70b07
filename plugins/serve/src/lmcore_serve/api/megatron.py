"""`PUT /api`: the interface of Megatron-LM's server of text generation.

The fields, their limits and defaults, and the reply are Megatron-LM's; errors have the status 400
or above, where Megatron-LM answers some of them with 200.
"""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from lmcore.generation.options import MAX_BEAM_WIDTH, MAX_LENGTH_PENALTY, MAX_SEED
from lmcore.generation.request import Request as EngineRequest
from lmcore.generation.sampling.options import (
    MAX_TEMPERATURE,
    MAX_TOP_K,
    SamplingOptions,
)
from lmcore.generation.text.completion import Completion
from lmcore.generation.text.stream import continuation
from lmcore_serve.errors import ApiError
from lmcore_serve.http.access_log import note
from lmcore_serve.http.body import RequestBody, body_of, schema_of
from lmcore_serve.state import MAX_PROMPTS, ServerState
from lmcore_serve.texts import Text, TextRequest, Texts
from lmcore_serve.work import BeamRequest

if TYPE_CHECKING:
    from lmcore_serve.served_model import ServedModel

__all__ = ["GenerateBody", "GenerateReply", "router"]

router = APIRouter()

_GONE = {
    "max_len": "`max_len` is no longer used: use `tokens_to_generate`",
    "sentences": "`sentences` is no longer used: use `prompts`",
}
"""Messages for fields of old versions of the interface."""


class GenerateBody(RequestBody):
    """Request for the continuation of some prompts."""

    absent: ClassVar[Mapping[str, str]] = _GONE

    prompts: Annotated[
        list[str],
        Field(
            fail_fast=True, min_length=1, max_length=MAX_PROMPTS, description="Texts to continue."
        ),
    ]
    tokens_to_generate: Annotated[
        int,
        Field(ge=0, description="Most tokens after each prompt; 0 only scores it (`logprobs`)."),
    ] = 64
    logprobs: Annotated[
        bool, Field(description="Reply the log-probability of each token but the first.")
    ] = False
    temperature: Annotated[
        float,
        Field(gt=0, le=MAX_TEMPERATURE, allow_inf_nan=False, description="Divisor of the logits."),
    ] = 1.0
    top_k: Annotated[
        int,
        Field(ge=0, le=MAX_TOP_K, description="Sample from this many tokens; 0: all; 1: greedy."),
    ] = 0
    top_p: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            allow_inf_nan=False,
            description="Sample from the smallest set with this probability; 0: all.",
        ),
    ] = 0.0
    top_p_decay: Annotated[
        float,
        Field(ge=0, le=1, allow_inf_nan=False, description="Factor of `top_p` after each token."),
    ] = 0.0
    top_p_bound: Annotated[
        float,
        Field(ge=0, le=1, allow_inf_nan=False, description="Lowest value of a decaying `top_p`."),
    ] = 0.0
    add_BOS: Annotated[
        bool, Field(description="Begin each prompt with the token that begins a document.")
    ] = False
    stop_on_double_eol: Annotated[bool, Field(description="End after an empty line.")] = False
    stop_on_eol: Annotated[bool, Field(description="End after a line.")] = False
    prevent_newline_after_colon: Annotated[
        bool, Field(description="Generate no line break after a colon.")
    ] = False
    random_seed: Annotated[
        int, Field(ge=-1, le=MAX_SEED, description="Seed of the random numbers; -1: any.")
    ] = -1
    no_log: Annotated[bool, Field(description="Accepted; texts are never in the server's log.")] = (
        False
    )
    beam_width: Annotated[
        int | None,
        Field(ge=1, le=MAX_BEAM_WIDTH, description="Beam search of this width, of one prompt."),
    ] = None
    stop_token: Annotated[
        int | None,
        Field(
            ge=0,
            description="Token that ends a text of beam search; default: the model's end tokens.",
        ),
    ] = None
    length_penalty: Annotated[
        float,
        Field(
            ge=-MAX_LENGTH_PENALTY,
            le=MAX_LENGTH_PENALTY,
            allow_inf_nan=False,
            description="Exponent of the length in the score of beam search.",
        ),
    ] = 1.0


class GenerateReply(BaseModel):
    """Texts with their prompts."""

    text: Annotated[list[str], Field(description="Each prompt with its continuation.")]
    segments: Annotated[list[list[str]], Field(description="The text of each token.")]
    logprobs: Annotated[
        list[list[float]] | None,
        Field(description="Log-probability of each token but the first, if wanted."),
    ] = None
    scores: Annotated[
        list[float] | None, Field(description="Scores of the texts of beam search.")
    ] = None


@router.put(
    "/api",
    responses={200: {"model": GenerateReply}},
    response_model=None,
    openapi_extra=schema_of(GenerateBody),
    summary="Continue prompts (Megatron-LM's interface)",
)
async def generate(
    body: Annotated[GenerateBody, Depends(body_of(GenerateBody))], request: Request
) -> Response:
    """Continue prompts, or score them."""
    state: ServerState = request.app.state.server
    model = state.first
    model.require_continues("/api")
    _check(body)
    prompts = await asyncio.to_thread(_encoded, model, body)
    wanted = [
        model.length(model.begin(prompt), body.tokens_to_generate, "prompts", "tokens_to_generate")
        for prompt in prompts
    ]
    num_texts = len(prompts) * (body.beam_width or 1)
    total = num_texts * (max(map(len, prompts)) + body.tokens_to_generate)
    if total > state.limits.max_total_tokens:
        raise ApiError(
            400,
            f"too many tokens: {num_texts} {'texts' if body.beam_width is None else 'beams'} of up "
            f"to {total // num_texts} tokens are {total}, more than "
            f"{state.limits.max_total_tokens}",
            field="prompts" if body.beam_width is None else "beam_width",
        )
    make = _beam_requests if body.beam_width is not None else _requests
    texts = Texts(
        model,
        make(model, body, prompts, wanted),
        state.limits.request_seconds,
        streams=False,
    )
    made = await texts.whole(request.receive)
    if made is None:
        return Response(status_code=499)
    note(
        request.scope,
        model=model.name,
        prompt_tokens=sum(map(len, prompts)),
        generated_tokens=sum(map(_num_generated, made)),
    )
    reply = _beams_reply if body.beam_width is not None else _reply
    return JSONResponse(await asyncio.to_thread(reply, model, body, prompts, made))


def _num_generated(text: Text) -> int:
    return len(text.tokens) + sum(len(beam.tokens) for beam in text.beams)


def _check(body: GenerateBody) -> None:
    """Raise for fields that contradict each other."""
    if body.tokens_to_generate == 0 and not body.logprobs:
        raise ApiError(
            400,
            "`tokens_to_generate` 0 needs `logprobs` true: nothing else would be replied",
            field="tokens_to_generate",
        )
    if body.top_k > 0 and body.top_p > 0:
        raise ApiError(400, "`top_k` and `top_p` exclude each other", field="top_k")
    for name, value in (("top_p_decay", body.top_p_decay), ("top_p_bound", body.top_p_bound)):
        if value > 0 and body.top_p == 0:
            raise ApiError(400, f"`{name}` needs `top_p`", field=name)
    if body.top_p_bound > body.top_p:
        raise ApiError(400, "`top_p_bound` is above `top_p`", field="top_p_bound")
    if not body.add_BOS and not all(body.prompts):
        raise ApiError(400, "an empty prompt needs `add_BOS` true", field="prompts")
    if body.beam_width is not None:
        _check_beam_search(body)


def _check_beam_search(body: GenerateBody) -> None:
    """Raise for fields that contradict beam search."""
    if len(body.prompts) > 1:
        raise ApiError(400, "beam search takes one prompt", field="beam_width")
    if body.tokens_to_generate == 0:
        raise ApiError(
            400, "beam search needs `tokens_to_generate` above 0", field="tokens_to_generate"
        )
    rules = ("logprobs", "stop_on_eol", "stop_on_double_eol", "prevent_newline_after_colon")
    if refused := [name for name in rules if getattr(body, name)]:
        raise ApiError(400, f"`{refused[0]}` cannot be used with `beam_width`", field=refused[0])


def _encoded(model: ServedModel, body: GenerateBody) -> list[list[int]]:
    """Return the token ids of each prompt."""
    start: list[int] = []
    if body.add_BOS:
        first = model.loaded.tokenizer.eod
        if first is None:
            raise ApiError(
                400, "`add_BOS`: the tokenizer has no token that begins a document", field="add_BOS"
            )
        start = [first]
    made = [start + model.encode(prompt, "prompts") for prompt in body.prompts]
    if not all(made):
        raise ApiError(400, "a prompt has no tokens", field="prompts")
    return [model.checked(prompt, "prompts") for prompt in made]


def _options(body: GenerateBody) -> SamplingOptions:
    return SamplingOptions(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        top_p_decay=body.top_p_decay,
        top_p_bound=body.top_p_bound,
    )


def _requests(
    model: ServedModel,
    body: GenerateBody,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
) -> list[TextRequest]:
    seed = body.random_seed if body.random_seed >= 0 else secrets.randbits(32)
    made = []
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        completion = Completion(model.loaded.tokenizer, prompt)
        request = EngineRequest(
            prompt,
            length,
            _options(body),
            (seed + number) % 2**63,
            model.stop_tokens,
            ends=_end_of(body, completion),
            top_logprobs=0 if body.logprobs else None,
            prompt_logprobs=body.logprobs,
            constraint=_NoNewlineAfterColon(model, prompt)
            if body.prevent_newline_after_colon
            else None,
        )
        made.append(TextRequest(request, completion))
    return made


def _end_of(body: GenerateBody, completion: Completion) -> Callable[[Sequence[int]], bool]:
    """Return the rule that ends a text: after a line, or after an empty line."""
    if not (body.stop_on_eol or body.stop_on_double_eol):
        return completion.update
    end = "\n" if body.stop_on_eol else "\n\n"

    def ends(tokens: Sequence[int]) -> bool:
        completion.update(tokens)
        return end in completion.text

    return ends


class _NoNewlineAfterColon:
    """Rule that no line break follows a colon; see `Constraint`."""

    def __init__(self, model: ServedModel, prompt: Sequence[int]) -> None:
        self._model, self._last = model, prompt[-1]

    def allowed(self, size: int) -> torch.Tensor:
        """Return the tokens that may come next, bool [size]."""
        mask = torch.ones(size, dtype=torch.bool)
        if self._model.token_text(self._last).endswith(":"):
            ids = self._model.tokens_that_begin_a_line  # in ascending order
            mask[ids[: bisect_left(ids, size)]] = False
        return mask

    def accept(self, token: int) -> bool:
        """Take the next token; the rule ends no text."""
        self._last = token
        return False


def _reply(
    model: ServedModel,
    body: GenerateBody,
    prompts: Sequence[Sequence[int]],
    made: Sequence[Text],
) -> dict[str, Any]:
    texts, segments, logprobs = [], [], []
    for prompt, own, text in zip(prompts, made, body.prompts, strict=True):
        # As Megatron-LM, which replies the token of the end with the text.
        ended = [own.stop_token] if own.stop_token is not None else []
        texts.append(text + own.text + (model.loaded.tokenizer.decode(ended) if ended else ""))
        segments.append([model.token_text(one) for one in (*prompt, *own.tokens, *ended)])
        own_logprobs = [*own.prompt_logprobs, *own.logprobs]
        if ended and own.stop_logprob is not None:
            own_logprobs.append(own.stop_logprob)
        logprobs.append([one.logprob for one in own_logprobs])
    return {"text": texts, "segments": segments, "logprobs": logprobs if body.logprobs else None}


def _beam_requests(
    model: ServedModel,
    body: GenerateBody,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
) -> list[TextRequest]:
    stops = model.stop_tokens if body.stop_token is None else frozenset({body.stop_token})
    if body.stop_token is not None and body.stop_token >= model.vocab_size:
        raise ApiError(
            400,
            f"`stop_token` {body.stop_token} is outside the vocabulary of {model.vocab_size} "
            "tokens",
            field="stop_token",
        )
    assert body.beam_width is not None
    return [
        TextRequest(BeamRequest(prompt, length, body.beam_width, stops, body.length_penalty))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def _beams_reply(
    model: ServedModel,
    body: GenerateBody,
    prompts: Sequence[Sequence[int]],
    made: Sequence[Text],
) -> dict[str, Any]:
    (prompt,), (text,), (own,) = prompts, body.prompts, made
    decoded = [continuation(model.loaded.tokenizer, prompt, beam.tokens) for beam in own.beams]
    return {
        "text": [text + one for one in decoded],
        "segments": [
            [model.token_text(one) for one in (*prompt, *beam.tokens)] for beam in own.beams
        ],
        "scores": [beam.score for beam in own.beams],
    }
