"""Writes the table of the characters that the word pattern of GPT-2 calls letters, numbers, space.

    python native/generate_character_classes.py > native/character_classes.hpp

The classes are defined by the `regex` package, which the Python version (`split_words`) uses.
"""

from __future__ import annotations

import importlib.metadata
import sys
from itertools import pairwise

import regex

_CLASSES = ((1, r"\p{L}"), (2, r"\p{N}"), (3, r"\s"))


def character_classes() -> list[int]:
    """Return the class of every code point: 1 letter, 2 number, 3 space, 0 anything else."""
    found = [0] * 0x110000
    everything = "".join(map(chr, range(0x110000)))
    for number, pattern in _CLASSES:
        for match in regex.finditer(pattern + "+", everything):
            found[match.start() : match.end()] = [number] * (match.end() - match.start())
    return found


def ranges() -> list[tuple[int, int, int]]:
    """Return first, last and class of each run of characters of a class other than 0."""
    classes = [0, *character_classes(), 0]
    edges = [i for i, (a, b) in enumerate(pairwise(classes)) if a != b]
    return [(a, b - 1, classes[a + 1]) for a, b in pairwise(edges) if classes[a + 1]]


def header() -> str:
    """Return the C++ source."""
    rows = [f"    {{0x{first:X}, 0x{last:X}, {number}}}," for first, last, number in ranges()]
    version = importlib.metadata.version("regex")
    return "\n".join(
        [
            f"// Written by generate_character_classes.py from the classes of regex {version}.",
            "// 1 letter, 2 number, 3 white space; anything else is of class 0.",
            "",
            "#pragma once",
            "",
            "#include <cstdint>",
            "",
            "namespace lmcore {",
            "",
            "struct ClassRange {",
            "  std::uint32_t first, last;",
            "  std::uint8_t kind;",
            "};",
            "",
            "constexpr ClassRange kClassRanges[] = {",
            *rows,
            "};",
            "",
            "}  // namespace lmcore",
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(header() + "\n")
