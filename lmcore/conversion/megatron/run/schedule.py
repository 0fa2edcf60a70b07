"""Conversion between Megatron's and lmcore's learning-rate schedules, which count samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcore.conversion.state import Progress
from lmcore.families.saved_shape import is_number

__all__ = ["SavedSchedule", "read_schedule", "schedule_arguments", "schedule_content"]

_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
_COOLDOWN = "constant-cooldown"
_KEYS = ("opt_param_scheduler", "lr_scheduler")
_NAMES = {
    "highest": ("max_lr", "start_lr"),
    "lowest": ("min_lr",),
    "warmup_samples": ("lr_warmup_steps", "warmup_steps"),
    "decay_samples": ("lr_decay_steps", "decay_steps"),
    "style": ("lr_decay_style", "decay_style"),
}


@dataclass(frozen=True)
class SavedSchedule:
    """Learning-rate schedule in a checkpoint.

    Attributes:
        values: Fields of `lmcore.optim.schedule.LearningRateSchedule`; None without a schedule.
        position: Position in it, in samples; None if it is not known.
        note: Reason why the schedule is left out, for the user; None otherwise.
    """

    values: Mapping[str, float | str] | None = None
    position: int | None = None
    note: str | None = None

    @property
    def notes(self) -> list[str]:
        """Note for the user, if there is one."""
        return [] if self.note is None else [self.note]


def read_schedule(content: Mapping[str, Any], args: Mapping[str, Any]) -> SavedSchedule:
    """Return the schedule of a checkpoint.

    Args:
        content: Content of a rank's file.
        args: Arguments of the run.
    """
    saved = next((content[key] for key in _KEYS if isinstance(content.get(key), dict)), None)
    if saved is None:
        return SavedSchedule()
    found: dict[str, Any] = {
        ours: next((saved[name] for name in names if name in saved), None)
        for ours, names in _NAMES.items()
    }
    style = found["style"]
    if style == "WSD" and args.get("lr_wsd_decay_style") == "minus_sqrt":
        found["style"], found["cooldown_fraction"] = _COOLDOWN, _cooldown(args, found)
    elif style not in _STYLES:
        return SavedSchedule(note=f"its learning-rate schedule, `{style}`, is not read")
    numbers = {name: value for name, value in found.items() if name != "style"}
    valid = all(is_number(value) and value >= 0 for value in numbers.values())
    position = saved.get("num_steps")
    valid = valid and (position is None or (type(position) is int and position >= 0))
    if not valid or args.get("lr_warmup_init"):
        return SavedSchedule(
            note="its learning-rate schedule is not read: lmcore does not have such a one"
        )
    found |= {name: float(value) for name, value in numbers.items()}
    found |= {"decay_samples": int(numbers["decay_samples"])}
    return SavedSchedule(found, position)


def _cooldown(args: Mapping[str, Any], found: Mapping[str, Any]) -> float | None:
    """Return the share of the decay in which the rate goes down; None if it is not known."""
    samples: Any = args.get("lr_wsd_decay_samples")
    if samples is None:
        iterations, batch = args.get("lr_wsd_decay_iters"), args.get("global_batch_size")
        if type(iterations) is int and type(batch) is int:
            samples = iterations * batch
    whole = found["decay_samples"]
    if not all(is_number(value) and value > 0 for value in (samples, whole)):
        return None
    return float(samples) / float(whole)


def schedule_content(progress: Progress | None) -> dict[str, Any]:
    """Return the part of a rank's file that has the schedule; empty if it is not known.

    Args:
        progress: Position of the run.
    """
    if progress is None or progress.schedule is None:
        return {}
    schedule = progress.schedule
    style = schedule["style"]
    return {
        "opt_param_scheduler": {
            "max_lr": schedule["highest"],
            "min_lr": schedule["lowest"],
            "lr_warmup_steps": _whole(schedule["warmup_samples"]),
            "lr_decay_steps": _whole(schedule["decay_samples"]),
            "lr_decay_style": "WSD" if style == _COOLDOWN else style,
            # Megatron's schedule begins at 0 also if the run's begins later, after a restart.
            "num_steps": progress.position - int(schedule.get("start_samples", 0)),
        }
    }


def schedule_arguments(progress: Progress | None) -> dict[str, Any]:
    """Return the arguments of the run that belong to the schedule.

    Args:
        progress: Position of the run.
    """
    schedule = progress.schedule if progress is not None else None
    if schedule is None:
        return {}
    found = {
        "lr": schedule["highest"],
        "min_lr": schedule["lowest"],
        "lr_warmup_samples": _whole(schedule["warmup_samples"]),
        "lr_decay_samples": _whole(schedule["decay_samples"]),
        "lr_decay_style": schedule["style"],
    }
    if schedule["style"] == _COOLDOWN:
        share = float(schedule["cooldown_fraction"]) * float(schedule["decay_samples"])
        found |= {"lr_decay_style": "WSD", "lr_wsd_decay_style": "minus_sqrt"}
        found["lr_wsd_decay_samples"] = _whole(share)
    return found


def _whole(value: float | str) -> int | float:
    number = float(value)
    return int(number) if number == int(number) else number
