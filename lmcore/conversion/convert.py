"""Conversion of a checkpoint from one format to another, tensor by tensor."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from lmcore.conversion.formats import WriteOptions, read_state, write_state
from lmcore.conversion.loading.checkpoint_tokenizer import NO_CHOICE, tokenizer_of
from lmcore.conversion.logits import compared_logits, reason_not_to_compare
from lmcore.conversion.native.continuing import continue_flags, continue_notes, longer_flag
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.new_directory import new_directory, require_absent
from lmcore.conversion.state import lacks_optimizer, notes_beside, recorded_samples
from lmcore.model.checkpoint_format import formats
from lmcore.model.family import fills_masks

if TYPE_CHECKING:
    from lmcore.config.tokenizer import TokenizerSettings
    from lmcore.conversion.state import ModelState
    from lmcore.data.tokenizer import TokenizerFactory
    from lmcore.model.checkpoint_format import CheckpointFormat

__all__ = ["Conversion", "convert"]

_LEFT_OUT = "the optimizer's state, if there is any, was left out: `--weights-only`"
_RUN_LEFT_OUT = (
    "sample order, random states and `config.yaml` of the run are left out: a copy of its "
    "directory keeps them"
)
_ABSENT = "the checkpoint has no optimizer state: its weights alone are written"
_NOT_COUNTED = "the checkpoint does not record how many samples the run consumed: 0 is written"
_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion.

    Attributes:
        source: Title of the format that was read.
        target: Title of the format that was written.
        directory: Directory that was written.
        num_parameters: Number of parameters.
        optimizer: True if the optimizer's state was written, too.
        step: Number of steps of the run that wrote the source; None if it is not recorded.
        consumed_samples: Number of samples that this run saw in training; None if not recorded.
        continue_flags: Flags that `lmcore train --continue` of the written run needs.
        longer_flag: Flag that makes the run longer, if all its steps are done; None otherwise.
        tokenizer_type: Type of the tokenizer that the source names, if its files are not known;
            None otherwise.
        size: Size of the written files in bytes.
        seconds: Duration of the conversion, without the comparison of the logits.
        agreement: Bound of the difference of the logits, relative to the largest one; None if
            they were not compared.
        not_compared: Reason for which they were not compared; None if they were, or if the user
            chose so.
        notes: Notes for the user about differences between the two.
        fills_masks: True if the model predicts tokens in the place of masks, and continues no text.
    """

    source: str
    target: str
    directory: Path
    num_parameters: int
    optimizer: bool
    step: int | None
    consumed_samples: int | None
    continue_flags: Sequence[str]
    longer_flag: str | None
    tokenizer_type: str | None
    size: int
    seconds: float
    agreement: str | None
    not_compared: str | None
    notes: Sequence[str]
    fills_masks: bool

    def to_json(self) -> dict[str, Any]:
        """Return the values for JSON."""
        lists = {"continue_flags": list(self.continue_flags), "notes": list(self.notes)}
        return {**vars(self), "directory": str(self.directory), **lists}


def convert(
    source: Path,
    target: Path,
    to: str,
    *,
    source_format: str | None = None,
    weights_only: bool = False,
    options: WriteOptions | None = None,
    choice: TokenizerSettings = NO_CHOICE,
    extra: Mapping[str, TokenizerFactory] = _NONE,
    verify: bool = True,
) -> Conversion:
    """Write the checkpoint in *source* to the new directory *target* in another format.

    At most two tensors at a time are in memory, and one model, in float32, for the comparison.
    *target* appears when it is complete.

    Args:
        source: Directory of a checkpoint of any format.
        target: Directory that does not exist yet, or is empty.
        to: Name of the format to write.
        source_format: Name of the format to read; None: recognized by its files.
        weights_only: True to leave the optimizer's state out.
        options: Settings of the written checkpoint; None: the defaults.
        choice: Tokenizer chosen by the user instead of the checkpoint's own.
        extra: Tokenizer types that plugins registered.
        verify: True to compare the logits of a few tokens by both models, if memory has room for
            two of them.

    Raises:
        CheckpointError: *source* is damaged or has no counterpart in the other format, *target*
            exists, the disk is full or refuses, or the logits differ; nothing was written.
        ConfigError, DataError: The tokenizer is not the checkpoint's, or its files are invalid.
    """
    begin = time.perf_counter()
    options = options or WriteOptions()
    require_absent(target)
    state = read_state(source, source_format, weights_only=weights_only)
    tokenizer = tokenizer_of(state, choice, extra)
    if state.vocab_size is None and tokenizer is not None:
        state.vocab_size = tokenizer.vocab_size
    written = formats()[to]
    left_out = [_LEFT_OUT] if weights_only else []
    left_out += _training_notes(state, written)
    flags = continue_flags(state) if to == "lmcore" else {}
    with new_directory(target, _least_bytes(state, to, options)) as directory:
        notes = write_state(written, state, directory, tokenizer, options)
        size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        seconds = time.perf_counter() - begin
        not_compared = reason_not_to_compare(state) if verify else None
        compare = verify and not_compared is None
        agreement = compared_logits(state, read_state(directory, to)) if compare else None
    return Conversion(
        source=state.format,
        target=written.title,
        directory=target,
        num_parameters=sum(math.prod(shape) for shape in state.parameters.values()),
        optimizer=len(state.kinds) > 1 and written.optimizer,
        step=state.progress.iteration if state.progress is not None else None,
        consumed_samples=recorded_samples(state),
        continue_flags=tuple(flags),
        longer_flag=longer_flag(state) if to == "lmcore" else None,
        tokenizer_type=state.tokenizer_type if tokenizer is None else None,
        size=size,
        seconds=seconds,
        agreement=agreement,
        not_compared=not_compared,
        notes=[*notes_beside(state.notes, tokenizer), *left_out, *notes],
        fills_masks=fills_masks(state.shape),
    )


def _training_notes(state: ModelState, written: CheckpointFormat) -> list[str]:
    """Return the notes that matter to a run which continues the written checkpoint."""
    if not written.optimizer:
        return []
    notes = list(state.training_notes)
    if lacks_optimizer(state):
        notes.append(_ABSENT)
    own = written.name == "lmcore"
    if state.progress is not None and recorded_samples(state) is None:
        first = ", and a run that continues begins with its first" if own else ""
        notes.append(_NOT_COUNTED + first)
    if own and isinstance(state, LmcoreState):
        notes.append(_RUN_LEFT_OUT)
    return [*notes, *continue_notes(state)] if own else notes


def _least_bytes(state: ModelState, to: str, options: WriteOptions) -> int:
    """Return the size of the weights, and of the optimizer's state in float32 if it is written."""
    elements = sum(math.prod(shape) for shape in state.parameters.values())
    moments = len(state.kinds) - 1 if formats()[to].optimizer else 0
    return elements * (options.dtype.itemsize + moments * torch.float32.itemsize)
