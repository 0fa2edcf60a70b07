"""`TextEncoder`: the vectors of questions and blocks by a trained model, sorted by length.

Shapes: N texts, S tokens of the longest of a batch, P channels of a vector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lmcore.base.errors import CheckpointError, ConfigError
from lmcore.conversion.loading.checkpoint_tokenizer import NO_CHOICE
from lmcore.data.tokenizer.file_tokenizer import added_around, plain_ids
from lmcore.families.build import create_model, op_binding
from lmcore.families.ict.model import Biencoder
from lmcore.families.ict.samples import text_vocabulary
from lmcore.inference.fix_weights import fix_layers
from lmcore.inference.load import allocate, open_checkpoint
from lmcore.inference.text_model import Execution
from lmcore.model.family import family_of

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from lmcore.config.tokenizer import TokenizerSettings
    from lmcore.data.tokenizer import Tokenizer, TokenizerFactory
    from lmcore.families.protocol import Model
    from lmcore.model.shape import ModelShape
    from lmcore.runtime.runtime import Runtime

    Int64 = npt.NDArray[np.int64]
    Float32 = npt.NDArray[np.float32]

__all__ = [
    "TYPICAL_TOKENS",
    "PaddedRows",
    "TextEncoder",
    "load_encoder",
    "read_encoder",
    "weights_fingerprint",
]

_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})
TYPICAL_TOKENS = 4096
"""Tokens of a pass, for the choice of kernels."""
_STEP = 8
"""Tokens to whose multiples batches are padded, so that kernels see few sizes."""


class TextEncoder:
    """Model of two encoders, with its tokenizer.

    Attributes:
        tokenizer: Tokenizer of the model.
        checkpoint: Directory that the user named.
        longest: Most tokens of a text.
        size: P.
        shape: Shape of the model.
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
        self._fingerprint = weights_fingerprint(tokenizer, model.named_parameters())
        self.tokenizer, self.checkpoint = tokenizer, checkpoint
        self.vocabulary = text_vocabulary(tokenizer)
        self.shape = model.shape
        self.longest = model.shape.max_position_embeddings
        self.size: int = model.shape.own["biencoder_projection_dim"] or model.shape.hidden_size

    def fingerprint(self) -> str:
        """Return a hash of the weights of both encoders and of the tokenizer."""
        return self._fingerprint

    def questions(self, texts: Sequence[str], *, batch: int = 64) -> Float32:
        """Return the vectors of questions, [N, P].

        Args:
            texts: The questions; tokens beyond the model's positions are left out.
            batch: Number of texts that are computed together.

        Raises:
            ConfigError: A question is empty, or no text.
        """
        return self.question_rows([self._question(text) for text in texts], batch=batch)

    def question_rows(self, rows: Sequence[Int64], *, batch: int) -> Float32:
        """Return the vectors of questions, [N, P]; for the arguments see `blocks`."""
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
            ids = plain_ids(self.tokenizer, text)
        except UnicodeEncodeError:
            raise ConfigError("a question is not UTF-8", hint="convert it") from None
        ids = [self.vocabulary.cls, *ids[: self.longest - 2], self.vocabulary.sep]
        return np.array(ids, dtype=np.int64)

    def _vectors(self, encode: Callable[..., Tensor], rows: Sequence[Int64], batch: int) -> Float32:
        padded = PaddedRows(self.vocabulary.pad, self.longest, self.size, batch)
        return padded.vectors(encode, rows, next(self._model.parameters()).device, self._execution)


class PaddedRows(NamedTuple):
    """Computation of the vectors of texts of any length, which batches divide sorted by length.

    Attributes:
        pad: Token that fills short rows.
        longest: Most tokens of a row.
        size: P.
        batch: Number of texts that are computed together.
    """

    pad: int
    longest: int
    size: int
    batch: int

    def vectors(
        self,
        encode: Callable[..., Tensor],
        rows: Sequence[Int64],
        device: torch.device,
        execution: Execution,
    ) -> Float32:
        """Return the vectors of rows of tokens, [N, P], in their order.

        Args:
            encode: Function from tokens [B, S] and their padding, True or None, to [B, P].
            rows: Token ids of each text.
            device: Device of the model.
            execution: Context of forward passes.
        """
        found = np.empty((len(rows), self.size), dtype=np.float32)
        lengths = np.array([len(row) for row in rows])
        # The longest first: if memory is short, that is known at once.
        order = np.argsort(-lengths, kind="stable")
        for start in range(0, len(rows), self.batch):
            chosen = order[start : start + self.batch]
            length = min(-(-int(lengths[chosen].max()) // _STEP) * _STEP, self.longest)
            tokens = np.full((len(chosen), length), self.pad, dtype=np.int64)
            for place, number in enumerate(chosen):
                tokens[place, : lengths[number]] = rows[number]
            padding = np.arange(length)[None, :] >= lengths[chosen][:, None]
            with execution.passes():
                vectors = encode(
                    torch.from_numpy(tokens).to(device),
                    torch.from_numpy(padding).to(device) if padding.any() else None,
                )
            found[chosen] = vectors.float().cpu().numpy()
            execution.step_boundary()
        return found


def weights_fingerprint(tokenizer: Tokenizer, parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of a tokenizer and of weights by name."""
    found = hashlib.blake2b(tokenizer.fingerprint().encode(), digest_size=16)
    if any(added_around(tokenizer)):
        found.update(b"plain")  # earlier vectors were of texts with what is put around
    for name, parameter in parameters:
        found.update(name.encode())
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


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

    def require(shape: ModelShape) -> None:
        if (name := family_of(shape).name) != "ICT":
            raise CheckpointError(
                f"the {name} model of `{path}` has no vectors of questions and blocks",
                why="only models of the family ICT are trained to find a text by a question",
                hint="train one: `lmcore train --model-family ict --data-path PREFIX`, with "
                "`--bert-load` to begin with the weights of a BERT",
            )

    model, tokenizer, execution = read_encoder(path, runtime, require, choice=choice, extra=extra)
    assert isinstance(model, Biencoder)
    encoder = TextEncoder(model, tokenizer, execution, path)
    fix_layers(model, runtime, TYPICAL_TOKENS)
    return encoder


def read_encoder(
    path: Path,
    runtime: Runtime,
    require: Callable[[ModelShape], None],
    *,
    choice: TokenizerSettings = NO_CHOICE,
    extra: Mapping[str, TokenizerFactory] = _NONE,
) -> tuple[Model, Tokenizer, Execution]:
    """Return the model of a checkpoint in evaluation mode, its tokenizer and its context.

    Args:
        path: Run directory, its `checkpoints`, one `iter_XXXXXXX`, or another program's checkpoint.
        runtime: Device, precision and kernels.
        require: Check of the model's shape, which raises an error, before weights are read.
        choice: Tokenizer chosen by the user instead of the checkpoint's own.
        extra: Tokenizer types that plugins registered.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or its model is refused.
        ConfigError, DataError: The tokenizer is missing, or is not the run's.
    """
    weights, tokenizer = open_checkpoint(path, choice, extra, require)
    with torch.device("meta"):
        model = create_model(weights.state.shape, op_binding(runtime), masked=True)
    allocate(model, runtime)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name))
    return model.eval(), tokenizer, Execution.on(runtime.device, runtime.precision.context)
