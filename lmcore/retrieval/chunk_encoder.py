"""Encoders of chunks: ICT's, BERT's, and models of `sentence-transformers`.

The chunks of a database and the chunks that their neighbours are looked for get vectors that are
compared by the inner product (ICT, whose blocks and questions have an encoder each) or by the
distance.  Shapes: N texts, B batch, S tokens, H hidden, P channels of a vector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from lmcore.base.errors import CheckpointError, MissingPackageError
from lmcore.conversion.loading.checkpoint_tokenizer import NO_CHOICE
from lmcore.data.tokenizer.file_tokenizer import plain_batch
from lmcore.families.bert.model import Bert
from lmcore.families.ict.model import Biencoder
from lmcore.families.ict.samples import text_vocabulary
from lmcore.inference.fix_weights import fix_layers
from lmcore.model.family import family_of
from lmcore.retrieval.encoder import (
    TYPICAL_TOKENS,
    PaddedRows,
    TextEncoder,
    read_encoder,
    weights_fingerprint,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from lmcore.config.tokenizer import TokenizerSettings
    from lmcore.data.tokenizer import Tokenizer, TokenizerFactory
    from lmcore.inference.text_model import Execution
    from lmcore.model.shape import ModelShape
    from lmcore.runtime.runtime import Runtime

    Int64 = npt.NDArray[np.int64]
    Float32 = npt.NDArray[np.float32]

__all__ = [
    "ChunkEncoder",
    "IctChunks",
    "MeanOfStates",
    "SentenceModel",
    "load_chunk_encoder",
]

_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})
_MODULES = "modules.json"
"""File in the directory of every model of `sentence-transformers`."""


class ChunkEncoder(Protocol):
    """Encoder of texts to vectors.

    Attributes:
        size: P.
        inner_product: True if the nearest vector has the largest inner product; else the least
            distance.
        checkpoint: Directory that the user named.
    """

    size: int
    inner_product: bool
    checkpoint: Path

    def fingerprint(self) -> str:
        """Return a hash of everything that the vectors depend on."""

    def chunks(self, texts: Sequence[str], *, batch: int) -> Float32:
        """Return the vectors of chunks of a database, [N, P].

        Args:
            texts: Texts, cut at the encoder's most tokens.
            batch: Number of texts that are computed together.
        """

    def queries(self, texts: Sequence[str], *, batch: int) -> Float32:
        """Return the vectors of chunks whose neighbours are looked for, [N, P]; see `chunks`."""


class IctChunks:
    """Both encoders of a model of ICT: chunks are its blocks, and what is looked for its questions.

    Args:
        encoder: The encoders.
        longest: Most tokens of a text.
    """

    inner_product = True

    def __init__(self, encoder: TextEncoder, longest: int) -> None:
        self._encoder, self._longest = encoder, min(longest, encoder.longest)
        self.size, self.checkpoint = encoder.size, encoder.checkpoint

    def fingerprint(self) -> str:
        """Return a hash of weights, tokenizer and length."""
        return _hash(self._encoder.fingerprint(), self._longest)

    def chunks(self, texts: Sequence[str], *, batch: int) -> Float32:
        """Return the vectors of texts as blocks; see `ChunkEncoder`."""
        return self._encoder.blocks(self._rows(texts), batch=batch)

    def queries(self, texts: Sequence[str], *, batch: int) -> Float32:
        """Return the vectors of texts as questions; see `ChunkEncoder`."""
        return self._encoder.question_rows(self._rows(texts), batch=batch)

    def _rows(self, texts: Sequence[str]) -> list[Int64]:
        vocabulary = self._encoder.vocabulary
        special = vocabulary.cls, vocabulary.sep
        return _encoded(self._encoder.tokenizer, texts, special, self._longest)


class MeanOfStates:
    """Body of a BERT: a text's vector is the mean of the last hidden states of its tokens.

    [CLS], [SEP] and padding are left out of the mean; a text without tokens has zeros.

    Args:
        model: Model in evaluation mode.
        tokenizer: Its tokenizer.
        execution: Context of forward passes.
        checkpoint: Directory of its checkpoint.
        longest: Most tokens of a text.

    Source:
        Megatron-LM, `megatron/core/models/bert/bert_model.py`, `return_embeddings`.
    """

    inner_product = False

    def __init__(
        self,
        model: Bert,
        tokenizer: Tokenizer,
        execution: Execution,
        checkpoint: Path,
        longest: int,
    ) -> None:
        self._model, self._tokenizer, self._execution = model, tokenizer, execution
        self._weights = weights_fingerprint(tokenizer, model.named_parameters())
        self._vocabulary = text_vocabulary(tokenizer)
        self._longest = min(longest, model.shape.max_position_embeddings)
        self.checkpoint, self.size = checkpoint, model.shape.hidden_size

    def fingerprint(self) -> str:
        """Return a hash of weights, tokenizer and length."""
        return _hash(self._weights, self._longest)

    def chunks(self, texts: Sequence[str], *, batch: int) -> Float32:
        """Return the vectors of texts; see `ChunkEncoder`."""
        special = self._vocabulary.cls, self._vocabulary.sep
        rows = _encoded(self._tokenizer, texts, special, self._longest)
        padded = PaddedRows(self._vocabulary.pad, self._longest, self.size, batch)
        device = next(self._model.parameters()).device
        return padded.vectors(self._mean, rows, device, self._execution)

    queries = chunks

    def _mean(self, tokens_BS: Tensor, padding_BS: Tensor | None) -> Tensor:
        hidden_BSH = self._model.hidden(tokens_BS, padding_BS=padding_BS).float()
        counted_BS = (tokens_BS != self._vocabulary.cls) & (tokens_BS != self._vocabulary.sep)
        if padding_BS is not None:
            counted_BS &= ~padding_BS
        weight_BS = counted_BS.to(hidden_BSH.dtype)
        sum_BH = torch.einsum("bs,bsh->bh", weight_BS, hidden_BSH)
        return sum_BH / weight_BS.sum(dim=1, keepdim=True).clamp(min=1)


class SentenceModel:
    """Model of the package `sentence-transformers`, of a local directory.

    Args:
        directory: Its directory.
        device: Name of the device.
        longest: Most tokens of a text.

    Raises:
        MissingPackageError: The package is not installed.
        CheckpointError: The directory has no model that the package reads.
    """

    inner_product = False

    def __init__(self, directory: Path, device: str, longest: int) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingPackageError(
                "sentence-transformers",
                needed_for=f"the encoder `{directory}`",
                install="pip install sentence-transformers",
            ) from error
        try:
            self._model: Any = SentenceTransformer(
                str(directory), device=device, local_files_only=True
            )
        except Exception as error:
            raise CheckpointError(
                f"`sentence-transformers` cannot read `{directory}`",
                why=f"{type(error).__name__}: {error}",
            ) from error
        most = self._model.max_seq_length
        self._model.max_seq_length = longest if most is None else min(most, longest)
        # Renamed in version 5.
        size = getattr(self._model, "get_embedding_dimension", None)
        size = size or self._model.get_sentence_embedding_dimension
        self.checkpoint, self.size = directory, int(size())

    def fingerprint(self) -> str:
        """Return a hash of every file of the model, and of the length."""
        found = hashlib.blake2b(digest_size=16)
        for path in sorted(self.checkpoint.rglob("*")):
            if path.is_file():
                found.update(str(path.relative_to(self.checkpoint)).encode())
                with path.open("rb") as file:
                    found.update(hashlib.file_digest(file, "blake2b").digest())
        return _hash(found.hexdigest(), self._model.max_seq_length)

    def chunks(self, texts: Sequence[str], *, batch: int) -> Float32:
        """Return the vectors of texts; see `ChunkEncoder`."""
        found = self._model.encode(
            list(texts), batch_size=batch, convert_to_numpy=True, show_progress_bar=False
        )
        return np.ascontiguousarray(found, dtype=np.float32).reshape(-1, self.size)

    queries = chunks


def _hash(weights: str, longest: int) -> str:
    return hashlib.blake2b(f"{weights} {longest}".encode(), digest_size=16).hexdigest()


def _encoded(
    tokenizer: Tokenizer, texts: Sequence[str], special: tuple[int, int], longest: int
) -> list[Int64]:
    """Return the tokens of texts between [CLS] and [SEP], at most *longest*."""
    first, last = special
    return [
        np.array([first, *ids[: longest - 2], last], dtype=np.int64)
        for ids in plain_batch(tokenizer, texts)
    ]


def load_chunk_encoder(
    path: Path,
    runtime: Runtime,
    *,
    longest: int,
    choice: TokenizerSettings = NO_CHOICE,
    extra: Mapping[str, TokenizerFactory] = _NONE,
) -> ChunkEncoder:
    """Return an encoder of chunks.

    Args:
        path: Run or checkpoint of ICT or BERT, also of another program; or the directory of a model
            of `sentence-transformers`.
        runtime: Device, precision and kernels.
        longest: Most tokens of a text; an encoder may have fewer positions.
        choice: Tokenizer chosen by the user instead of the checkpoint's own.
        extra: Tokenizer types that plugins registered.

    Raises:
        MissingPackageError: It needs a package that is not installed.
        CheckpointError: There is no checkpoint, it is damaged, or its model is no encoder.
        ConfigError, DataError: The tokenizer is missing, or is not the run's.
    """
    if (path / _MODULES).is_file():
        return SentenceModel(path, str(runtime.device.torch_device), longest)

    def require(shape: ModelShape) -> None:
        name = f"{family_of(shape).name}{' task' if shape.task else ''}"
        if name not in {"BERT", "ICT"}:
            raise CheckpointError(
                f"the {name} model of `{path}` is no encoder of chunks",
                why="only models of the families BERT and ICT make vectors of texts",
                hint="give a run or checkpoint of one of them, or the directory of a model of "
                "`sentence-transformers`",
            )

    model, tokenizer, execution = read_encoder(path, runtime, require, choice=choice, extra=extra)
    found: ChunkEncoder
    if isinstance(model, Biencoder):
        found = IctChunks(TextEncoder(model, tokenizer, execution, path), longest)
    else:
        assert isinstance(model, Bert)
        found = MeanOfStates(model, tokenizer, execution, path, longest)
    fix_layers(model, runtime, TYPICAL_TOKENS)
    return found
