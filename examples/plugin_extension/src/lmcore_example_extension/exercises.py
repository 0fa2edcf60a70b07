"""`lmcore example-exercises`: arithmetic exercises with their results, the same for a seed.

lmcore example-exercises > arithmetic.txt       # the corpus of this plugin
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from lmcore.config.option import option
from lmcore.config.options.command_line import parse_section

__all__ = ["ExercisesSection", "exercises", "run"]

_PARAGRAPH = 50  # exercises between blank lines, where lmcore divides a text into documents


@dataclass(frozen=True)
class ExercisesSection:
    """Print arithmetic exercises with their results."""

    count: int = option(8000, "Exercises.", minimum=1, maximum=1_000_000)
    largest: int = option(99, "Largest number in an exercise.", minimum=1, maximum=9999)
    seed: int = option(1, "Seed; the same one gives the same exercises.", minimum=0)
    json: bool = option(False, "Print a JSON list.")


def run(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    wanted = parse_section(ExercisesSection, argv, command="lmcore example-exercises")
    made = list(exercises(wanted.count, largest=wanted.largest, seed=wanted.seed))
    if wanted.json:
        sys.stdout.write(json.dumps(made, indent=2) + "\n")
        return 0
    paragraphs = [made[at : at + _PARAGRAPH] for at in range(0, len(made), _PARAGRAPH)]
    sys.stdout.write("\n\n".join("\n".join(lines) for lines in paragraphs) + "\n")
    return 0


def exercises(count: int, *, largest: int, seed: int) -> Iterator[str]:
    """Yield *count* exercises such as `12+30=42`; a product's second factor has one digit."""
    draw = random.Random(seed)
    for _ in range(count):
        left, right = draw.randint(0, largest), draw.randint(0, largest)
        sign = draw.choice("+-*")
        if sign == "-":
            left, right = max(left, right), min(left, right)
        elif sign == "*":
            right %= 10
        result = {"+": left + right, "-": left - right, "*": left * right}[sign]
        yield f"{left}{sign}{right}={result}"
