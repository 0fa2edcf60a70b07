"""`Answers`: one text after another, each written as it grows, for interactive commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lmcore.base.errors import ConfigError, counted
from lmcore.data.tokenizer.pretrained.chat_files import end_tokens
from lmcore.generation.generate import generate_with_cache, recompute, room
from lmcore.generation.options import NUM_SEEDS
from lmcore.generation.request import Request
from lmcore.generation.sampling.json_schema import JsonSchemas
from lmcore.generation.text.completion import Completion
from lmcore.generation.text.sample import DEFAULT_TOKENS

if TYPE_CHECKING:
    from lmcore.generation.load import LoadedModel
    from lmcore.generation.text.sampler import SamplingSettings

__all__ = ["Answer", "Answers"]


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
        self._settings, self._loaded = settings, loaded
        self._seed = settings.seed % NUM_SEEDS
        self._ends = end_tokens(loaded.tokenizer)
        schema = settings.json_schema
        self._schemas = JsonSchemas(loaded.tokenizer) if schema is not None else None

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
        completion = Completion(self._loaded.tokenizer, prompt, settings.stop)
        schema = settings.json_schema
        request = Request(
            *(tuple(prompt), min(self.wanted or free, free), settings.options, self._seed),
            self._ends,
            ends=completion.update,
            constraint=self._schemas.constraint(schema)
            if self._schemas is not None and schema is not None
            else None,
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
