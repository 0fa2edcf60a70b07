"""`ValidationHistory`: the best validation loss of a run, and when it stops early.

All ranks have the same history, as an all-reduce gives each of them the same losses.  It is saved
in every checkpoint, so a run that resumes continues to count.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import counted
from lmcore.config.derived.data_source import own_values
from lmcore.train.resume.saved_run import part_of, setting_pair

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan

logger = logging.getLogger(__name__)

KEY = "validation"
"""Key of the history in a checkpoint's `meta`."""

STOPPED_EARLY = "stopped early"
"""Start of the status in `summary.json` of a run that `--early-stop` ended."""

_DATA = (
    *("corpus", "mock_data", "train_data", "data_path", "data_file_list", "train_data_path"),
    *("train_weighted_split_paths", "valid_data", "valid_data_path", "valid_weighted_split_paths"),
    *("split", "split_rule", "seq_length", "eval_iters"),
)
"""Options that choose the validation samples: losses of other samples are not compared."""
_SETS = ("valid_data", "valid_weighted_split_paths")
"""Options among them that may have named validation sets beside."""


@dataclass
class ValidationHistory:
    """The best validation loss of a run.

    Attributes:
        best_loss: Lowest validation loss; None before the first validation.
        best_step: Number of steps before that validation.
        reference_loss: Loss that the next validation must improve by the minimum of
            `--early-stop-delta`; None before the first validation.
        without_improvement: Number of validations since the reference loss.
    """

    best_loss: float | None = None
    best_step: int | None = None
    reference_loss: float | None = None
    without_improvement: int = 0

    @classmethod
    def of(cls, plan: RunPlan) -> ValidationHistory:
        """Return the history of the run that the checkpoint continues; empty for a new run.

        It is also empty if the validation samples are other ones now.
        """
        saved, changed = cls._saved(plan)
        return cls() if changed else cls(**saved)

    @classmethod
    def announced(cls, plan: RunPlan) -> ValidationHistory:
        """Return the same as `of`, and log if losses of other validation samples are left out."""
        _, changed = cls._saved(plan)
        if changed:
            names = ", ".join(f"`{name}`" for name in changed)
            logger.info("validation losses before are not compared: %s changed", names)
        return cls.of(plan)

    @staticmethod
    def _saved(plan: RunPlan) -> tuple[Mapping[str, Any], list[str]]:
        """Return the checkpoint's history, and the changed options of the validation samples."""
        if plan.resume is None or plan.config.checkpoint.finetune:
            return {}, []
        meta = plan.resume.manifest.meta
        saved, config = part_of(meta, KEY), part_of(meta, "config", "config")
        pairs = [
            (name, *(_of_loss(plan, name, one) for one in pair))
            for name in _DATA
            for pair in [setting_pair(plan, plan.options[name], config)]
        ]
        return saved, [name for name, before, now in pairs if saved and before != now]

    def add(self, step: int, loss: float, *, delta: float = 0.0) -> None:
        """Count a validation.

        Args:
            step: Number of steps before it.
            loss: Mean validation loss in nats.
            delta: Least improvement that ends the validations without one.
        """
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss, self.best_step = loss, step
        if self.reference_loss is None or loss < self.reference_loss - delta:
            self.reference_loss, self.without_improvement = loss, 0
        else:
            self.without_improvement += 1

    def early_stop_reason(self, plan: RunPlan, step: int) -> str | None:
        """Return the reason for an early stop after *step*; None to continue, or at the end."""
        training = plan.config.training
        limit, reference = training.early_stop, self.reference_loss
        if limit is None or self.without_improvement < limit or step >= plan.train_iters:
            return None
        assert reference is not None, "there were validations"
        below, flags = reference, f"--early-stop {limit}"
        if training.early_stop_delta:
            below -= training.early_stop_delta
            flags += f" --early-stop-delta {training.early_stop_delta:g}"
        validations = counted(self.without_improvement, "validation")
        return f"{STOPPED_EARLY}: {validations} without a loss below {below:.4f} ({flags})"

    def to_dict(self) -> Mapping[str, Any]:
        """Return the fields, for a checkpoint's `meta`."""
        return asdict(self)


def _of_loss(plan: RunPlan, name: str, value: Any) -> Any:
    """Return the value of an option without validation sets that the run's loss is not of."""
    words = isinstance(value, list) and all(isinstance(one, str) for one in value)
    if not words or name not in _SETS or plan.sources.validates_on_sets_alone:
        return value
    given: dict[str, Any] = {name: tuple(value)}
    return list(own_values(replace(plan.config.data, **given), name))
