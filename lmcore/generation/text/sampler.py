"""Generation of samples of several prompts, in their order."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError, counted
from lmcore.data.tokenizer.pretrained.chat_files import end_tokens
from lmcore.generation.beam import beam_search
from lmcore.generation.continuous_batch import ContinuousBatch
from lmcore.generation.generate import recompute, require_room, room
from lmcore.generation.options import NUM_SEEDS
from lmcore.generation.request import Continuation, Request
from lmcore.generation.sampling.json_schema import JsonSchema, JsonSchemas
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.generation.text.completion import Completion
from lmcore.generation.text.neighbors import encode_neighbors
from lmcore.generation.text.prompt import encode_prompt, no_source_without_cache, source_and_prompt
from lmcore.generation.text.sample import DEFAULT_TOKENS, Output, Sample
from lmcore.generation.text.stream import continuation

if TYPE_CHECKING:
    from lmcore.generation.text.neighbors import TextNeighbors
    from lmcore.inference.load import LoadedModel

__all__ = ["EncodedPrompts", "Sampler", "SamplingSettings", "encode_prompts"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingSettings:
    """Number and length of samples, and the choice of their tokens.

    Attributes:
        options: Options of the choice of each token.
        seed: Seed of the first sample; each further one has the next seed.
        num_samples: Number of samples of each prompt.
        tokens: Number of tokens of a sample, which all prompts must have room for; None: a default,
            or fewer if there is no room.
        most_tokens: Number of tokens of a sample, or fewer as its prompt has room; None: *tokens*.
        stop: Texts that end a sample.
        top_logprobs: Number of most probable tokens to report; see `Request`.
        num_together: Number of samples that are generated together.
        cache: False: every token recomputes the whole text.
        json_schema: Schema of the JSON that each sample is; None: any text.
        beam_width: Number of texts that beam search follows; None: no beam search.
        length_penalty: Exponent of the length in the score of beam search; see `beam_search`.
        neighbors: Neighbours of each prompt's text, for a model that reads them; None: no text has
            any.
    """

    options: SamplingOptions
    seed: int = 0
    num_samples: int = 1
    tokens: int | None = None
    most_tokens: int | None = None
    stop: Sequence[str] = ()
    top_logprobs: int | None = None
    num_together: int = 8
    cache: bool = True
    json_schema: Mapping[str, Any] | bool | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    neighbors: Sequence[TextNeighbors] | None = None


@dataclass(frozen=True)
class _Encoded:
    """Tokens of a prompt.

    Attributes:
        prompt: Tokens that the decoder begins with.
        source: Input of the encoder; empty for a model without an encoder.
        answered: True if the text is an answer to the source.
    """

    prompt: tuple[int, ...]
    source: tuple[int, ...] = ()
    answered: bool = False

    @property
    def continued(self) -> tuple[int, ...]:
        """Tokens whose text is continued: none, if the text is an answer."""
        return () if self.answered else self.prompt

    @property
    def length(self) -> int:
        """Number of tokens of what was given."""
        return len(self.source if self.answered else self.prompt)


@dataclass(frozen=True)
class _Asked:
    """Sample to generate.

    Attributes:
        prompt: Text of the prompt.
        length: Number of tokens of the prompt.
        request: Request for its tokens.
        completion: Its text.
    """

    prompt: str
    length: int
    request: Request
    completion: Completion


@dataclass
class _Running:
    """Sample that the batch works on.

    Attributes:
        asked: The sample.
        continuation: Its tokens.
        shown: Number of characters that were written; None: the prompt was not written either.
    """

    asked: _Asked
    continuation: Continuation
    shown: int | None = None


@dataclass
class _Made:
    """Counts of what was generated.

    Attributes:
        tokens: Number of tokens.
        samples: Number of samples.
        cut: Number of samples that reached their largest number of tokens.
    """

    tokens: int = 0
    samples: int = 0
    cut: int = 0

    def add(self, sample: Sample) -> None:
        """Count a sample."""
        self.tokens += len(sample.tokens)
        self.samples += 1
        self.cut += not sample.finished


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts that a model can continue.

    Attributes:
        texts: Texts of the prompts.
        encoded: Tokens of each.
        lengths: Largest number of tokens after each.
        schema: Schema of the JSON that each sample is; None: any text.
    """

    texts: Sequence[str]
    encoded: Sequence[_Encoded]
    lengths: Sequence[int]
    schema: JsonSchema | None


def encode_prompts(
    settings: SamplingSettings, loaded: LoadedModel, prompts: Sequence[str]
) -> EncodedPrompts:
    """Return prompts for `Sampler.run`; settings, tokenizer and shape decide, no weight is read.

    Args:
        settings: Number and length of the samples.
        loaded: Tokenizer and model, whose parameters may lack memory.
        prompts: Texts.

    Raises:
        ConfigError: A prompt has no tokens or leaves too few positions, or the JSON schema cannot
            be used.
        MissingPackageError: A JSON schema needs a package that is not installed.
    """
    encoder = _PromptEncoder(settings, loaded)
    encoded = [encoder.encode(prompt, number) for number, prompt in enumerate(prompts, start=1)]
    lengths = encoder.lengths([one.prompt for one in encoded])
    wanted = settings.json_schema
    schema = None if wanted is None else JsonSchemas(loaded.tokenizer).compiled(wanted)
    return EncodedPrompts(prompts, encoded, lengths, schema)


@dataclass(frozen=True)
class _PromptEncoder:
    """Tokens of prompts, and the number of tokens that may follow them."""

    settings: SamplingSettings
    loaded: LoadedModel

    def encode(self, prompt: str, number: int) -> _Encoded:
        tokenizer = self.loaded.tokenizer
        ids = encode_prompt(tokenizer, prompt)
        if self.loaded.reads_source:
            return self._encoded_source(ids, number)
        if not ids and tokenizer.eod is None:
            raise ConfigError(
                f"prompt {number} is empty",
                why=f"this `{tokenizer.name}` has no end-of-document token to start from",
                hint="give a text by `--prompt`",
            )
        prompt_ids = tuple(ids) if ids or tokenizer.eod is None else (tokenizer.eod,)
        if not self.loaded.reads_neighbors:
            return _Encoded(prompt_ids)
        if not self.settings.cache:
            raise no_source_without_cache()
        if self.settings.neighbors is None:
            return _Encoded(prompt_ids)
        shape, given = self.loaded.model.shape, self.settings.neighbors[number - 1]
        return _Encoded(prompt_ids, encode_neighbors(tokenizer, given, shape, number))

    def _encoded_source(self, ids: Sequence[int], number: int) -> _Encoded:
        if not self.settings.cache:
            raise no_source_without_cache()
        source, prompt = source_and_prompt(self.loaded.tokenizer, ids)
        shape = self.loaded.model.shape
        if shape.learned_positions and len(source) > shape.max_position_embeddings:
            raise ConfigError(
                f"prompt {number} has {len(source)} tokens, and the encoder "
                f"{shape.max_position_embeddings} positions",
                hint="give a shorter prompt",
            )
        return _Encoded(tuple(prompt), tuple(source), answered=True)

    def lengths(self, encoded: Sequence[Sequence[int]]) -> list[int]:
        """Return the largest number of tokens after each prompt."""
        settings, positions = self.settings, self.loaded.model.shape.max_position_embeddings
        if settings.most_tokens is not None:
            require_room(encoded, 1, positions)
            if settings.most_tokens > (least := room(positions, max(map(len, encoded)))):
                logger.warning(
                    "the model has %d positions: after the longest prompt %s at most are "
                    "generated, not the %d of `--out-seq-length`",
                    positions,
                    counted(least, "token"),
                    settings.most_tokens,
                )
            return [min(settings.most_tokens, room(positions, len(ids))) for ids in encoded]
        free = room(positions, max(map(len, encoded)))
        num_tokens = settings.tokens or max(min(DEFAULT_TOKENS, free), 1)
        require_room(encoded, num_tokens, positions)
        return [num_tokens] * len(encoded)


@dataclass(frozen=True)
class Sampler:
    """Generation of samples.

    Attributes:
        settings: Number and length of the samples, and the choice of their tokens.
        loaded: Model and tokenizer.
        output: Output of the samples.
    """

    settings: SamplingSettings
    loaded: LoadedModel
    output: Output

    def run(self, prompts: EncodedPrompts) -> None:
        """Generate and write all samples.

        Raises:
            RunError: The model's logits are not finite.
        """
        made = _Made()
        begin = time.perf_counter()
        if self.settings.beam_width is not None:
            self._search(prompts, self.settings.beam_width, made)
        else:
            # Lazily, as there may be more samples than memory holds.
            asked = self._samples(prompts)
            generate = self._continue if self.settings.cache else self._recompute
            generate(asked, made)
        seconds = time.perf_counter() - begin
        tokens = counted(made.tokens, "token")
        logger.info("%s in %.1f s, %.1f tokens/s", tokens, seconds, made.tokens / seconds)
        if self.settings.json_schema is not None and made.cut:
            logger.warning(
                "%d of %s stopped at the limit of tokens: JSON that is cut is not complete",
                made.cut,
                counted(made.samples, "text"),
            )

    def _samples(self, prompts: EncodedPrompts) -> Iterator[_Asked]:
        tokenizer, seed = self.loaded.tokenizer, self.settings.seed % NUM_SEEDS
        schema, stop_tokens = prompts.schema, self._stop_tokens()
        each = zip(prompts.texts, prompts.encoded, prompts.lengths, strict=True)
        for prompt, ids, length in each:
            for _ in range(self.settings.num_samples):
                completion = Completion(tokenizer, ids.continued, self.settings.stop)
                request = Request(
                    *(ids.prompt, length, self.settings.options, seed, stop_tokens),
                    ends=completion.update,
                    top_logprobs=self.settings.top_logprobs,
                    constraint=None if schema is None else schema.constraint(),
                    source=ids.source,
                )
                yield _Asked(prompt, ids.length, request, completion)
                seed = (seed + 1) % NUM_SEEDS

    def _continue(self, asked: Iterator[_Asked], made: _Made) -> None:
        """Generate several samples together, and write them in order."""
        size = self.settings.num_together
        batch = ContinuousBatch(
            self.loaded.model,
            vocab_size=self.loaded.tokenizer.vocab_size,
            max_requests=size,
            execution=self.loaded.execution,
        )
        running: deque[_Running] = deque()

        def add() -> None:
            while len(running) < 2 * size and (one := next(asked, None)) is not None:
                running.append(_Running(one, batch.add(one.request)))

        def write(_changed: Sequence[Continuation]) -> None:
            while running:
                self._show(running[0])
                if not running[0].continuation.ended:
                    break
                made.add(self._end(running.popleft()))
            add()

        add()
        batch.run(write)

    def _recompute(self, asked: Iterator[_Asked], made: _Made) -> None:
        """Generate one sample after another without a cache."""
        for one in asked:
            (continuation,) = recompute(
                self.loaded.model,
                [one.request],
                self.loaded.tokenizer.vocab_size,
                self.loaded.execution,
            )
            running = _Running(one, continuation)
            self._show(running)
            made.add(self._end(running))

    def _search(self, prompts: EncodedPrompts, width: int, made: _Made) -> None:
        """Write the best texts of beam search after each prompt."""
        tokenizer = self.loaded.tokenizer
        each = zip(prompts.texts, prompts.encoded, prompts.lengths, strict=True)
        for prompt, ids, length in each:
            found = beam_search(
                self.loaded.model,
                ids.prompt,
                source=ids.source,
                width=width,
                max_tokens=length,
                vocab_size=tokenizer.vocab_size,
                stop_tokens=self._stop_tokens(),
                length_penalty=self.settings.length_penalty,
                execution=self.loaded.execution,
            )
            for beam in found[: self.settings.num_samples]:
                text = continuation(tokenizer, ids.continued, beam.tokens)
                if self.output.streams:
                    self.output.begin(self._shown_prompt(prompt))
                    self.output.piece(text)
                sample = Sample(
                    *(prompt, text, beam.tokens, ids.length, beam.finished, None),
                    score=beam.score,
                    answers=self.loaded.reads_source,
                )
                self.output.end(sample)
                made.add(sample)

    def _stop_tokens(self) -> frozenset[int]:
        return end_tokens(self.loaded.tokenizer)

    def _show(self, one: _Running) -> None:
        """Write the text of a sample that is new, on an output for its growth."""
        if not self.output.streams:
            return
        if one.shown is None:
            self.output.begin(self._shown_prompt(one.asked.prompt))
        text = one.asked.completion.text
        self.output.piece(text[one.shown or 0 :])
        one.shown = len(text)

    def _shown_prompt(self, prompt: str) -> str:
        """Return what precedes the generated text: nothing before an answer."""
        return "" if self.loaded.reads_source else prompt

    def _end(self, one: _Running) -> Sample:
        """Write the rest of a sample, and return it."""
        continuation, asked = one.continuation, one.asked
        if continuation.error is not None:
            raise continuation.error
        text = asked.completion.finish(continuation.tokens)
        self._show(one)
        sample = Sample(
            prompt=asked.prompt,
            text=text,
            tokens=tuple(continuation.tokens),
            num_prompt_tokens=asked.request.num_prompt_tokens,
            finished=continuation.finish_reason == "stop",
            seed=asked.request.seed,
            logprobs=self._logprobs(continuation),
            answers=self.loaded.reads_source,
        )
        self.output.end(sample)
        return sample

    def _logprobs(self, continuation: Continuation) -> list[dict[str, Any]] | None:
        """Return the probabilities of the tokens as JSON values."""
        if self.settings.top_logprobs is None:
            return None
        decode = self.loaded.tokenizer.decode

        def described(token: int, logprob: float) -> dict[str, Any]:
            return {"id": token, "text": decode([token]), "logprob": logprob}

        return [
            described(one.token, one.logprob) | {"top": [described(*other) for other in one.top]}
            for one in continuation.logprobs
        ]
