"""The hooks of the data tools: their commands; torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.contract import PluginInfo
from lmcore.hookspecs import hookimpl

if TYPE_CHECKING:
    from lmcore.contract.registry import CommandRegistry


@hookimpl
def lmcore_plugin_info() -> PluginInfo:
    """Say what this plugin is and works with."""
    return PluginInfo(
        name="data-tools",
        api=">=1.3,<2",
        summary="`lmcore data clean` and `lmcore data train-tokenizer`",
    )


@hookimpl
def lmcore_add_commands(registry: CommandRegistry) -> None:
    """Add the two commands to `lmcore data`."""
    registry.add(
        "data clean",
        "lmcore_data_tools.clean.command:run",
        "Clean a corpus with a chain of steps.",
    )
    registry.add(
        "data train-tokenizer",
        "lmcore_data_tools.tokenizer_training.command:run",
        "Train the vocabulary of a tokenizer on text.",
    )
