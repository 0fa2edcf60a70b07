"""`HarnessModel`: a model of lmcore as lm-eval-harness asks it.

`Likelihoods` computes log-likelihoods, `ContinuousBatch` texts.  Texts are encoded as by
lm-eval-harness's Hugging Face backend: what spells a special token is that token, and what begins
every text is added unless the text has it.
"""

from __future__ import annotations

import functools
import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError, DataError, MissingPackageError, suggestion
from lmcore.data.tokenizer.pretrained.chat_files import DEFAULT_TEMPLATE, end_tokens
from lmcore.data.tokenizer.pretrained.special_text import special_encoder
from lmcore.evaluation.harness.generation_options import read_options
from lmcore.evaluation.harness.opened import opened_model
from lmcore.evaluation.journal import requests_key
from lmcore.evaluation.likelihood import DEFAULT_TOKENS, Likelihoods, PassPool, Scored
from lmcore.evaluation.requests import RequestMaker
from lmcore.evaluation.run import identity
from lmcore.generation.chat.template import ChatTemplate
from lmcore.generation.continuous_batch import ContinuousBatch
from lmcore.generation.request import Continuation, Request
from lmcore.generation.text.completion import Completion

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from tqdm import tqdm
except ModuleNotFoundError as error:
    if error.name != "lm_eval":
        raise
    raise MissingPackageError(
        "lm_eval", needed_for="lm-eval-harness", install="pip install lm_eval"
    ) from error

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from lmcore.data.tokenizer import Tokenizer
    from lmcore.evaluation.journal import Journal
    from lmcore.evaluation.score import LogLikelihood
    from lmcore.inference.load import LoadedModel

__all__ = ["HarnessModel", "OnRequests"]

logger = logging.getLogger(__name__)

OnRequests = Callable[[str, int, int], None]
"""Function of a kind of request, and of the numbers that are done and that there are."""

_MAX_TOKENS = 256
"""Tokens of a text where a task does not say how many, as in lm-eval-harness."""
_TOGETHER = 16
"""Texts that are generated together."""
_ARGUMENTS = ("path", "device", "precision", "quantization", "batch_tokens", "max_gen_toks")


@register_model("lmcore")  # type: ignore[untyped-decorator, unused-ignore]
class HarnessModel(LM):  # type: ignore[misc, unused-ignore]
    """Model of lm-eval-harness, by the name `lmcore`."""

    def __init__(
        self,
        path: str | None = None,
        *,
        loaded: LoadedModel | None = None,
        pool: PassPool | None = None,
        device: str | None = None,
        precision: str | None = None,
        quantization: str | None = None,
        batch_tokens: int = DEFAULT_TOKENS,
        max_gen_toks: int = _MAX_TOKENS,
        **given: object,
    ) -> None:
        """Load a checkpoint, or take a model.

        Args:
            path: Directory of a run, or of a checkpoint in any format.
            loaded: Model that is loaded, in place of *path*.
            pool: Models that compute the log-likelihoods; None: this one.
            device: As `lmcore evaluate --device`; None, or one with an index, which is
                lm-eval-harness's default: detected.
            precision: Precision policy; None: the first that the device offers.
            quantization: Integers that the weights are rounded to; None: none.
            batch_tokens: Tokens of a pass.
            max_gen_toks: Tokens of a generated text where a task does not say how many.
            given: `batch_size` and `max_batch_size`, which lm-eval-harness passes, and which have
                no effect: *batch_tokens* is the size of a pass.

        Raises:
            CheckpointError, DataError, DeviceError: The checkpoint cannot be loaded.
            ConfigError: Neither a path nor a model is given, an argument is unknown, or the model
                has an encoder.
        """
        super().__init__()
        unknown = sorted(set(given) - {"batch_size", "max_batch_size"})
        if unknown:
            raise ConfigError(
                f"the model `lmcore` of lm-eval-harness has no argument `{unknown[0]}`",
                hint=suggestion(unknown[0], _ARGUMENTS),
            )
        if loaded is None:
            if not path:
                raise ConfigError(
                    "the model `lmcore` of lm-eval-harness needs a checkpoint",
                    hint="`--model_args path=runs/my-run`",
                )
            if device is not None and ":" in device:
                logger.info("`device=%s` has an index: the device is detected", device)
                device = None
            stack = ExitStack()
            options = {"device": device, "precision": precision, "quantization": quantization}
            opened = opened_model(str(path), rows=batch_tokens, **options)
            loaded = stack.enter_context(opened)
            weakref.finalize(self, stack.close)
        if loaded.reads_source or not loaded.model.causal:
            raise ConfigError(
                f"the model of `{loaded.checkpoint}` predicts no text from its beginning",
                why="lm-eval-harness asks for the probabilities of a text's continuation",
                hint="give a GPT or Llama model",
            )
        self.loaded = loaded
        self.max_gen_toks = max_gen_toks
        self.journal: Journal | None = None
        self.progress: OnRequests = _Bar()
        self._likelihoods = Likelihoods(loaded, tokens=batch_tokens, pool=pool)
        self.max_length = self._likelihoods.positions
        self._encode = functools.lru_cache(maxsize=64)(_encoder(loaded.tokenizer))
        self._maker = RequestMaker(
            loaded.tokenizer, self.max_length, self.max_length, encoder=self._whole
        )

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is the most probable.

        Args:
            requests: Requests, each with a context and its continuation.
        """
        found = self._scores("loglikelihood", [self._pair(*one.args) for one in requests])
        answers = [(one.logprob, one.greedy) for one in found]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return the log-probability of each text, in windows of the model's positions.

        Args:
            requests: Requests, each with a text.
        """
        windows = [self._maker.of_text(one.args[0]) for one in requests]
        found = iter(
            self._scores("loglikelihood_rolling", [one for each in windows for one in each])
        )
        answers = [sum(next(found).logprob for _ in each) for each in windows]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return answers

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the text after each context, up to a stop text or the number of tokens.

        Args:
            requests: Requests, each with a context and the options of generation.

        Raises:
            ConfigError: A task asks for more tokens than the model has positions, or has an option
                that is not supported.
        """
        asked = [self._request(number, *one.args) for number, one in enumerate(requests)]
        batch = ContinuousBatch(
            self.loaded.model,
            vocab_size=self.loaded.tokenizer.vocab_size,
            max_requests=_TOGETHER,
            execution=self.loaded.execution,
        )
        # The longest first: they need the most memory.
        order = sorted(range(len(asked)), key=lambda number: -len(asked[number][0].prompt))
        journal, key = self.journal, ""
        answers: dict[int, str] = {}
        if journal is not None:
            options = json.dumps([one.args[1] for one in requests], sort_keys=True, default=str)
            prompts = [Scored(tuple(one.prompt), ()) for one, _stop in asked]
            key = requests_key(f"{identity(self.loaded)} {options}", prompts)
            answers.update(journal.texts(key))
        made = {number: batch.add(asked[number][0]) for number in order if number not in answers}

        def report(_changed: Sequence[Continuation]) -> None:
            ended = {
                number: self._text(one.tokens, asked[number][1])
                for number, one in made.items()
                if one.ended and one.error is None and number not in answers
            }
            answers.update(ended)
            if journal is not None and ended:
                journal.add_texts(key, ended)
            self.progress("generate_until", sum(one.ended for one in made.values()), len(made))

        if made:
            batch.run(report)
        for one in made.values():
            if one.error is not None:
                raise one.error
        for number, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, answers[number])
        return [answers[number] for number in range(len(requests))]

    def apply_chat_template(
        self,
        chat_history: list[dict[str, str]],
        add_generation_prompt: bool = True,  # noqa: FBT001, FBT002
    ) -> str:
        """Return the text of a conversation.

        Args:
            chat_history: Messages with `role` and `content`.
            add_generation_prompt: True: the beginning of an answer follows; False: the last message
                is continued.

        Raises:
            ConfigError: The model has no chat template, or it refuses the messages.
        """
        text = self._template.render(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        begin = text.rindex(last.strip())
        # The template may take out the spaces at the end of the message.
        kept = last.lstrip() if text.startswith(last.lstrip(), begin) else last.strip()
        return text[: begin + len(kept)]

    @property
    def tokenizer_name(self) -> str:
        """Name of tokenizer and chat template, by which lm-eval-harness keeps requests."""
        return str(self.loaded.checkpoint.resolve()).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:  # noqa: FBT001, FBT002
        """Return the source of the chat template.

        Args:
            chat_template: Its name, or True for the default one; False: None is returned.

        Raises:
            ConfigError: There is none.
        """
        if not chat_template:
            return None
        name = chat_template if isinstance(chat_template, str) else DEFAULT_TEMPLATE
        if name not in self._template.templates:
            raise ConfigError(
                f"the model has no chat template `{name}`",
                hint=f"its templates are {', '.join(self._template.templates)}",
            )
        return self._template.templates[name]

    def get_model_info(self) -> dict[str, object]:
        """Return what the results of lm-eval-harness say about the model."""
        return {
            "model_name": str(self.loaded.checkpoint),
            "model_num_parameters": self.loaded.num_parameters,
            "model_dtype": str(self.loaded.model.weight_dtype),
        }

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        template = ChatTemplate.of(self.loaded.tokenizer)
        if template is None:
            raise ConfigError(
                f"the model of `{self.loaded.checkpoint}` has no chat template",
                hint="leave out the option that applies one",
            )
        weakref.finalize(self, template.close)
        return template

    @functools.cached_property
    def _begin(self) -> tuple[int, ...]:
        """Tokens that the tokenizer adds before every text."""
        whole, plain = self.loaded.tokenizer.encode("a"), self._encode("a")
        places = range(len(whole) - len(plain) + 1)
        begin = next((one for one in places if whole[one : one + len(plain)] == list(plain)), 0)
        return tuple(whole[:begin])

    def _whole(self, text: str) -> list[int]:
        """Encode a text with what begins every text, unless it has it."""
        ids = self._encode(text)
        begins = ids[: len(self._begin)] == self._begin
        return list(ids) if begins else [*self._begin, *ids]

    def _pair(self, context: str, continuation: str) -> Scored:
        if context:
            return self._maker.of_pair(context, continuation)
        first, targets = self._maker.first, self._encode(continuation)
        if targets[:1] == (first,):
            targets = targets[1:]
        if not 0 < len(targets) <= self.max_length:
            raise DataError(
                f"a text without a context has {len(targets)} tokens",
                why=f"it may have from 1 to {self.max_length}, the model's positions",
            )
        return Scored((first,), targets)

    def _scores(self, kind: str, asked: Sequence[Scored]) -> list[LogLikelihood]:
        journal, count = self.journal, 0
        key = "" if journal is None else requests_key(identity(self.loaded), asked)
        known: Mapping[int, LogLikelihood] = {} if journal is None else journal.known(key)

        def done(made: Mapping[int, LogLikelihood]) -> None:
            nonlocal count
            count += len(made)
            if journal is not None:
                journal.add(key, made)
            self.progress(kind, count, len(asked) - len(known))

        return self._likelihoods.of(asked, done, known)

    def _request(
        self, number: int, context: str, given: Mapping[str, Any]
    ) -> tuple[Request, Sequence[str]]:
        """Return the request for a text, and the texts that end it."""
        tokenizer = self.loaded.tokenizer
        wanted = read_options(given, self.max_gen_toks)
        room = self.max_length - wanted.tokens
        if room < 1:
            raise ConfigError(
                f"a task generates {wanted.tokens} tokens",
                why=f"the model has {self.max_length} positions, and the context needs some",
                hint="generate fewer: `max_gen_toks` in the task's `generation_kwargs`, or in "
                "`--model_args`",
            )
        prompt = tuple(self._whole(context)[-room:]) or (self._maker.first,)
        completion = Completion(tokenizer, prompt, wanted.stop)
        request = Request(
            *(prompt, wanted.tokens, wanted.sampling, wanted.seed + number, end_tokens(tokenizer)),
            ends=completion.update,
        )
        return request, wanted.stop

    def _text(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        """Return the text of generated tokens without special ones, up to a stop text."""
        tokenizer = self.loaded.tokenizer
        left_out: set[int] = getattr(tokenizer, "special_tokens", set)()
        text: str = tokenizer.decode([one for one in tokens if one not in left_out])
        for one in stop:
            text = text.split(one, maxsplit=1)[0]
        return text


class _Bar:
    """Progress as lm-eval-harness shows it."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def __call__(self, kind: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, desc=f"Running {kind} requests")
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()
            self._bar = None


def _encoder(tokenizer: Tokenizer) -> Callable[[str], tuple[int, ...]]:
    """Return a function that encodes texts with their special tokens, and adds none."""
    encode = special_encoder(tokenizer)
    return lambda text: tuple(encode(text))
