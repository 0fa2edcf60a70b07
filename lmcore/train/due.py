"""`DueSchedule`: the work that is due after a step, by the intervals of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan

__all__ = ["Due", "DueSchedule"]


@dataclass(frozen=True)
class Due:
    """Work that is due after a step, as far as the number of the step decides it.

    Attributes:
        log: True if a training line is due (`--log-interval`, and after the last step).
        validate: True if a validation is due (`--eval-interval`, and after the last step).
        save: True if a checkpoint is due (`--save-interval`).
        check_replicas: True if replicas are compared (`--check-replicas-interval`).
        check_device: True if the health of the device is checked (`--check-device-interval`).
        exit: True if the run exits after this step (`--exit-interval`).
        last: True if the step is the last one: the run is complete, and the test set is evaluated.
        tasks: True if scores of tasks are due (`--eval-tasks-interval`, and after the last step).
    """

    log: bool
    validate: bool
    save: bool
    check_replicas: bool
    check_device: bool
    exit: bool
    last: bool
    tasks: bool = False

    @property
    def needs_records(self) -> bool:
        """True if the step's numbers must be read before the work that is due."""
        return self.validate or self.tasks or self.save or self.check_replicas or self.last


class DueSchedule:
    """The intervals of a run."""

    def __init__(self, plan: RunPlan) -> None:
        """Read the intervals of *plan*; a run without validation samples never validates."""
        config = plan.config
        self.train_iters = plan.train_iters
        self.log_interval = config.logging.log_interval
        self.eval_interval = config.training.eval_interval if plan.valid_samples else 0
        self.save_interval = config.checkpoint.save_interval
        self.check_replicas_interval = config.training.check_replicas_interval
        self.check_device_interval = config.training.check_device_interval
        self.exit_interval = config.training.exit_interval
        self.tasks_interval = config.evaluation.eval_tasks_interval
        self.has_tasks = bool(config.evaluation.eval_tasks)

    def due(self, step: int) -> Due:
        """Return the work that is due after *step*, counted from 1."""
        last = step >= self.train_iters
        return Due(
            log=_divides(self.log_interval, step) or last,
            validate=_divides(self.eval_interval, step) or (last and bool(self.eval_interval)),
            save=_divides(self.save_interval, step),
            check_replicas=_divides(self.check_replicas_interval, step),
            check_device=_divides(self.check_device_interval, step),
            exit=_divides(self.exit_interval, step),
            last=last,
            tasks=self.has_tasks and (_divides(self.tasks_interval, step) or last),
        )


def _divides(interval: int | None, step: int) -> bool:
    return interval is not None and interval > 0 and step % interval == 0
