"""Model in a checkpoint of another program: shape and tokenizer, without torch.

`lmcore train` needs both before the processes of a run load torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.config.tokenizer import TokenizerSettings
from lmcore.conversion.checkpoint_step import foreign_checkpoint
from lmcore.conversion.huggingface.tokenizer_files import tokenizer_settings
from lmcore.conversion.loading.describe import describe_isolated
from lmcore.families.saved_shape import read_shape
from lmcore.model.checkpoint_format import format_of, formats, of_absent_plugin

if TYPE_CHECKING:
    from lmcore.model.shape import ModelShape

__all__ = ["ForeignModel", "describe_foreign"]


@dataclass(frozen=True)
class ForeignModel:
    """Model in a checkpoint of another program.

    Attributes:
        path: Directory of the checkpoint.
        format: Name of the format.
        shape: Shape of the model.
        vocab_size: Number of tokens without padding rows; None if it is not known.
        tokenizer, tokenizer_type: See `ModelState`.
        precision: Precision of its run; None if it is not recorded.
        notes: Differences between the checkpoint and the model of lmcore, for the user.
        iteration: Step of its optimizer's state; None without one.
    """

    path: Path
    format: str
    shape: ModelShape
    vocab_size: int | None
    tokenizer: TokenizerSettings | None = None
    tokenizer_type: str | None = None
    precision: str | None = None
    notes: tuple[str, ...] = ()
    iteration: int | None = None


def describe_foreign(directory: Path, step: str | None = None) -> ForeignModel | None:
    """Return the model in a checkpoint of another program; None if there is no such checkpoint.

    Args:
        directory: Directory that the program saved to, or one checkpoint in it.
        step: Step of the checkpoint, as in `--ckpt-step`; None: the newest.

    Raises:
        CheckpointError: It is damaged, of no such step, or lmcore does not have the model.
        ConfigError: The checkpoint has no steps.
    """
    if step is not None:
        directory = foreign_checkpoint(directory, step) or directory
    name = format_of(directory)
    if name is None and (problem := of_absent_plugin(directory)) is not None:
        raise problem
    if name is None or name == "lmcore":
        return None
    found = describe_isolated(directory, name)
    shape = read_shape(found["shape"], directory)
    described = found["tokenizer"]
    tokenizer = None if described is None else TokenizerSettings.described(described)
    if tokenizer is None:
        places = formats()[name].tokenizer_places(directory)
        tokenizer = next((one for one in map(tokenizer_settings, places) if one is not None), None)
    return ForeignModel(
        directory,
        name,
        shape,
        found["vocab_size"],
        tokenizer=tokenizer,
        tokenizer_type=found["tokenizer_type"],
        precision=found["precision"],
        notes=tuple(found["notes"]),
        iteration=found["iteration"],
    )
