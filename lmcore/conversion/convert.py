"""Conversion of a checkpoint from one format to another, tensor by tensor.

Comparison of the logits of a few tokens by the model that was read and by the written one.

The reader of each format fills a model of the shape that it finds, which computes the tokens in
float32 by the core's own ops, on the CPU.  The tokens are from all of the vocabulary,
at positions from all of the context.  One model at a time is in memory.

Shapes: B batch, S sequence, V rows of the vocabulary.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.base.errors import CheckpointError, host_memory, several
from lmcore.contract import OP_SPECS, OpTable
from lmcore.conversion.formats import WriteOptions, read_state, write_state
from lmcore.conversion.loading.checkpoint_tokenizer import NO_CHOICE, tokenizer_of
from lmcore.conversion.native.continuing import continue_flags, continue_notes, longer_flag
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.new_directory import new_directory, require_absent
from lmcore.conversion.state import ModelState, lacks_optimizer, notes_beside, recorded_samples
from lmcore.families.build import create_model
from lmcore.families.op_binding import OpBinding
from lmcore.families.protocol import CausalLM, Model
from lmcore.model.checkpoint_format import formats
from lmcore.model.family import answers_prompts, family_of, fills_masks

if TYPE_CHECKING:
    from lmcore.config.tokenizer import TokenizerSettings
    from lmcore.conversion.state import ModelState
    from lmcore.data.tokenizer import TokenizerFactory
    from lmcore.model.checkpoint_format import CheckpointFormat
    from lmcore.model.shape import ModelShape


__all__ = [
    "Conversion",
    "compared_logits",
    "convert",
    "reason_not_to_compare",
]

logger = logging.getLogger(__name__)

_BOUNDS = ("1e-6", "1e-5")
"""Differences of logits relative to the largest one; beyond the last the models disagree.

Products of matrices with other numbers of rows may add their terms in another order.
"""
_MOST_TOKENS = 32
_MODELS = 2
"""Number of models that the available memory must have room for."""
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def reason_not_to_compare(state: ModelState) -> str | None:
    """Return why the logits of a model cannot be compared; None if they can.

    Args:
        state: State that was read.
    """
    family = family_of(state.shape)
    if state.shape.task or family.load_model().outputs is Model.outputs:
        return f"models of the kind {family.name} do not compute them for a comparison"
    elements = sum(math.prod(size) for size in state.parameters.values())
    needed, available = _MODELS * elements * torch.float32.itemsize, _available_memory()
    if needed <= available:
        return None
    return (
        f"the model needs {needed / 2**30:.1f} GiB of memory (twice in float32), and "
        f"{available / 2**30:.1f} GiB are available"
    )


def compared_logits(source: ModelState, target: ModelState) -> str:
    """Return the bound that the difference of the logits keeps, relative to the largest logit.

    The weights of *source* are rounded to the dtypes of *target* first.

    Args:
        source: State that was read.
        target: State that was written from it.

    Raises:
        CheckpointError: The logits differ, or *target* cannot be read.
    """
    rows = min(one.shape.padded_vocab_size for one in (source, target))
    rows = min(rows, source.vocab_size or rows)
    positions = min(one.shape.max_position_embeddings for one in (source, target))
    places_BS = _spread(positions, min(_MOST_TOKENS, positions))
    order = torch.randperm(places_BS.numel(), generator=torch.Generator().manual_seed(0))
    tokens_BS = _spread(rows, places_BS.numel())[:, order]
    known = target.parameters.keys()

    strange: list[str] = []

    def rounded(name: str) -> Tensor:
        tensor = source.read(name)
        if not bool(tensor.isfinite().all()):
            strange.append(name)
        return tensor.to(target.dtype(name)) if name in known else tensor

    all_expected = _outputs(source, rounded, tokens_BS, places_BS)
    if strange:
        logger.warning(
            "`%s` has weights that are NaN or infinite, in %s: they are written as they are",
            *(source.path, several(strange)),
        )
    all_found = _outputs(target, target.read, tokens_BS, places_BS)
    pairs = zip(all_expected, all_found, strict=True)
    most = max(_difference(one[..., :rows], other[..., :rows]) for one, other in pairs)
    for bound in _BOUNDS:
        if most <= float(bound):
            return bound
    raise CheckpointError(
        "the written model does not compute what the source does",
        why=f"its logits of {tokens_BS.numel()} tokens differ by up to {most:.1e} of the largest "
        f"one, in {source.format} and {target.format}; the result was removed",
        hint="report this as an error of lmcore, with the shape of the model; `--no-verify` keeps "
        "the result",
    )


def _spread(size: int, count: int) -> Tensor:
    """Return numbers from 0 to *size* - 1 at equal distances, [1, S]."""
    return torch.linspace(0, size - 1, count).long().unsqueeze(0)


def _difference(expected: Tensor, found: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest expected value."""
    largest = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 1.0
    same = (expected == found) | (expected.isnan() & found.isnan())
    difference = (expected - found).abs().masked_fill(same, 0.0).nan_to_num(math.inf)
    return float(difference.max()) / max(largest, torch.finfo(torch.float32).tiny)


@torch.no_grad()
def _outputs(
    state: ModelState, read: Callable[[str], Tensor], tokens_BS: Tensor, places_BS: Tensor
) -> Sequence[Tensor]:
    """Return the logits of all heads of a model with the weights of *state*."""
    with torch.device("meta"):
        model = create_model(state.shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    model.to_empty(device="cpu").eval()
    for name, parameter in model.named_parameters():
        parameter.copy_(read(name))
    return model.outputs(tokens_BS, places_BS)


def _available_memory() -> int:
    """Return the memory that can be used without swapping, in bytes."""
    found = host_memory() // 2
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMORY.read_text(), re.MULTILINE)
        found = int(match[1]) * 1024 if match else found
        limit = int((_GROUP / "memory.max").read_text())  # `max` without a limit
        return min(found, limit - int((_GROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        return found


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
        generates: True if the model continues a text.
        answers_prompts: True if a prompt is the input of the model's encoder; its tokenizer has
            sentinels.
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
    generates: bool
    answers_prompts: bool

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
        generates=_generates(state.shape),
        answers_prompts=answers_prompts(state.shape),
    )


def _generates(shape: ModelShape) -> bool:
    kind = family_of(shape).load_model()
    return not shape.task and isinstance(kind, type) and issubclass(kind, CausalLM) and kind.causal


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
