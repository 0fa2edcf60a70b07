"""`lmcore data train-tokenizer`: a vocabulary from text, ready for `--tokenizer-type`.

Reads a sample of bounded size, trains, and tests the tokenizer of the written files.  The output
directory is renamed into place at the end.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lmcore.base.durable import atomic_directory
from lmcore.base.errors import ConfigError, suggestion
from lmcore.config.tokenizer import BUILT_IN_TYPES, TokenizerSettings
from lmcore.data.indexed.files import disk_errors
from lmcore.data.tokenizer import Tokenizer, tokenizer_from
from lmcore_data_tools.tokenizer_training.text_sample import ReadProgress, TextSample, read_sample
from lmcore_data_tools.tokenizer_training.trainers import KINDS, Kind, Recipe, require_room

__all__ = ["TrainingReport", "TrainingRequest", "train_tokenizer"]

_TRIED_LINES = 10_000
_SPECIAL = re.compile(r"<\S+>|\[\S+\]")


@dataclass(frozen=True)
class TrainingRequest:
    """Input, output and settings of the training.

    Attributes:
        inputs: files, patterns, directories, or `-` for standard input.
        output_dir: directory of the new files; it must not exist, or be empty.
        tokenizer_type: key of `lmcore_data_tools.tokenizer_training.trainers.KINDS`.
        recipe: training settings.
        json_keys: keys or columns whose text is read.
        sample_bytes: size limit of the training text, in bytes; None: by the type.
        on_error: stop at a document that cannot be used, or skip it.
        input_format: one of `lmcore.data.input.files.FORMATS`, or `auto`.
    """

    inputs: tuple[str, ...]
    output_dir: str
    tokenizer_type: str
    recipe: Recipe
    json_keys: tuple[str, ...] = ("text",)
    sample_bytes: int | None = None
    on_error: Literal["stop", "skip"] = "stop"
    input_format: str = "auto"


@dataclass(frozen=True)
class TrainingReport:
    """Result of the training.

    Attributes:
        tokenizer: its settings: `TokenizerSettings.describe()`.
        vocab_size: number of ids; a type may add some to the trained ones.
        eod: end-of-document id.
        documents: number of documents read.
        bytes: size of their text, in bytes.
        trained_bytes: size of the training text, in bytes.
        bytes_per_token: mean size of a token, over a sample of the training text.
        skipped: number of skipped documents by reason.
        read_seconds: time of reading.
        train_seconds: time of training.
    """

    tokenizer: Mapping[str, str | int | None]
    vocab_size: int
    eod: int | None
    documents: int
    bytes: int
    trained_bytes: int
    bytes_per_token: float
    skipped: Mapping[str, int] = field(default_factory=dict)
    read_seconds: float = 0.0
    train_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return dataclasses.asdict(self)


def train_tokenizer(
    request: TrainingRequest,
    *,
    reading: Callable[[ReadProgress], None] | None = None,
    training: Callable[[TextSample], None] | None = None,
) -> TrainingReport:
    """Train a tokenizer and write its files.

    Args:
        request: input, output and settings.
        reading: called while text is read.
        training: called after reading, before training.

    Raises:
        ConfigError: an unknown type, an option that it does not take, or a directory in use.
        DataError: input that cannot be used, too little text, or a full disk.
    """
    kind = _kind(request)
    directory = Path(request.output_dir)
    _require_free(directory)
    started = time.monotonic()
    limit = kind.sample_bytes if request.sample_bytes is None else request.sample_bytes
    sample = read_sample(
        request.inputs,
        keys=request.json_keys,
        limit=limit,
        on_error=request.on_error,
        input_format=request.input_format,
        progress=reading,
    )
    read = time.monotonic()
    if training is not None:
        training(sample)
    with disk_errors(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with atomic_directory(directory.absolute()) as temporary:  # for the name of `.`
            kind.train(sample.lines, request.recipe, temporary)
            tried = _bytes_per_token(
                tokenizer_from(_settings(request, kind, temporary)), sample.lines
            )
    built = tokenizer_from(_settings(request, kind, directory))
    return TrainingReport(
        tokenizer=_settings(request, kind, directory).describe(),
        vocab_size=built.vocab_size,
        eod=built.eod,
        documents=sample.documents,
        bytes=sample.bytes,
        trained_bytes=sample.kept_bytes,
        bytes_per_token=round(tried, 3),
        skipped=dict(sample.skipped),
        read_seconds=round(read - started, 3),
        train_seconds=round(time.monotonic() - read, 3),
    )


def _kind(request: TrainingRequest) -> Kind:
    kind = KINDS.get(request.tokenizer_type)
    if kind is None:
        built_in = request.tokenizer_type in BUILT_IN_TYPES  # not misspelt
        raise ConfigError(
            f"`--tokenizer-type {request.tokenizer_type}` cannot be trained",
            why="it is read from files, or has none" if built_in else None,
            hint=f"trainable: {', '.join(f'`{name}`' for name in sorted(KINDS))}"
            if built_in
            else suggestion(request.tokenizer_type, KINDS),
        )
    for name in ("special_tokens", "min_frequency", "model_type", "character_coverage"):
        if getattr(request.recipe, name) and name not in kind.takes:
            flags = ", ".join(f"`--{option.replace('_', '-')}`" for option in kind.takes)
            raise ConfigError(
                f"`--{name.replace('_', '-')}` cannot be combined with `--tokenizer-type "
                f"{request.tokenizer_type}`",
                why=f"it takes {flags}",
            )
    for token in request.recipe.special_tokens:
        if not _SPECIAL.fullmatch(token):
            raise ConfigError(
                f"`--special-tokens {token}`: not a special token",
                why="it must differ from pieces of words",
                hint="use angle or square brackets without spaces, such as `<|user|>`",
            )
    require_room(kind, request.recipe)
    return kind


def _require_free(directory: Path) -> None:
    if directory.exists() and directory.samefile("."):
        raise ConfigError(
            f"`--output-dir {directory}` is the working directory",
            why="the new directory would replace it",
            hint="name a directory below it",
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            f"`--output-dir {directory}` exists already",
            why="a tokenizer that data was prepared with must not change",
            hint="give a new directory",
        )


def _settings(request: TrainingRequest, kind: Kind, directory: Path) -> TokenizerSettings:
    paths: dict[str, Any] = {option: str(directory / name) for option, name in kind.files.items()}
    return TokenizerSettings(request.tokenizer_type, **paths)


def _bytes_per_token(tokenizer: Tokenizer, lines: Sequence[str]) -> float:
    """Return the mean size of a token, over evenly spaced lines."""
    some = lines[:: max(1, len(lines) // _TRIED_LINES)]
    tokens = sum(len(ids) for ids in tokenizer.encode_batch(some))
    return sum(len(line.encode()) for line in some) / max(tokens, 1)
