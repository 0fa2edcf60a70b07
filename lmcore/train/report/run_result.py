"""`RunResult`: what a run returns to the command that started it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcore.train.report.sample import SampleText

__all__ = ["UNTRAINED", "RunResult"]

UNTRAINED = "failed: no step updated the weights"
"""Status of a run that came to its end, but whose every step was skipped."""


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        directory: The run directory.
        status: "completed", or the reason for an early end.
        steps: Number of steps in this session; the run may have had more before.
        summary: Content of `summary.json`.
        sample: Text from the trained model, if requested.
        can_generate: True if the model can continue a text.
        continues: Command that continues a run that ended early; None if there is nothing to do.
        unchanged: True if the run was finished before, and nothing in its directory was changed.
    """

    directory: Path
    status: str
    steps: int
    summary: dict[str, Any]
    sample: SampleText | None
    can_generate: bool
    continues: str | None = None
    unchanged: bool = False

    @property
    def untrained(self) -> bool:
        """True if the run came to its end, but every step was skipped at a fixed loss scale."""
        return self.status == UNTRAINED
