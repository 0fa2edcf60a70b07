"""Model in a checkpoint of another program: shape and tokenizer, without torch.

`lmcore train` needs both before the processes of a run load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from lmcore.conversion.describe import describe_isolated
from lmcore.conversion.detect import format_of
from lmcore.conversion.huggingface.config import read_config
from lmcore.conversion.huggingface.tokenizer_files import tokenizer_settings
from lmcore.model.saved_shape import read_shape

if TYPE_CHECKING:
    from lmcore.config.tokenizer import TokenizerSettings
    from lmcore.model.shape import ModelShape

__all__ = ["ForeignModel", "describe_foreign"]


@dataclass(frozen=True)
class ForeignModel:
    """Model in a checkpoint of another program.

    Attributes:
        path: Directory of the checkpoint.
        format: Name of the format.
        shape: Shape of the model.
        tokenizer: Settings that build the tokenizer from the checkpoint's files; None without one.
        notes: Differences between the checkpoint and the model of lmcore, for the user.
    """

    path: Path
    format: str
    shape: ModelShape
    tokenizer: TokenizerSettings | None = None
    notes: tuple[str, ...] = ()


def _huggingface(directory: Path) -> ForeignModel:
    config = read_config(directory)
    tokenizer = tokenizer_settings(directory)
    return ForeignModel(directory, "huggingface", config.shape, tokenizer, config.notes)


def _megatron(directory: Path) -> ForeignModel:
    found = describe_isolated(directory, "megatron")
    shape = read_shape(found["shape"], directory)
    return ForeignModel(directory, "megatron", shape, notes=tuple(found["notes"]))


_DESCRIBE: Mapping[str, Callable[[Path], ForeignModel]] = MappingProxyType(
    {"huggingface": _huggingface, "megatron": _megatron}
)


def describe_foreign(directory: Path) -> ForeignModel | None:
    """Return the model in a checkpoint of another program; None if there is no such checkpoint.

    Raises:
        CheckpointError: It is damaged, or lmcore does not have the model.
    """
    describe = _DESCRIBE.get(format_of(directory) or "")
    return describe(directory) if describe is not None else None
