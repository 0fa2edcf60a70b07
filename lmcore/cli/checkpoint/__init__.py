"""`lmcore checkpoint ...`: commands for checkpoints of lmcore and of other programs."""

from __future__ import annotations

import importlib

from lmcore.cli.commands import known_commands
from lmcore.config.options.command_line import wants_help
from lmcore.config.options.help import fitted
from lmcore.errors import ConfigError, suggestion
from lmcore.plugin import discover

__all__ = ["run"]

_SUMMARY = known_commands()["checkpoint"].summary

_HELP = f"""{_SUMMARY}

usage: lmcore checkpoint COMMAND [arguments]

commands:
  inspect     Show the contents of a checkpoint: its run, its model and its tensors.
  verify      Compare checkpoints with their checksums.
  diff        Compare two checkpoints tensor by tensor.
  edit        Write an edited copy: tensors renamed, dropped, cast, the vocabulary resized.
  convert     Write a checkpoint in another format, such as Hugging Face's.

`lmcore checkpoint COMMAND --help` explains a command."""

_COMMANDS = ("convert", "diff", "edit", "inspect", "verify")
"""Names of the commands; the module of each has its name."""


def run(argv: list[str]) -> int:
    """Run `lmcore checkpoint ...` and return the exit status."""
    if not argv or argv[0] in {"-h", "--help"}:
        print(fitted(_HELP))
        return 0
    name, *arguments = argv
    if name not in _COMMANDS:
        raise ConfigError(
            f"unknown command `lmcore checkpoint {name}`", hint=suggestion(name, _COMMANDS)
        )
    if name != "convert" and not wants_help(arguments):  # convert has `--plugin-off`
        discover(probe=False)  # plugins bring formats, and families of models
    module = importlib.import_module(f"lmcore.cli.checkpoint.{name}")
    status: int = module.run(arguments)
    return status
