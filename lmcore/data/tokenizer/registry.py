"""Tokenizer types of plugins, for `--tokenizer-type`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.data.tokenizer.build import tokenizer_types
from lmcore.plugin import registrations

if TYPE_CHECKING:
    from lmcore.accelerator.tokenizer import TokenizerFactory
    from lmcore.plugin import PluginSet
    from lmcore.plugin.registrations import Registrations

__all__ = ["registered_types"]


def registered_types(plugins: PluginSet) -> Registrations[TokenizerFactory]:
    """Return the types that usable plugins register, by name; built-in names are reserved."""
    return registrations.registered_types(plugins, dict.fromkeys(tokenizer_types(), "lmcore"))
