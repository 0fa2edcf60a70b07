"""Filling of masks by a model that predicts masked tokens: the most probable tokens of each.

Shapes: B texts, S tokens of the longest, M masks of the text with the most, V tokens.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from lmcore.base.errors import CheckpointError, ConfigError
from lmcore.conversion.loading.checkpoint_tokenizer import NO_CHOICE
from lmcore.data.tokenizer import special_ids
from lmcore.data.tokenizer.pretrained.special_text import special_encoder
from lmcore.families.build import create_model, op_binding
from lmcore.families.protocol import CausalLM, MaskedLM
from lmcore.inference.load import allocate, headed, open_checkpoint
from lmcore.inference.text_model import Execution
from lmcore.model.family import family_of

if TYPE_CHECKING:
    from lmcore.config.tokenizer import TokenizerSettings
    from lmcore.data.tokenizer import Tokenizer, TokenizerFactory
    from lmcore.model.shape import ModelShape
    from lmcore.runtime.runtime import Runtime

__all__ = ["Candidate", "FilledText", "MaskFiller", "load_filler"]

_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})


@dataclass(frozen=True)
class Candidate:
    """Token for a mask.

    Attributes:
        token: Spelling in the vocabulary; a piece that continues a word has its mark (`##`).
        id: Number of the token.
        probability: Probability among all tokens.
    """

    token: str
    id: int
    probability: float


@dataclass(frozen=True)
class FilledText:
    """Text with masks, and the most probable tokens for each.

    Attributes:
        text: The text.
        masks: Candidates of each mask, the most probable first.
    """

    text: str
    masks: tuple[tuple[Candidate, ...], ...]


class MaskFiller:
    """Model, with its tokenizer, that fills masks."""

    def __init__(self, model: MaskedLM, tokenizer: Tokenizer, execution: Execution) -> None:
        """Keep model and tokenizer.

        Args:
            model: Model in evaluation mode.
            tokenizer: Its tokenizer.
            execution: Context of forward passes.

        Raises:
            ConfigError: The tokenizer lacks a token of the samples that the model was trained on.
        """
        self._model, self._execution = model, execution
        special = special_ids(tokenizer)
        spellings = getattr(tokenizer, "spellings", None)
        if special.cls is None or special.sep is None or special.mask is None or not spellings:
            raise ConfigError(
                f"the tokenizer `{tokenizer.name}` has no masks to fill",
                why="it lacks a token that begins a text, ends it, or is a mask",
                hint="give the tokenizer that the model was trained with",
            )
        self._first, self._last, self._mask = special.cls, special.sep, special.mask
        self._pad = special.pad if special.pad is not None else self._last
        self._spellings: Sequence[str] = spellings
        self._encode = special_encoder(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with those around it.

        Raises:
            ConfigError: It has no mask, is too long or is not UTF-8.
        """
        try:
            ids = [self._first, *self._encode(text), self._last]
        except UnicodeEncodeError:
            raise ConfigError("the text is not UTF-8", hint="convert it") from None
        mask, most = self._spellings[self._mask], self._model.shape.max_position_embeddings
        if self._mask not in ids:
            raise ConfigError(
                f"the text has no `{mask}`",
                why=f"`{text:.60}` has nothing to fill",
                hint=f"write `{mask}` in the place of a word: 'The capital of {mask} is Paris.'",
            )
        if len(ids) > most:
            raise ConfigError(
                f"a text has {len(ids)} tokens, and the model {most} positions",
                why=f"it begins with `{text:.60}`",
                hint="give a shorter text",
            )
        return ids

    def fill(self, texts: Sequence[str], *, top_k: int, batch: int) -> Iterator[FilledText]:
        """Yield the candidates of each text, in order.

        Args:
            texts: Texts with masks.
            top_k: Number of candidates of a mask.
            batch: Number of texts that are computed together.

        Raises:
            ConfigError: See `encode`.
        """
        encoded = [self.encode(text) for text in texts]  # errors before the first result
        for start in range(0, len(texts), batch):
            part = slice(start, start + batch)
            found = self._candidates(encoded[part], top_k)
            for text, masks in zip(texts[part], found, strict=True):
                yield FilledText(text, masks)

    def _candidates(
        self, encoded: Sequence[list[int]], top_k: int
    ) -> list[tuple[tuple[Candidate, ...], ...]]:
        """Return the candidates of each mask of each text."""
        length = max(map(len, encoded))
        masks = [[at for at, one in enumerate(ids) if one == self._mask] for ids in encoded]
        most = max(map(len, masks))
        device = next(self._model.parameters()).device
        tokens_BS = torch.tensor([[*ids, *[self._pad] * (length - len(ids))] for ids in encoded])
        lengths_B = torch.tensor([len(ids) for ids in encoded])
        padding_BS = torch.arange(length) >= lengths_B[:, None]
        chosen_BM = torch.tensor([[*at, *[0] * (most - len(at))] for at in masks])
        with self._execution.passes():
            hidden_BSH = self._model.hidden(
                tokens_BS.to(device),
                padding_BS=padding_BS.to(device) if bool(padding_BS.any()) else None,
            )
            logits_BMV = self._model.masked_logits(hidden_BSH, chosen_BM.to(device))
        # Rows that pad the vocabulary are no tokens.
        known_BMV = logits_BMV.float().cpu()[..., : len(self._spellings)]
        best = known_BMV.softmax(-1).topk(min(top_k, known_BMV.shape[-1]))
        return [
            tuple(
                self._named(best.values[text, mask], best.indices[text, mask])
                for mask in range(len(places))
            )
            for text, places in enumerate(masks)
        ]

    def _named(self, values_K: torch.Tensor, ids_K: torch.Tensor) -> tuple[Candidate, ...]:
        pairs = zip(ids_K.tolist(), values_K.tolist(), strict=True)
        return tuple(Candidate(self._spellings[one], one, value) for one, value in pairs)


def load_filler(
    path: Path,
    runtime: Runtime,
    *,
    choice: TokenizerSettings = NO_CHOICE,
    extra: Mapping[str, TokenizerFactory] = _NONE,
    require: Callable[[ModelShape], None] | None = None,
    texts: Sequence[str] = (),
) -> MaskFiller:
    """Return the model of a checkpoint of any format, ready to fill masks.

    Args:
        path, runtime, choice, extra, require: See `load_model`.
        texts: Texts that are checked before the weights are read.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or its model fills no masks.
        ConfigError, DataError: The tokenizer is missing, is not the run's or lacks masks, or a text
            has no mask or is too long.
    """
    weights, tokenizer = open_checkpoint(path, choice, extra, require)
    shape = weights.state.shape
    with torch.device("meta"):
        model = create_model(shape, op_binding(runtime), masked=True)
    what = f"the {family_of(shape).name} model of `{path}` fills no masks"
    if shape.task:
        why, hint = headed(shape)
        raise CheckpointError(what, why=why, hint=hint)
    if not isinstance(model, MaskedLM):
        causal = isinstance(model, CausalLM) and model.causal
        command = f"lmcore generate --load {shlex.quote(str(path))} --prompt"
        raise CheckpointError(
            what,
            why="it predicts the next token from those before it"
            if causal
            else "its family does not predict the tokens in the place of masks",
            hint=f"continue a text: `{command} 'The capital of France is'`"
            if causal
            else "load a BERT to fill masks",
        )
    execution = Execution.on(runtime.device, runtime.precision.context)
    filler = MaskFiller(model.eval(), tokenizer, execution)
    for text in texts:
        filler.encode(text)
    allocate(model, runtime)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name))
    return filler
