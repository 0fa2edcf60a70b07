"""The commands of the core: a record for each, from which help, dispatch and documents are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["COMMANDS", "Command", "known_commands"]


class Command(NamedTuple):
    """Command of the core.

    Attributes:
        module: Module with its function `run`, which takes the arguments after the command's name
            and returns the exit status; loaded when the command is used.
        summary: One line for the help.
    """

    module: str
    summary: str


COMMANDS: Mapping[str, Mapping[str, Command]] = {
    "model": {
        "train": Command(
            "lmcore.cli.train",
            "Train a GPT, Llama or BERT model; without arguments a small GPT on a bundled text.",
        ),
        "generate": Command("lmcore.cli.generate", "Continue a text with a trained model."),
        "serve": Command(
            "lmcore.cli.serve",
            "Answer requests for text over HTTP, with a page to try a model.",
        ),
        "ask": Command(
            "lmcore.cli.ask", "Ask a server of `lmcore serve`, or of Megatron-LM, for text."
        ),
        "checkpoint": Command(
            "lmcore.cli.checkpoint",
            "Inspect, verify, diff, edit and convert checkpoints.",
        ),
    },
    "your own script": {
        "run": Command(
            "lmcore.cli.run",
            "Run a Python script of your own in one process for each device.",
        ),
    },
    "data": {
        "data": Command("lmcore.cli.data", "Prepare and inspect datasets, list the bundled texts."),
    },
    "this machine": {
        "config": Command(
            "lmcore.cli.config", "Show every setting of a run and its source; check them."
        ),
        "plugins": Command(
            "lmcore.cli.plugin.list",
            "List the installed accelerators, and why one is not used.",
        ),
        "ops": Command(
            "lmcore.cli.ops",
            "List the ops and their kernels, and explain which kernel a case gets.",
        ),
        "doctor": Command("lmcore.cli.doctor", "Check this installation and name the fixes."),
        "plugin": Command(
            "lmcore.cli.plugin.group",
            "Write or check a plugin; the package lmcore-conformance adds the commands.",
        ),
    },
}
"""Every command of the core, under the title that the help groups it by."""


def known_commands() -> dict[str, Command]:
    """Return every command by its name."""
    return {name: one for group in COMMANDS.values() for name, one in group.items()}
