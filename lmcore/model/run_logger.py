"""`RunLogger`: the record of a logger of runs, and the registry of loggers.

Torch-free: what needs a further package is named as `module:object` and loaded when it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["LoggedRun", "OpenLogger", "RunLogger", "StepMetrics", "run_loggers"]


@dataclass(frozen=True)
class LoggedRun:
    """Facts about a run for the logger that is opened for it.

    Attributes:
        directory: The run directory.
        name: Name of the run: the last part of its directory.
        config: All settings, a `Config`.
        settings: The same by section and option, as JSON values.
        step: Number of steps that the run has behind it.
        run_id: `OpenLogger.run_id` of the session that this one continues; None without one.
    """

    directory: Path
    name: str
    config: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    run_id: str | None = None


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of one step, all of them finite.

    Attributes:
        step: Number of the step, from 1.
        samples: Samples of the run up to this step.
        values: Numbers by name, such as "train/loss" and "valid/loss"; see `--tensorboard-tags`.
        by_samples: Numbers whose position is *samples*, by name; empty with lmcore's names.
    """

    step: int
    samples: int
    values: Mapping[str, float]
    by_samples: Mapping[str, float] = field(default_factory=dict)


class OpenLogger:
    """Logger that is open for one run; a logger's class is derived from it.

    Its methods are called on rank 0, one at a time.  If one raises, the run shows a warning, calls
    none of them again, and continues.

    Attributes:
        run_id: Identity of the run where it is logged; a continued run is opened with it.
    """

    run_id: str | None = None

    def log(self, metrics: StepMetrics) -> None:
        """Log the numbers of a step."""
        raise NotImplementedError

    def text(self, name: str, text: str, step: int) -> None:
        """Log a text, such as the sample at the end of a run; by default nothing is done."""

    def directory_lost(self) -> None:
        """Open files of the run directory again, which was removed; by default nothing is done."""

    def close(self, status: str) -> Mapping[str, float]:  # noqa: ARG002 - for derived classes
        """End logging.

        Args:
            status: "completed", or the reason or failure that ended the run earlier.

        Returns:
            Numbers for the run's `summary.json`, by name; by default none.
        """
        return {}


@dataclass(frozen=True)
class RunLogger:
    """Destination of a run's metrics besides `metrics.jsonl`.

    Attributes:
        name: Name in `summary.json` and `loggers.json`: "wandb".
        title: Name in messages: "Weights & Biases".
        open: Function `module:object` that takes a `LoggedRun` and returns an `OpenLogger`.
        wanted: Function of all settings, a `Config`: returns True if the run is logged.
        in_background: True to call the logger on another thread, so that a slow or hanging server
            does not delay the run; False for one that writes to local files.
    """

    name: str
    title: str
    open: str
    wanted: Callable[[Any], bool] = lambda _: True
    in_background: bool = True

    def load(self) -> Any:
        """Return the function `open`."""
        module, _, name = self.open.partition(":")
        return getattr(importlib.import_module(module), name)


_loggers: dict[str, RunLogger] = {
    one.name: one
    for one in (
        RunLogger(
            "tensorboard",
            "TensorBoard",
            "lmcore.logger.tensorboard:open_tensorboard",
            lambda config: config.logging.tensorboard,
            in_background=False,
        ),
        RunLogger(
            "wandb",
            "Weights & Biases",
            "lmcore.logger.wandb:open_wandb",
            lambda config: bool(config.logging.wandb_project),
        ),
        RunLogger(
            "mlflow",
            "MLflow",
            "lmcore.logger.mlflow:open_mlflow",
            lambda config: bool(config.logging.mlflow_experiment),
        ),
        RunLogger(
            "codecarbon",
            "CodeCarbon",
            "lmcore.logger.codecarbon:open_codecarbon",
            lambda config: bool(config.logging.codecarbon_dir),
        ),
    )
}


def run_loggers() -> dict[str, RunLogger]:
    """Return the registry: every logger by its name."""
    return _loggers
