"""The hooks of the server, which adds the commands `lmcore serve` and `lmcore ask`; torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.contract import PluginInfo
from lmcore.hookspecs import hookimpl

if TYPE_CHECKING:
    from lmcore.contract.registry import CommandRegistry


@hookimpl
def lmcore_plugin_info() -> PluginInfo:
    """Return name and versions."""
    return PluginInfo(
        "serve", api=">=1.3,<2", torch=">=2.8", summary="the server of models, with its client"
    )


@hookimpl
def lmcore_add_commands(registry: CommandRegistry) -> None:
    """Add the server and its client."""
    registry.add(
        "serve",
        "lmcore_serve.command.serve:run",
        "Answer requests for text over HTTP, with a page to try a model.",
    )
    registry.add(
        "ask",
        "lmcore_serve.command.ask:run",
        "Send prompts to a running lmcore or Megatron-LM server.",
    )
