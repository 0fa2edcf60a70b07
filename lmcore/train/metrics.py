"""The numbers of a run: one row per step, in `metrics.jsonl` and TensorBoard."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lmcore.errors import RunError

if TYPE_CHECKING:
    from lmcore.config.section import LoggingSection

__all__ = ["MetricsFile", "StepRow", "TensorBoard"]


@dataclass(frozen=True)
class StepRow:
    """One step.

    Attributes:
        step: Number of the step, from 1.
        consumed_samples, consumed_tokens: Counts after the step.
        loss: Mean over the step's counted tokens, in nats.
        learning_rate: Rate that the step used.
        grad_norm: Norm before clipping.
        loss_scale: 1 without loss scaling.
        tokens_per_second: Tokens of the step over its time.
        step_time_ms: Wall time of the step, waiting for data included.
        data_wait_ms: The part spent waiting for data.
        mfu: Model FLOPs over the device's peak in the same time; None where the peak is unknown.
        valid_loss: On steps with a validation.
        valid_perplexity: exp(min(20, valid_loss)).
    """

    step: int
    consumed_samples: int
    consumed_tokens: int
    loss: float
    learning_rate: float
    grad_norm: float
    loss_scale: float
    tokens_per_second: float
    step_time_ms: float
    data_wait_ms: float
    mfu: float | None
    valid_loss: float | None = None
    valid_perplexity: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values; what does not apply is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class MetricsFile:
    """Appends rows to `metrics.jsonl`; each is on disk (in the page cache) at once."""

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        """Open the file; rows of steps beyond *after_step* are dropped, as they come again.

        Raises:
            RunError: The file cannot be written.
        """
        self.path = path
        try:
            if path.exists():
                _drop_later(path, after_step)
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as cause:
            raise RunError(f"`{path}` cannot be written", why=str(cause.strerror)) from cause

    def write(self, row: StepRow) -> None:
        """Append one row."""
        try:
            self._file.write(json.dumps(row.to_dict(), allow_nan=False) + "\n")
        except OSError as cause:
            raise RunError(
                f"`{self.path}` cannot be written",
                why=str(cause.strerror),
                hint="free some space and continue from the last checkpoint with `--load`",
            ) from cause

    def __enter__(self) -> Self:
        """Return the open file."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self._file.close()


def _drop_later(path: Path, after_step: int) -> None:
    kept = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                step = int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                continue  # the torn last line of a run that was killed
            if step <= after_step:
                kept.append(line)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


class TensorBoard:
    """Writes rows as TensorBoard scalars; the library is loaded with the first one."""

    def __init__(self, directory: Path, settings: LoggingSection) -> None:
        """Remember where to write."""
        self.directory = directory
        self.interval = settings.tensorboard_log_interval
        self.queue_size = settings.tensorboard_queue_size
        self._writer: Any = None

    def write(self, row: StepRow) -> None:
        """Write the scalars of a step, on every interval and with every validation."""
        if row.step % self.interval and row.valid_loss is None:
            return
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self.directory), max_queue=self.queue_size)
        values = row.to_dict()
        for tag, name in _TAGS.items():
            value = values.get(name)
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(tag, value, row.step)

    def close(self) -> None:
        """Write what is held."""
        if self._writer is not None:
            self._writer.close()


_TAGS = {
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "learning_rate",
    "train/loss_scale": "loss_scale",
    "speed/tokens_per_second": "tokens_per_second",
    "speed/step_time_ms": "step_time_ms",
    "speed/data_wait_ms": "data_wait_ms",
    "speed/mfu": "mfu",
    "valid/loss": "valid_loss",
    "valid/perplexity": "valid_perplexity",
}
