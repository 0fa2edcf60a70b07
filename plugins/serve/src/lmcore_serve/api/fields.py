"""Fields that the requests of completions and of chats share, and what they mean."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from lmcore.base.errors import LmcoreError
from lmcore.generation.options import MAX_SEED
from lmcore.generation.sampling.options import (
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    MIN_REPETITION_PENALTY,
    SamplingOptions,
)
from lmcore_serve.errors import ApiError
from lmcore_serve.http.body import RequestBody

__all__ = [
    "MAX_CHOICES",
    "SamplingBody",
    "StreamOptions",
    "Usage",
    "finish_reason",
    "one_of",
    "text_or_list",
]

_UNSUPPORTED = (
    "audio",
    "function_call",
    "functions",
    "metadata",
    "modalities",
    "parallel_tool_calls",
    "prediction",
    "reasoning_effort",
    "service_tier",
    "store",
    "tool_choice",
    "tools",
    "web_search_options",
)
"""Fields of OpenAI's interfaces that these do not have."""

MAX_CHOICES = 128
_MAX_STOPS = 16
_MAX_STOP_LENGTH = 1000

_StopText = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_LENGTH)]


def one_of(tag: Callable[[Any], str | None], expected: str) -> Discriminator:
    """Return the choice of the type of a field that may have several, before any is checked.

    Args:
        tag: Function that returns the tag of the type of a value; None: it has none of them.
        expected: Values that the field takes, for messages.
    """
    return Discriminator(
        tag, custom_error_type="wrong_kind", custom_error_message=f"has to be {expected}"
    )


def text_or_list(value: Any) -> str | None:
    """Return the tag of a text, or of a list."""
    return "text" if isinstance(value, str) else "list" if isinstance(value, list) else None


class JsonSchemaFormat(BaseModel):
    """Schema of a text that is JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(max_length=200)] = "answer"
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")] = True
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """Form of the text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _with_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            missing = self.json_schema is None
            what = "is missing" if missing else "belongs only to the type `json_schema`"
            raise ValueError(f"`json_schema` {what}")
        return self


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: Annotated[bool, Field(description="End with the number of tokens.")] = False
    include_obfuscation: Annotated[bool, Field(description="Accepted, without effect.")] = False


class SamplingBody(RequestBody):
    """Fields of the choice of tokens."""

    absent: ClassVar[Mapping[str, str]] = {
        name: f"`{name}` is not supported" for name in _UNSUPPORTED
    }

    model: Annotated[str | None, Field(description="Name of the model; default: the first.")] = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES, description="Texts of a prompt.")] = 1
    temperature: Annotated[
        float | None,
        Field(
            ge=0,
            le=MAX_TEMPERATURE,
            allow_inf_nan=False,
            description="Divisor of the logits; 0: the most probable token.",
        ),
    ] = 1.0
    top_p: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            allow_inf_nan=False,
            description="Sample from the smallest set of tokens with this probability; 1: all.",
        ),
    ] = 1.0
    top_k: Annotated[
        int | None,
        Field(ge=0, le=MAX_TOP_K, description="Sample from this many tokens; 0: all."),
    ] = 0
    min_p: Annotated[
        float | None,
        Field(
            ge=0,
            le=1,
            allow_inf_nan=False,
            description="Sample from tokens with this share of the highest probability.",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float | None,
        Field(
            ge=MIN_REPETITION_PENALTY,
            le=MAX_REPETITION_PENALTY,
            allow_inf_nan=False,
            description="Divisor of positive logits of tokens that the text has; 1: none.",
        ),
    ] = 1.0
    frequency_penalty: Annotated[
        float | None,
        Field(
            ge=-MAX_PENALTY,
            le=MAX_PENALTY,
            allow_inf_nan=False,
            description="Subtracted from a logit for each time its token was generated.",
        ),
    ] = 0.0
    presence_penalty: Annotated[
        float | None,
        Field(
            ge=-MAX_PENALTY,
            le=MAX_PENALTY,
            allow_inf_nan=False,
            description="Subtracted from the logit of a token that was generated.",
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        Field(
            ge=-MAX_SEED - 1,
            le=MAX_SEED,
            description="Seed of the first text; each further one has the next.",
        ),
    ] = None
    stop: Annotated[
        Annotated[
            Annotated[_StopText, Tag("text")]
            | Annotated[list[_StopText], Field(fail_fast=True, max_length=_MAX_STOPS), Tag("list")],
            one_of(text_or_list, "a text or a list of texts"),
        ]
        | None,
        Field(description="Texts that end the text and are not part of it."),
    ] = None
    stream: Annotated[
        bool | None, Field(description="Reply each token at once, as server-sent events.")
    ] = False
    stream_options: StreamOptions | None = None
    response_format: Annotated[
        ResponseFormat | None, Field(description="Form of the text, such as JSON of a schema.")
    ] = None
    logit_bias: Annotated[
        Annotated[dict[str, float], Field(max_length=0)] | None,
        Field(description="Not supported unless it is empty."),
    ] = None
    user: Annotated[str | None, Field(description="Accepted, without effect.")] = None

    @property
    def num_choices(self) -> int:
        """Number of texts of a prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def first_seed(self) -> int:
        """Seed of the first text; a random one if the client gave none."""
        return secrets.randbits(32) if self.seed is None else self.seed

    @property
    def schema_of_text(self) -> Mapping[str, Any] | bool | None:
        """JSON schema of the text; None: any text."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        return {"type": "object"} if form.json_schema is None else form.json_schema.schema_

    @property
    def ends_with_usage(self) -> bool:
        """True if a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self) -> SamplingOptions:
        """Return the sampling options.

        Raises:
            ApiError: Fields contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "`stream_options` needs `stream` true", field="stream_options")
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = 0.0 if self.top_p in {None, 1.0} else self.top_p or 0.0
        greedy = temperature == 0
        if self.top_k and top_p and not greedy:
            raise ApiError(400, "`top_k` and `top_p` below 1 exclude each other", field="top_k")
        try:
            return SamplingOptions(
                temperature=1.0 if greedy else temperature,
                top_k=0 if greedy else self.top_k or 0,
                top_p=0.0 if greedy else top_p,
                min_p=0.0 if greedy else self.min_p or 0.0,
                repetition_penalty=self.repetition_penalty or 1.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                presence_penalty=self.presence_penalty or 0.0,
                greedy=greedy,
            )
        except LmcoreError as error:
            raise ApiError(400, error.what_and_why) from None


class Usage(BaseModel):
    """Number of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int) -> Self:
        """Return the numbers with their sum."""
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )


def finish_reason(end: str | None) -> str | None:
    """Return the reason of a text's end as clients know it."""
    return end if end in {None, "stop", "length"} else "error"
