"""`lmcore train` in a process whose gradients overflow at steps that are named; a script.

Usage: spoiled_gradient.py STEPS FLAG..., STEPS being numbers with commas between, or `-`.
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

from torch import Tensor

from lmcore.cli.main import main
from lmcore.families.gpt.model import GPT


def spoil(steps: frozenset[int]) -> None:
    """Have gradients be infinite in each backward pass of *steps*, as an overflow leaves them."""
    real, calls = GPT.loss, itertools.count(1)

    def loss(*arguments: Any, **options: Any) -> Tensor:
        found = real(*arguments, **options)
        if found.requires_grad and next(calls) in steps:
            found.register_hook(lambda grad: grad * math.inf)
        return found

    GPT.loss = loss  # type: ignore[method-assign]


if __name__ == "__main__":
    steps = sys.argv[1]
    spoil(frozenset(int(word) for word in steps.split(",") if word != "-"))
    sys.exit(main(sys.argv[2:]))
