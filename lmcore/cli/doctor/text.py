"""The report of `lmcore doctor` as text for a terminal or a file."""

from __future__ import annotations

from collections.abc import Sequence

from lmcore.base.errors import counted, printable
from lmcore.cli.text.terminal import output_width, wrapped
from lmcore.contract.probe import Check, CheckStatus

__all__ = ["ReportText"]

_STYLES = {
    CheckStatus.OK: "green",
    CheckStatus.WARNING: "yellow",
    CheckStatus.FAILED: "bold red",
    CheckStatus.SKIPPED: "dim",
}
_STATUS_WIDTH = 11
_NAME_WIDTH = 16


class ReportText:
    """Prints one group of checks after the other, each as soon as its checks are done."""

    def __init__(self) -> None:
        from rich.console import Console

        self.width = output_width()
        self.console = Console(highlight=False, soft_wrap=True)
        self.checks: list[Check] = []

    def group(self, title: str, checks: Sequence[Check]) -> None:
        """Print the checks of one group below its title."""
        from rich.text import Text

        self.console.print(Text(printable(f"\n{title}" if self.checks else title), style="bold"))
        self.checks += checks
        names = max([_NAME_WIDTH, *(len(check.name) for check in checks)])
        shown_fixes: set[str] = set()
        for check in checks:
            margin = " " * (_STATUS_WIDTH + names + 2)
            status = f"  {check.status}".ljust(_STATUS_WIDTH)
            found = wrapped(check.detail, self.width, first=margin, rest=margin)
            line = Text(status, style=_STYLES[check.status])
            line.append(printable(check.name).ljust(names + 2), style="default not bold not dim")
            line.append(found.removeprefix(margin), style="default not bold not dim")
            self.console.print(line)
            if check.fix and check.status is not CheckStatus.OK:
                fix = "fix: as above" if check.fix in shown_fixes else f"fix: {check.fix}"
                shown_fixes.add(check.fix)
                text = wrapped(fix, self.width, first=margin, rest=f"{margin}     ")
                self.console.print(Text(text, style="yellow"))

    def end(self) -> None:
        """Print how many checks ended how."""
        counts = {
            status: sum(check.status is status for check in self.checks) for status in CheckStatus
        }
        totals = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        self.console.print(f"\n{counted(len(self.checks), 'check')}: {totals}")
