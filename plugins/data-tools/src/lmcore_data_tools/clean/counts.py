"""Counts of the steps, and the lines of the file of dropped documents."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lmcore.data.input.problem import InputProblem
from lmcore_data_tools.clean.document import Entry, to_line

__all__ = ["StepCounts", "dropped_line", "problem_line"]


@dataclass
class StepCounts:
    """Counts of a step.

    Attributes:
        seen: number of documents that came to it.
        dropped: number of dropped documents by reason.
        changed: number of documents whose text was changed or cut.
        added: number of additional documents, from documents cut into pieces.
    """

    seen: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    changed: int = 0
    added: int = 0

    @property
    def kept(self) -> int:
        """Number of documents that left it."""
        return self.seen - self.dropped.total() + self.added

    def add(self, other: StepCounts) -> None:
        """Add the counts of *other*."""
        self.seen += other.seen
        self.dropped.update(other.dropped)
        self.changed += other.changed
        self.added += other.added


def dropped_line(
    step: str,
    reason: str,
    entry: Entry,
    *,
    detail: str = "",
    kept: Entry | None = None,
    removed: tuple[str, ...] = (),
) -> bytes:
    """Return one line of the file of dropped documents, without a line end.

    Args:
        step: name of the step.
        reason: reason, as counted.
        entry: document as it came to the step.
        detail: finding of the step.
        kept: document kept instead.
        removed: passages cut out of a document that stays; the document is not repeated then.
    """
    record: dict[str, object] = {
        "step": step,
        "reason": reason,
        **({"detail": detail} if detail else {}),
        "source": entry.source,
        "line": entry.number,
    }
    if kept is not None:
        record["kept"] = {"source": kept.source, "line": kept.number}
    if removed:
        return to_line({**record, "removed": removed})
    return b'%b, "document": %b}' % (to_line(record)[:-1], entry.raw)


def problem_line(problem: InputProblem) -> bytes:
    """Return the line of an unreadable document."""
    return to_line(
        {
            "step": "read",
            "reason": problem.reason,
            "detail": problem.detail,
            "source": problem.source,
            "line": problem.line,
        }
    )
