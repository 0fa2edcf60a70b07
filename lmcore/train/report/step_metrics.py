"""Numbers of a step for loggers, by lmcore's names or by Megatron-LM's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmcore.model.run_logger import StepMetrics

if TYPE_CHECKING:
    from lmcore.train.step_record import StepRecord

__all__ = ["step_metrics"]


def step_metrics(row: StepRecord, names: str) -> StepMetrics:
    """Return the numbers of a row.

    Args:
        row: Record of a step.
        names: "lmcore" or "megatron", the values of `--tensorboard-tags`.
    """
    known, tags = _numbers(row), _TAGS[names]
    found: dict[str, dict[str, float]] = {"step": {}, "consumed_samples": {}}
    for tag, (name, position, factor) in {**tags, **_further(row, names)}.items():
        if name in known and math.isfinite(known[name]):
            found[position][tag] = known[name] * factor
    return StepMetrics(row.step, row.consumed_samples, found["step"], found["consumed_samples"])


def _further(row: StepRecord, names_of: str) -> dict[str, Scalar]:
    """Return the tags of a family's several losses and accuracies."""
    found: dict[str, Scalar] = {}
    megatron = names_of == "megatron"
    for part, names in (("train", row.losses), ("valid", row.valid)):
        for name in names:
            column = name if part == "train" else f"valid_{name}"
            words = name.replace("_", " ") + " validation" * (part == "valid")
            found[words if megatron else f"{part}/{name}"] = (column, "step", 1.0)
            if megatron:
                found[f"{words} vs samples"] = (column, "consumed_samples", 1.0)
    found |= {name: (name, "step", 1.0) for name in _nested(row)}
    return found


def _numbers(row: StepRecord) -> dict[str, float]:
    """Return the numbers of a row by name; of its parts as "tasks/NAME/METRIC"."""
    plain = {name: one for name, one in row.to_dict().items() if not isinstance(one, dict)}
    return {**plain, **_nested(row)}


def _nested(row: StepRecord) -> dict[str, float]:
    sets = {
        f"valid/{part}/{name}": value
        for part, values in row.valid_sets.items()
        for name, value in values.items()
    }
    return sets | {
        f"tasks/{task}/{name}": value
        for task, values in row.tasks.items()
        for name, value in values.items()
        if value is not None and name != "examples"
    }


Scalar = tuple[str, str, float]
"""Name of a number in a row, of the number that is its position, and a factor of the value."""

_SHARED = {
    **{f"speed/{name}": name for name in ("tokens_per_second", "step_time_ms", "data_wait_ms")},
    **{f"speed/rank_time_{name}_ms": f"rank_time_{name}_ms" for name in ("min", "median", "max")},
    **{f"speed/{name}": name for name in ("mfu", "compilations", "compile_seconds")},
    "train/skipped_iterations": "skipped_iterations",
}
"""Numbers by their tags that Megatron does not record, or not as a scalar."""
_MEMORY = ("allocated_bytes", "max_allocated_bytes", "reserved_bytes")
_OWN = {
    **{f"train/{name}": name for name in ("loss", "grad_norm", "learning_rate", "loss_scale")},
    "train/global_batch_size": "global_batch_size",
    "train/params_norm": "params_norm",
    "train/num_zeros_in_grad": "num_zeros_in_grad",
    **{f"memory/{name}": f"memory_{name}" for name in _MEMORY},
    "valid/loss": "valid_loss",
    "valid/perplexity": "valid_perplexity",
}
_MEGATRON = {
    "lm loss": "loss",
    "grad-norm": "grad_norm",
    "learning-rate": "learning_rate",
    "loss-scale": "loss_scale",
    "num-zeros": "num_zeros_in_grad",
    "params-norm": "params_norm",
    "batch-size": "global_batch_size",
    "lm loss validation": "valid_loss",
    "lm loss validation ppl": "valid_perplexity",
}
"""Numbers by Megatron's tags; each also has one with ` vs samples`."""


def _by_step(tags: Mapping[str, str]) -> dict[str, Scalar]:
    return {tag: (name, "step", 1.0) for tag, name in tags.items()}


_TAGS: Mapping[str, Mapping[str, Scalar]] = {
    "lmcore": _by_step({**_OWN, **_SHARED}),
    "megatron": {
        **_by_step({**_MEGATRON, **_SHARED}),
        **{f"{tag} vs samples": (name, "consumed_samples", 1.0) for tag, name in _MEGATRON.items()},
        "iteration-time": ("step_time_ms", "step", 1e-3),  # in seconds
        **{f"mem-{name.replace('_', '-')}": (f"memory_{name}", "step", 1.0) for name in _MEMORY},
    },
}
"""Scalars by tag, for each value of `--tensorboard-tags`."""
