"""Generation from a list of prompts, and the checks of prompts before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lmcore.base.errors import ConfigError, counted
from lmcore.generation.continuous_batch import ContinuousBatch
from lmcore.generation.next_token import extend
from lmcore.generation.request import Continuation, Request
from lmcore.generation.sampling.logits import new_generator
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.inference.text_model import PLAIN, Execution, TextModel

if TYPE_CHECKING:
    from lmcore.families.protocol import CausalLM

__all__ = ["Generation", "OnToken", "generate", "require_room", "room"]

OnToken = Callable[[int, int], None]
"""Function of a row and its new token, called in the order of generation."""


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt.

    Attributes:
        tokens: Token ids after the prompt, without the end-of-document token.
        finished: True if the document ended within the requested number of tokens.
    """

    tokens: tuple[int, ...]
    finished: bool


def room(max_positions: int, prompt_length: int) -> int:
    """Return the number of tokens that can follow a prompt; the last one needs no position.

    Args:
        max_positions: Number of positions of the model.
        prompt_length: Number of tokens of the prompt.
    """
    return max(max_positions - max(prompt_length, 1) + 1, 0)


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    options: SamplingOptions,
    seed: int,
    eod: int | None,
    vocab_size: int,
    execution: Execution = PLAIN,
    on_token: OnToken | None = None,
    use_cache: bool = True,
) -> list[Generation]:
    """Generate a continuation of each prompt, with the model in evaluation mode.

    Args:
        model: Model with its weights loaded.
        prompts: Token ids of each prompt; an empty prompt starts from *eod*, as a document does in
            training.
        num_tokens: Number of tokens after each prompt, unless the document ends before.
        options: Sampling options.
        seed: Seed; row i samples from a generator with seed + i, independently of other rows.
        eod: End-of-document token; None: the tokenizer has none.
        vocab_size: Size of the vocabulary without padding, which is never sampled.
        execution: Context of the passes, and what follows each token.
        on_token: Callback for each new token.
        use_cache: False: every token recomputes the whole sequence.

    Raises:
        ConfigError: A prompt is empty without *eod*, has an id outside the vocabulary, or leaves
            too few positions for the tokens.
        RunError: The model's logits are not finite.
    """
    assert num_tokens >= 0
    assert model.causal, "generation needs causal attention"
    if not prompts:
        return []
    rows = [_checked(prompt, row, eod, vocab_size) for row, prompt in enumerate(prompts)]
    require_room(rows, num_tokens, model.shape.max_position_embeddings)
    stop = frozenset() if eod is None else frozenset({eod})
    requests = [
        Request(row, num_tokens, options, seed + number, stop) for number, row in enumerate(rows)
    ]
    was_training = model.training
    model.eval()
    try:
        make = generate_with_cache if use_cache else recompute
        made = make(model, requests, vocab_size, execution, on_token)
    finally:
        model.train(was_training)
    return [Generation(tuple(one.tokens), one.finish_reason == "stop") for one in made]


def generate_with_cache(
    model: TextModel,
    requests: Sequence[Request],
    vocab_size: int,
    execution: Execution = PLAIN,
    on_token: OnToken | None = None,
) -> list[Continuation]:
    """Continue all requests together; see `ContinuousBatch`.

    Args:
        model: Model in evaluation mode.
        requests: Requests that fit the model.
        vocab_size: Size of the vocabulary without padding.
        execution: Context of the passes, and what follows each token.
        on_token: Callback for each new token.

    Raises:
        RunError: The model's logits are not finite.
    """
    batch = ContinuousBatch(
        model,
        vocab_size=vocab_size,
        max_requests=len(requests),
        execution=execution,
    )
    made = [batch.add(request) for request in requests]
    reported = [0] * len(made)

    def report(changed: Sequence[Continuation]) -> None:
        for number, one in enumerate(made):
            if one.error is not None:
                raise one.error
            if on_token is not None and one in changed:
                for token in one.tokens[reported[number] :]:
                    on_token(number, token)
                reported[number] = len(one.tokens)

    batch.run(report)
    return made


def recompute(
    model: TextModel,
    requests: Sequence[Request],
    vocab_size: int,
    execution: Execution = PLAIN,
    on_token: OnToken | None = None,
) -> list[Continuation]:
    """Continue each request alone and without a cache: every token is a pass over the whole text.

    For the arguments and errors see `generate_with_cache`.
    """
    made = []
    with execution.passes():
        for number, request in enumerate(requests):
            assert not request.source, "an encoder's output is in a cache"
            text = Continuation(request, new_generator(request.seed))
            made.append(text)
            while len(text.tokens) < request.max_tokens and not text.ended:
                tokens_1S = torch.tensor([[*request.prompt, *text.tokens]], device=model.device)
                before = len(text.tokens)
                extend([text], model.logits(model(tokens_1S)[:, -1]), vocab_size)
                execution.step_boundary()
                if text.error is not None:
                    raise text.error
                if on_token is not None and len(text.tokens) > before:
                    on_token(number, text.tokens[-1])
    return made


def _checked(prompt: Sequence[int], row: int, eod: int | None, vocab_size: int) -> list[int]:
    tokens = list(prompt)
    if not tokens:
        if eod is None:
            raise ConfigError(
                f"prompt {row + 1} is empty",
                why="this tokenizer has no end-of-document token to start from",
                hint="give at least one token",
            )
        return [eod]
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"prompt {row + 1} has the token id {token}, outside the vocabulary",
                why=f"ids go from 0 to {vocab_size - 1}",
            )
    return tokens


def require_room(prompts: Sequence[Sequence[int]], num_tokens: int, max_positions: int) -> None:
    """Raise unless the model has positions for all tokens.

    Args:
        prompts: Token ids of each prompt.
        num_tokens: Number of tokens after each prompt.
        max_positions: Number of positions of the model.

    Raises:
        ConfigError: The longest prompt leaves too few positions.
    """
    longest = max(range(len(prompts)), key=lambda row: len(prompts[row]))
    length = len(prompts[longest])
    free = room(max_positions, length) if length <= max_positions else 0
    if num_tokens <= free:
        return
    what = f"prompt {longest + 1}" if len(prompts) > 1 else "the prompt"
    if free == 0:
        raise ConfigError(
            f"{what} has {counted(length, 'token')}, too many for the model",
            why=f"the model has {max_positions} positions",
            hint="shorten the prompt",
        )
    raise ConfigError(
        f"{what} of {counted(length, 'token')} leaves no room for {num_tokens} more",
        why=f"the model has {max_positions} positions",
        hint=f"use `--tokens {free}` or less, or a shorter prompt",
    )
