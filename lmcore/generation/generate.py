"""Generation of token sequences: one pass over the prompts (prefill), then one token at a time.

Prompts of different lengths run in one batch as in Megatron: prefill stops at the shortest prompt,
and a row with a longer prompt takes its next prompt token instead of a sampled one.  So no row is
padded, no mask is needed, and every row sees exactly its own tokens.

Shapes: B rows, S tokens so far, H hidden, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.errors import ConfigError
from lmcore.generation.sampling import SamplingOptions, new_generators, sample

if TYPE_CHECKING:
    from lmcore.model.cache import KeyValueCache
    from lmcore.model.protocol import CausalLM

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
    precision_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
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
        precision_context: Context of a forward pass, which sets the precision.
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
    was_training = model.training
    model.eval()
    try:
        # One context for all tokens: a precision policy that casts weights casts them once.
        with torch.inference_mode(), precision_context():
            session = _Session(model, rows, num_tokens, eod, on_token, use_cache=use_cache)
            return session.run(options, new_generators(seed, len(rows)), vocab_size)
    finally:
        model.train(was_training)


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
            f"{what} has {length} tokens, too many for the model",
            why=f"the model has {max_positions} positions",
            hint="shorten the prompt",
        )
    raise ConfigError(
        f"{what} of {length} tokens leaves no room for {num_tokens} more",
        why=f"the model has {max_positions} positions",
        hint=f"use `--tokens {free}` or less, or a shorter prompt",
    )


@dataclass
class _Session:
    """State of one batch, from prefill to the last token."""

    model: CausalLM
    rows: Sequence[Sequence[int]]
    num_tokens: int
    eod: int | None
    on_token: OnToken | None
    use_cache: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        self.device = self.model.head_weight.device
        self.new: list[list[int]] = [[] for _ in self.rows]
        self.finished = [False] * len(self.rows)

    def run(
        self, options: SamplingOptions, generators: Sequence[torch.Generator], vocab_size: int
    ) -> list[Generation]:
        """Sample tokens until every row has ended."""
        length = min(len(row) for row in self.rows)
        tokens_BS = torch.tensor([row[:length] for row in self.rows], device=self.device)
        cache = self._new_cache() if self.use_cache else None
        active = [] if self.num_tokens == 0 else list(range(len(self.rows)))
        while active:
            logits_BV = self._next_logits(tokens_BS, cache)
            # A row within its prompt samples nothing, so that its seed gives the same text alone.
            sampling = [row for row in active if len(self.rows[row]) <= length]
            chosen = self._choose(logits_BV, sampling, options, generators, vocab_size)
            for row, token in chosen.items():
                self._take(row, token)
            active = [row for row in active if not self._ended(row)]
            column = [self._token_at(row, length) for row in range(len(self.rows))]
            next_B1 = torch.tensor(column, device=self.device).unsqueeze(-1)
            tokens_BS = next_B1 if cache is not None else torch.cat([tokens_BS, next_B1], dim=1)
            length += 1
        return [
            Generation(tuple(new), finished)
            for new, finished in zip(self.new, self.finished, strict=True)
        ]

    def _new_cache(self) -> KeyValueCache:
        # The last token is never fed back.
        capacity = max(len(row) for row in self.rows) + self.num_tokens - 1
        unit = self.model.head_weight.new_ones(1, 1)
        dtype = torch.nn.functional.linear(unit, unit).dtype  # compute dtype of the precision
        return self.model.new_cache(len(self.rows), capacity, dtype)

    def _next_logits(self, tokens_BS: Tensor, cache: KeyValueCache | None) -> Tensor:
        hidden_BSH = self.model(tokens_BS, cache)
        return self.model.logits(hidden_BSH[:, -1])

    def _choose(
        self,
        logits_BV: Tensor,
        sampling: Sequence[int],
        options: SamplingOptions,
        generators: Sequence[torch.Generator],
        vocab_size: int,
    ) -> dict[int, int]:
        if not sampling:
            return {}
        if len(sampling) < len(self.rows):
            logits_BV = logits_BV[torch.tensor(sampling, device=self.device)]
        chosen_B = sample(
            logits_BV, options, [generators[row] for row in sampling], vocab_size=vocab_size
        )
        return dict(zip(sampling, chosen_B.tolist(), strict=True))

    def _take(self, row: int, token: int) -> None:
        if token == self.eod:
            self.finished[row] = True
            return
        self.new[row].append(token)
        if self.on_token is not None:
            self.on_token(row, token)

    def _ended(self, row: int) -> bool:
        return self.finished[row] or len(self.new[row]) == self.num_tokens

    def _token_at(self, row: int, position: int) -> int:
        """Return a row's token at *position*; an arbitrary id if the row has ended."""
        prompt, new = self.rows[row], self.new[row]
        if position < len(prompt):
            return prompt[position]
        at = position - len(prompt)
        return new[at] if at < len(new) else 0
