"""`lmcore checkpoint ...`: commands for checkpoints of lmcore and of other programs."""

from __future__ import annotations

from lmcore.cli.commands import known_inner
from lmcore.cli.group import run_group
from lmcore.config.options.command_line import wants_help
from lmcore.plugin import discover

__all__ = ["run"]


def run(argv: list[str]) -> int:
    """Run `lmcore checkpoint ...` and return the exit status."""
    finds_plugins = argv[:1] == ["convert"]  # it has `--plugin-off`
    if "".join(argv[:1]) in known_inner("checkpoint") and not finds_plugins | wants_help(argv[1:]):
        discover(probe=False)  # plugins bring formats, and families of models
    return run_group("checkpoint", argv)
