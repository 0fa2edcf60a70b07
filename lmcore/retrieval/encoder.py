"""`TextEncoder`: the vectors of questions and blocks by a trained model, sorted by length.

Shapes: N texts, S tokens of the longest of a batch, P channels of a vector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch

from lmcore.base.errors import CheckpointError, ConfigError
from lmcore.conversion.loading.checkpoint_tokenizer import NO_CHOICE
from lmcore.families.build import create_model, op_binding
from lmcore.families.ict.model import Biencoder
from lmcore.families.ict.samples import text_vocabulary
from lmcore.generation.load import allocate, open_checkpoint
from lmcore.generation.text_model import Execution
from lmcore.model.family import family_of

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from lmcore.config.tokenizer import TokenizerSettings
    from lmcore.data.tokenizer import Tokenizer, TokenizerFactory
    from lmcore.runtime.runtime import Runtime

    Int64 = npt.NDArray[np.int64]
    Float32 = npt.NDArray[np.float32]

__all__ = ["TextEncoder", "load_encoder"]

_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})
_STEP = 8
"""Tokens to whose multiples batches are padded, so that kernels see few sizes."""


class TextEncoder:
    """Model of two encoders, with its tokenizer.

    Attributes:
        tokenizer: Tokenizer of the model.
        checkpoint: Directory that the user named.
        longest: Most tokens of a text.
        size: P.
    """

    def __init__(
        self, model: Biencoder, tokenizer: Tokenizer, execution: Execution, checkpoint: Path
    ) -> None:
        """Keep model and tokenizer.

        Args:
            model: Model in evaluation mode.
            tokenizer: Its tokenizer.
            execution: Context of forward passes.
            checkpoint: Directory of its checkpoint.

        Raises:
            ConfigError: The tokenizer lacks a special token.
        """
        self._model, self._execution = model, execution
        self.tokenizer, self.checkpoint = tokenizer, checkpoint
        self.vocabulary = text_vocabulary(tokenizer)
        self.longest = model.shape.max_position_embeddings
        self.size: int = model.shape.own["biencoder_projection_dim"] or model.shape.hidden_size

    def fingerprint(self) -> str:
        """Return a hash of the weights of both encoders and of the tokenizer."""
        found = hashlib.blake2b(self.tokenizer.fingerprint().encode(), digest_size=16)
        for name, parameter in self._model.named_parameters():
            found.update(name.encode())
            found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return found.hexdigest()

    def questions(self, texts: Sequence[str], *, batch: int = 64) -> Float32:
        """Return the vectors of questions, [N, P].

        Args:
            texts: The questions; tokens beyond the model's positions are left out.
            batch: Number of texts that are computed together.

        Raises:
            ConfigError: A question is empty, or no text.
        """
        rows = [self._question(text) for text in texts]
        return self._vectors(self._model.query_vectors, rows, batch)

    def blocks(self, rows: Sequence[Int64], *, batch: int) -> Float32:
        """Return the vectors of blocks, [N, P].

        Args:
            rows: Token ids of each block with its special tokens, without padding.
            batch: Number of blocks that are computed together.
        """
        return self._vectors(self._model.block_vectors, rows, batch)

    def _question(self, text: str) -> Int64:
        if not text.strip():
            raise ConfigError("a question is empty", hint="write a text with a word in it")
        try:
            ids = self.tokenizer.encode(text)
        except UnicodeEncodeError:
            raise ConfigError("a question is not UTF-8", hint="convert it") from None
        ids = [self.vocabulary.cls, *ids[: self.longest - 2], self.vocabulary.sep]
        return np.array(ids, dtype=np.int64)

    def _vectors(self, encode: Callable[..., Tensor], rows: Sequence[Int64], batch: int) -> Float32:
        found = np.empty((len(rows), self.size), dtype=np.float32)
        lengths = np.array([len(row) for row in rows])
        device = next(self._model.parameters()).device
        # The longest first: if memory is short, that is known at once.
        order = np.argsort(-lengths, kind="stable")
        for start in range(0, len(rows), batch):
            chosen = order[start : start + batch]
            length = min(-(-int(lengths[chosen].max()) // _STEP) * _STEP, self.longest)
            tokens = np.full((len(chosen), length), self.vocabulary.pad, dtype=np.int64)
            for place, number in enumerate(chosen):
                tokens[place, : lengths[number]] = rows[number]
            padding = np.arange(length)[None, :] >= lengths[chosen][:, None]
            with self._execution.passes():
                vectors = encode(
                    torch.from_numpy(tokens).to(device),
                    torch.from_numpy(padding).to(device) if padding.any() else None,
                )
            found[chosen] = vectors.float().cpu().numpy()
            self._execution.step_boundary()
        return found


def load_encoder(
    path: Path,
    runtime: Runtime,
    *,
    choice: TokenizerSettings = NO_CHOICE,
    extra: Mapping[str, TokenizerFactory] = _NONE,
) -> TextEncoder:
    """Return the encoders of a checkpoint.

    Args:
        path: Run directory, its `checkpoints`, or one `iter_XXXXXXX`.
        runtime: Device, precision and kernels.
        choice: Tokenizer chosen by the user instead of the checkpoint's own.
        extra: Tokenizer types that plugins registered.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or its model has no encoders.
        ConfigError, DataError: The tokenizer is missing, or is not the run's.
    """
    weights, tokenizer = open_checkpoint(path, choice, extra, None)
    shape = weights.state.shape
    with torch.device("meta"):
        model = create_model(shape, op_binding(runtime), masked=True)
    if not isinstance(model, Biencoder):
        raise CheckpointError(
            f"the {family_of(shape).name} model of `{path}` has no vectors of questions and blocks",
            why="only models of the family ICT are trained to find a text by a question",
            hint="train one: `lmcore train --model-family ict --data-path PREFIX`, with "
            "`--bert-load` to begin with the weights of a BERT",
        )
    allocate(model, runtime)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name))
    execution = Execution.on(runtime.device, runtime.precision.context)
    return TextEncoder(model.eval(), tokenizer, execution, path)
