"""Result of parsing flags: values, problems, and notices about flags of another program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcore.base.errors import LmcoreError, counted

__all__ = ["ParsedFlags"]


@dataclass(frozen=True)
class ParsedFlags:
    """Values and problems of one pass over the arguments.

    Attributes:
        values: Converted value of each option that was given correctly, by name.
        texts: The same options as typed, by name: "--lr 1e-3".
        positionals: Words without a flag, by name of the positional.
        translated: Flags of another program as typed, each with lmcore's flags for it.
        without_effect: Flags of another program as typed that change nothing, each with the reason.
        repeated: Notes about lists that are given more than once.
        replaced: Flags as typed whose value counts, each with the earlier ones that it replaces.
        problems: Every problem of the arguments.
        unread: Names of the options whose values are unknown because of the problems.
    """

    values: Mapping[str, Any]
    texts: Mapping[str, str]
    positionals: Mapping[str, tuple[str, ...]]
    translated: Mapping[str, str]
    without_effect: Mapping[str, str]
    repeated: tuple[str, ...]
    replaced: Mapping[str, tuple[str, ...]]
    problems: tuple[LmcoreError, ...]
    unread: frozenset[str]

    def without_translation(self, name: str) -> ParsedFlags:
        """Return the same without the translation of another program's flag.

        Args:
            name: Option that the flag sets.
        """
        rest = {old: new for old, new in self.translated.items() if old != self.texts.get(name)}
        return dataclasses.replace(self, translated=rest)

    @property
    def notices(self) -> tuple[str, ...]:
        """Messages about all translated flags, all that change nothing, and all repeated ones."""
        found = []
        if self.translated:
            pairs = ", ".join(f"`{old}` -> `{new}`" for old, new in self.translated.items())
            verb = "was" if len(self.translated) == 1 else "were"
            found.append(
                f"{counted(len(self.translated), 'Megatron flag')} {verb} translated: {pairs}"
            )
        if self.without_effect:
            by_reason: dict[str, list[str]] = {}
            for flag, reason in self.without_effect.items():
                by_reason.setdefault(reason, []).append(f"`{flag}`")
            verb = "changes" if len(self.without_effect) == 1 else "change"
            head = f"{counted(len(self.without_effect), 'flag')} {verb} nothing here:"
            lines = [f"  {', '.join(flags)}: {reason}" for reason, flags in by_reason.items()]
            found.append("\n".join([head, *lines]))
        if self.replaced:
            pairs = ", ".join(
                f"`{last}` (not {', '.join(f'`{one}`' for one in earlier)})"
                for last, earlier in self.replaced.items()
            )
            found.append(f"given more than once, the last value counts: {pairs}")
        found += self.repeated
        return tuple(found)
