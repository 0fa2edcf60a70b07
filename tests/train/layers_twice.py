"""`lmcore train` of a model whose layers are each called twice in a row; a script.

Usage: layers_twice.py FLAG...
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from lmcore.cli.main import main
from lmcore.families.gpt.model import GPT


def call_twice() -> None:
    """Have every layer called twice in a forward pass."""
    once = GPT.run_blocks

    def run_blocks(
        self: GPT,
        x_BSH: Tensor,
        documents_BS: Tensor | None = None,
        layers: Any = None,
        **more: Any,
    ) -> Tensor:
        found = self.layers if layers is None else layers
        twice = [layer for layer in found for _ in range(2)]
        return once(self, x_BSH, documents_BS, twice, **more)

    GPT.run_blocks = run_blocks  # type: ignore[method-assign]


if __name__ == "__main__":
    call_twice()
    sys.exit(main(sys.argv[1:]))
