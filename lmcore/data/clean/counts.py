"""What the steps did, in numbers, and the lines of the file that tells what they left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lmcore.data.clean.document import Entry, to_line
from lmcore.data.input.problem import Problem

__all__ = ["StepCounts", "dropped_line", "problem_line"]


@dataclass
class StepCounts:
    """What became of the documents that a step saw.

    Attributes:
        seen: Documents that came to it.
        dropped: Documents left out, by reason.
        changed: Documents whose text was changed or cut.
        added: Documents more than came, from those that were cut into pieces.
    """

    seen: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    changed: int = 0
    added: int = 0

    @property
    def kept(self) -> int:
        """Documents that left it."""
        return self.seen - self.dropped.total() + self.added

    def add(self, other: StepCounts) -> None:
        """Add what *other* counted."""
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
        step: Name of the step.
        reason: What it counts the document under.
        entry: The document as it came to the step.
        detail: What the step found.
        kept: The document that stays instead.
        removed: What was cut out of it, where the rest stays; the document is not repeated then.
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


def problem_line(problem: Problem) -> bytes:
    """Return the line of a document that could not be read."""
    return to_line(
        {
            "step": "read",
            "reason": problem.reason,
            "detail": problem.detail,
            "source": problem.source,
            "line": problem.line,
        }
    )
