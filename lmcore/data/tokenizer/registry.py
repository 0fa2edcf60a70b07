"""Tokenizer types that plugins bring, for `--tokenizer-type`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.data.tokenizer.build import tokenizer_types
from lmcore.errors import PluginError
from lmcore.plugins import add_tokenizers

if TYPE_CHECKING:
    from lmcore.data.tokenizer.base import TokenizerFactory
    from lmcore.plugins import PluginSet

__all__ = ["TokenizerRegistry", "registered_types"]


class TokenizerRegistry:
    """What the hook `lmcore_add_tokenizers` is given."""

    def __init__(self) -> None:
        """Begin without any."""
        self.types: dict[str, TokenizerFactory] = {}

    def add(self, name: str, factory: TokenizerFactory) -> None:
        """Register a type.

        Args:
            name: What `--tokenizer-type` calls it.
            factory: Builds a tokenizer from the command line's options.

        Raises:
            PluginError: The name is taken, or *factory* cannot be called.
        """
        if name in self.types or name in tokenizer_types():
            raise PluginError(f"tokenizer type `{name}` is registered already")
        if not callable(factory):
            raise PluginError(f"the factory of tokenizer type `{name}` is not callable")
        self.types[name] = factory


def registered_types(plugins: PluginSet) -> dict[str, TokenizerFactory]:
    """Return the types that the usable plugins register, by name."""
    registry = TokenizerRegistry()
    add_tokenizers(plugins, registry)
    return registry.types
