"""Texts for one line after another: `Answers` to prompts, `Conversation` with a chat model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lmcore.base.errors import ConfigError, counted
from lmcore.data.tokenizer.pretrained.chat_files import end_tokens
from lmcore.generation.chat.template import ChatTemplate
from lmcore.generation.generate import generate_with_cache, recompute, room
from lmcore.generation.options import NUM_SEEDS
from lmcore.generation.request import Request
from lmcore.generation.sampling.json_schema import JsonSchemas
from lmcore.generation.text.completion import Completion
from lmcore.generation.text.prompt import no_source_without_cache, source_and_prompt
from lmcore.generation.text.sample import DEFAULT_TOKENS

if TYPE_CHECKING:
    from lmcore.generation.text.sampler import SamplingSettings
    from lmcore.inference.load import LoadedModel

__all__ = ["Answer", "Answers", "Conversation", "Turn"]


@dataclass(frozen=True)
class Answer:
    """Text after a prompt.

    Attributes:
        text: The text.
        num_tokens: Number of its tokens.
        end: Reason of its end: the model or a stop text, the largest number of tokens, the last
            position of the model, or Ctrl-C.
    """

    text: str
    num_tokens: int
    end: Literal["stop", "tokens", "positions", "interrupt"]


class Answers:
    """Generation of a text after one prompt after another.

    The first one is drawn with the seed of the settings, each further one with the next.
    """

    def __init__(self, settings: SamplingSettings, loaded: LoadedModel) -> None:
        """Generate nothing yet.

        Args:
            settings: Length of each text, and the choice of its tokens.
            loaded: Model and tokenizer.
        """
        if loaded.reads_source and not settings.cache:
            raise no_source_without_cache()
        self._settings, self._loaded = settings, loaded
        self._seed = settings.seed % NUM_SEEDS
        self._ends = end_tokens(loaded.tokenizer)
        schema = settings.json_schema
        self._schema = None if schema is None else JsonSchemas(loaded.tokenizer).compiled(schema)

    @property
    def positions(self) -> int:
        """Number of positions of the model."""
        return self._loaded.model.shape.max_position_embeddings

    @property
    def wanted(self) -> int | None:
        """Largest number of tokens of a text; None: as many as the model has positions for."""
        return self._settings.tokens or self._settings.most_tokens

    @property
    def reserve(self) -> int:
        """Number of tokens that a prompt should leave room for."""
        return min(self.wanted or DEFAULT_TOKENS, max(self.positions // 4, 1))

    def room(self, prompt: Sequence[int]) -> int:
        """Return the number of tokens that can follow a prompt."""
        return room(self.positions, len(prompt)) if len(prompt) <= self.positions else 0

    def answer(self, prompt: Sequence[int], show: Callable[[str], None]) -> Answer:
        """Generate the text after a prompt; Ctrl-C ends it.

        Args:
            prompt: Tokens of the prompt, at least one.
            show: Called with each new piece of the text.

        Raises:
            ConfigError: The prompt leaves no room.
            RunError: The model's logits are not finite.
        """
        settings, free = self._settings, self.room(prompt)
        if free == 0:
            raise ConfigError(
                f"the prompt has {counted(len(prompt), 'token')}, too many for the model",
                why=f"the model has {self.positions} positions",
                hint="shorten it",
            )
        source: Sequence[int] = ()
        begin, continued = prompt, prompt
        if self._loaded.reads_source:
            source, begin = source_and_prompt(self._loaded.tokenizer, prompt)
            continued = ()
        completion = Completion(self._loaded.tokenizer, continued, settings.stop)
        request = Request(
            *(tuple(begin), min(self.wanted or free, free), settings.options, self._seed),
            self._ends,
            ends=completion.update,
            constraint=None if self._schema is None else self._schema.constraint(),
            source=tuple(source),
        )
        self._seed = (self._seed + 1) % NUM_SEEDS
        return self._generate(request, completion, show)

    def _generate(
        self, request: Request, completion: Completion, show: Callable[[str], None]
    ) -> Answer:
        shown, tokens = 0, list[int]()

        def write() -> None:
            nonlocal shown
            show(completion.text[shown:])
            shown = len(completion.text)

        def on_token(_row: int, token: int) -> None:
            tokens.append(token)
            write()

        make = generate_with_cache if self._settings.cache else recompute
        interrupted, stopped = False, False
        loaded = self._loaded
        try:
            (made,) = make(
                loaded.model, [request], loaded.tokenizer.vocab_size, loaded.execution, on_token
            )
            stopped = made.finish_reason == "stop"
        except KeyboardInterrupt:
            interrupted = True
        completion.finish(tokens)
        write()
        if interrupted:
            return Answer(completion.text, len(tokens), "interrupt")
        short = request.max_tokens < (self.wanted or request.max_tokens + 1)
        end: Literal["stop", "tokens", "positions"] = "positions" if short else "tokens"
        return Answer(completion.text, len(tokens), "stop" if stopped else end)


@dataclass(frozen=True)
class Turn:
    """A message of the user that an answer follows.

    Attributes:
        prompt: Tokens of the conversation up to the answer.
        dropped: Number of the oldest messages that were dropped for lack of positions.
    """

    prompt: tuple[int, ...]
    dropped: int


class Conversation:
    """Messages so far, and the next answer.

    Attributes:
        messages: Messages after the system prompt, in order.
        system: System prompt; None: there is none.
    """

    def __init__(
        self, answers: Answers, template: ChatTemplate, *, system: str | None = None
    ) -> None:
        """Begin without messages.

        Args:
            answers: Generation of the answers.
            template: Chat template of the model.
            system: System prompt.
        """
        self._answers, self._template = answers, template
        self.system = system
        self.messages: list[dict[str, str]] = []

    def begin(self, text: str) -> Turn:
        """Add a message of the user.

        If the conversation leaves too little room for the answer, its oldest messages are dropped,
        each with its answer.  After an error the messages are as before.

        Args:
            text: The message.

        Raises:
            ConfigError: The message alone does not fit the model's positions, or the template
                refuses it.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        before = len(messages)
        while True:
            prompt = self._template.prompt_tokens([*self._first(), *messages])
            if self._answers.room(prompt) >= self._answers.reserve or len(messages) == 1:
                break
            del messages[0]
            while messages[0]["role"] != "user":
                del messages[0]
        if self._answers.room(prompt) == 0:
            what = "the message and the system prompt have" if self.system else "the message has"
            raise ConfigError(
                f"{what} {len(prompt)} tokens, too many for the model",
                why=f"the model has {self._answers.positions} positions",
                hint="shorten the message",
            )
        self.messages = messages
        return Turn(tuple(prompt), before - len(messages))

    def answer(self, turn: Turn, show: Callable[[str], None]) -> Answer:
        """Generate the answer to the last message and add it to the messages.

        After an error the message is not among them.

        Args:
            turn: The message.
            show: Called with each new piece of the text.

        Raises:
            RunError: The model's logits are not finite.
        """
        try:
            answer = self._answers.answer(turn.prompt, show)
        except Exception:
            del self.messages[-1]
            raise
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer

    def reset(self) -> None:
        """Forget all messages but the system prompt."""
        self.messages = []

    def _first(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]
