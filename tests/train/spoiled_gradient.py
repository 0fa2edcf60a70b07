"""`lmcore train` in a process whose gradients overflow at steps that are named; a script.

Usage: spoiled_gradient.py STEPS FLAG..., STEPS being numbers with commas between, or `-`.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from lmcore.cli.main import main
from lmcore.train import run


def spoil(steps: frozenset[int]) -> None:
    """Have one gradient be infinite at each of *steps*, as an overflow in float16 leaves it."""
    build = run.build_model

    def build_model(*args: Any, **options: Any) -> Any:
        model = build(*args, **options)
        calls = iter(range(1, 1_000_000))
        model.final_norm.bias.register_hook(
            lambda grad: grad * math.inf if next(calls) in steps else grad
        )
        return model

    run.build_model = build_model


if __name__ == "__main__":
    steps = sys.argv[1]
    spoil(frozenset(int(word) for word in steps.split(",") if word != "-"))
    sys.exit(main(sys.argv[2:]))
