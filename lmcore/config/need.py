"""Conditions under which a setting has an effect, declared with its option: `option(needs=...)`.

A setting that is given without its condition is named in a note when the run starts, or is an
error: `lmcore.config.rules.needs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["RESUMES", "Need", "Situation", "setting"]

RESUMES = "`--no-finetune`"
"""Words of the condition that a run continues from the state of its checkpoint."""


@dataclass(frozen=True)
class Situation:
    """Facts about a run that conditions depend on.

    The types of the first two import this module.

    Attributes:
        config: All settings, a `Config`.
        layout: `ParallelLayout`; None if the number of processes is not known yet.
        loss_scaling: True if the precision policy has a loss scale; None if it is not known yet.
        family: Name of the model's family; empty if it is not known.
    """

    config: Any
    layout: Any = None
    loss_scaling: bool | None = None
    family: str = ""

    def value(self, name: str) -> Any:
        """Return the value of the core's option called *name*."""
        sections = vars(self.config).values()
        return getattr(next(section for section in sections if hasattr(section, name)), name)


@dataclass(frozen=True)
class Need:
    """Condition under which a setting has an effect.

    Attributes:
        words: The condition, to follow "needs": "`--profile`".
        met: Returns True if the condition is met, or if it is not known yet.
        off: Values of the setting that have no effect, besides its default.
        refused: Reason of the error that a setting without its condition is; empty: it is named
            in a note.
        ignored: Reason in that note, in place of "needs" and the condition; empty for these.
    """

    words: str
    met: Callable[[Situation], bool]
    off: tuple[Any, ...] = ()
    refused: str = ""
    ignored: str = ""

    @property
    def reason(self) -> str:
        """Reason why a setting without the condition is ignored."""
        return self.ignored or f"needs {self.words}"

    def or_off(self, *values: Any) -> Need:
        """Return this condition for a setting that is off if it has one of *values*."""
        return dataclasses.replace(self, off=values)

    def else_error(self, reason: str) -> Need:
        """Return this condition for a setting that is an error without it."""
        return dataclasses.replace(self, refused=reason)


def setting(flag: str, *values: str) -> Need:
    """Return the condition that another setting is on, or has one of *values*.

    Args:
        flag: Flag of the other setting, `--optimizer`.
        values: Its values that meet the condition; without them every value but off, 0 and none.
    """
    name = flag.removeprefix("--").replace("-", "_")
    if not values:
        return Need(f"`{flag}`", lambda situation: bool(situation.value(name)))
    first, *others = (f"`{value}`" for value in values)
    first = f"`{flag} {values[0]}`"
    *others, last = [first, *others]
    words = f"{', '.join(others)} or {last}" if others else last
    return Need(words, lambda situation: situation.value(name) in values)
