"""`Command`: the record of a command, from which help, dispatch and documents are made."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Command"]


class Command(NamedTuple):
    """Command of the core or of a plugin.

    Attributes:
        name: The words after `lmcore`: one, or a group and a word, such as `data merge`.
        summary: One line for the help.
        load: "package.module:function", loaded when the command is used; the function takes the
            arguments after the name and returns the exit status.  Empty: a package adds it.
        package: Distribution that adds it by `lmcore_add_commands`; empty: the core has it.
        extra: Extra of lmcore that installs the package with all that it needs; empty: none.
    """

    name: str
    summary: str
    load: str = ""
    package: str = ""
    extra: str = ""

    @property
    def requirement(self) -> str:
        """Requirement to install for a command of a package."""
        return f"lmcore[{self.extra}]" if self.extra else self.package
