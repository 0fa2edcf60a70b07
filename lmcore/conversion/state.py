"""`ModelState`: content of a checkpoint of any format, read tensor by tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import CheckpointError, ConfigError
from lmcore.config.section import run_options
from lmcore.model.family import parameter_shapes
from lmcore.model.shape import ModelShape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lmcore.config.tokenizer import TokenizerSettings
    from lmcore.data.tokenizer import Tokenizer

__all__ = [
    "ADAM",
    "KEPT_OPTIONS",
    "LEFT_OUT",
    "TRAINING_OPTIONS",
    "WEIGHT",
    "ModelState",
    "OptimizerStateError",
    "Progress",
    "TokenizerNote",
    "known_settings",
    "lacks_optimizer",
    "notes_beside",
    "recorded_samples",
    "require_no_problems",
]

WEIGHT = "weight"
"""Kind of tensor: the weights, in the highest precision that the checkpoint has."""
ADAM = ("exp_avg", "exp_avg_sq")
"""Kinds of tensor: the state of Adam, with the shape of the weights."""
LEFT_OUT = "`--weights-only` leaves it out"
"""Value of `ModelState.without_adam` if the user chose to leave the state out."""
_SHOWN = 10
"""Number of problems that an error lists, at most."""

TRAINING_OPTIONS = (
    *("seq_length", "micro_batch_size", "global_batch_size", "rampup_batch_size"),
    "step_batch_size_schedule",
    *("train_iters", "train_samples"),
    *("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples"),
    *("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "clip_grad"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "seed", "split"),
    *("eval_interval", "eval_iters", "calculate_per_token_loss"),
    "include_padding_in_loss",
)
"""Options of training in `ModelState.settings`, which have the names of arguments of Megatron."""
KEPT_OPTIONS = (
    *(*TRAINING_OPTIONS, "precision"),
    *("loss_scale_window", "hysteresis", "min_loss_scale"),
)
"""All options in `ModelState.settings`."""


@dataclass(frozen=True)
class Progress:
    """Position of the run that wrote a checkpoint.

    Attributes:
        iteration: Number of steps done.
        consumed_samples: Number of samples seen in training.
        optimizer_step: Number of updates by the optimizer; None without its state.
        schedule: Learning-rate schedule, with the fields of
            `lmcore.optim.schedule.LearningRateSchedule`; None if it is not known.
        adam: Settings of Adam: `beta1`, `beta2`, `eps` and `weight_decay`; None if not known.
        scheduled_samples: Position in the schedule, which skipped updates do not move; None if it
            is not known.
        loss_scale: State of `lmcore.optim.loss_scale.DynamicLossScale`; None without one.
    """

    iteration: int
    consumed_samples: int
    optimizer_step: int | None = None
    schedule: Mapping[str, float | str] | None = None
    adam: Mapping[str, float] | None = None
    scheduled_samples: int | None = None
    loss_scale: Mapping[str, float] | None = None

    @property
    def position(self) -> int:
        """Position in the schedule, in samples; the consumed samples if it is not known."""
        known = self.scheduled_samples
        return self.consumed_samples if known is None else known


class TokenizerNote(str):
    """Note about the tokenizer of a checkpoint that names it and does not have its files."""

    __slots__ = ()


def notes_beside(notes: Sequence[str], tokenizer: Tokenizer | None) -> list[str]:
    """Return the notes of a checkpoint without the note that a given tokenizer makes obsolete.

    Args:
        notes: Notes of the checkpoint.
        tokenizer: Tokenizer of the model; None without one.
    """
    return [note for note in notes if tokenizer is None or not isinstance(note, TokenizerNote)]


def known_settings(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a run that lmcore's options take, converted to their types.

    Args:
        values: Values of a file by name.
        names: Names of options.
    """
    options, found = run_options(), {}
    for name in names:
        value = values.get(name)
        several = isinstance(value, list | tuple) and bool(value) and options[name].repeated
        if type(value) not in {bool, int, float, str} and not several:
            continue
        try:
            found[name] = options[name].convert(value, where=name)
        except ConfigError:
            continue  # a value that lmcore does not have
    return found


def lacks_optimizer(state: ModelState) -> bool:
    """Return True if a checkpoint of a run has no state of an optimizer, read or not.

    It is False for weights alone, such as a model of Hugging Face, which need none.

    Args:
        state: State of the checkpoint.
    """
    return len(state.kinds) == 1 and state.without_adam is None and state.progress is not None


def recorded_samples(state: ModelState) -> int | None:
    """Return the number of samples that a run saw in training; None if it is not recorded.

    Args:
        state: State of the checkpoint.
    """
    progress = state.progress
    if progress is None or (progress.iteration and not progress.consumed_samples):
        return None
    return progress.consumed_samples


class OptimizerStateError(CheckpointError):
    """State of an optimizer that does not fit the model beside it, or is not complete.

    The files with the model's own weights are complete and intact, so that these can be read.
    """


def require_no_problems(
    checkpoint: Path,
    problems: Sequence[str],
    *,
    description: str = "its arguments",
    hint: str = "copy all of its files again",
    error: type[CheckpointError] = CheckpointError,
) -> None:
    """Raise a `CheckpointError` that lists the first of *problems*, if there are any.

    Args:
        checkpoint: Directory of the checkpoint.
        problems: Sentences about single tensors.
        description: Name of the part of the checkpoint that describes the tensors.
        hint: Hint of the error.
        error: Class of the error.
    """
    if not problems:
        return
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    raise error(
        f"the tensors of `{checkpoint}` do not fit {description}",
        why="\n".join([*problems[:_SHOWN], *more]),
        hint=hint,
    )


class ModelState(ABC):
    """Weights of one model, and optimizer state if there is any, read tensor by tensor.

    Attributes:
        format: Name of the format, for messages.
        path: Directory of the checkpoint.
        shape: Shape of the model.
        vocab_size: Number of tokens without padding rows; None if it is not known.
        kinds: Kinds of tensors of each parameter: `WEIGHT`, and with the optimizer's state `ADAM`.
        progress: Position of its run; None if the format has none.
        tokenizer: Settings that build the tokenizer, with the checkpoint's files if it needs any;
            None without one.
        tokenizer_type: Type of the tokenizer in the arguments of another program's run, which
            have its name and not its files; None if they have none.
        settings: Settings of its run by the names of lmcore's options, without the shape.
        precision: Precision of another program's run by lmcore's name; None if it is not recorded.
        layout: Sizes of the parallel axes of another program's run, by the names of
            `ParallelLayout`; empty if they are not recorded.
        notes: Differences between the checkpoint and the model of lmcore, for the user.
        training_notes: Differences in training that only a run that continues has.
        without_adam: Reason for which a state of an optimizer is not read, as text that follows a
            name; None if it is read, or if there is none.
        part: Words about `files` where these are a part of `path`, with `{}` for their directory.
    """

    format: str
    path: Path
    shape: ModelShape
    vocab_size: int | None = None
    kinds: Sequence[str] = (WEIGHT,)
    progress: Progress | None = None
    tokenizer: TokenizerSettings | None = None
    tokenizer_type: str | None = None
    settings: Mapping[str, Any] = MappingProxyType({})
    precision: str | None = None
    layout: Mapping[str, int] = MappingProxyType({})
    notes: Sequence[str] = ()
    training_notes: Sequence[str] = ()
    without_adam: str | None = None
    part: str = "the newest checkpoint, `{}`"

    @property
    def files(self) -> Path:
        """Directory of the files that are read."""
        return self.path

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter by its name in lmcore."""
        return parameter_shapes(self.shape)

    def leave_optimizer_out(self) -> None:
        """Have weights alone."""
        self.kinds, self.without_adam = (WEIGHT,), LEFT_OUT
        if self.progress is not None:
            self.progress = replace(self.progress, optimizer_step=None, adam=None, loss_scale=None)

    @abstractmethod
    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        """Return the dtype in which a tensor is stored.

        Args:
            name: Name of the parameter in lmcore.
            kind: Kind of tensor, one of `kinds`.
        """

    @abstractmethod
    def read(self, name: str, kind: str = WEIGHT) -> Tensor:
        """Return a whole tensor, on the CPU, in the dtype of `dtype` and the parameter's shape.

        Args:
            name: Name of the parameter in lmcore.
            kind: Kind of tensor, one of `kinds`.

        Raises:
            CheckpointError: The file is damaged.
        """
