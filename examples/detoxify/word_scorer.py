"""Scorer that counts words of a list: a stand-in that needs no model.

Each word of the list halves what is left to 1: one gives 0.5, two give 0.75.
"""

from __future__ import annotations

import re

WORDS = frozenset(
    """
    blood bloody curse cursed damned dead death devil die dies hate hated hell kill kills murder
    murderer poison slain slaughter slave tyrant traitor traitors treason villain villains war
    """.split()
)


def score(texts: list[str]) -> list[float]:
    """Return the score of each text."""
    return [
        1 - 0.5 ** sum(word in WORDS for word in re.findall(r"[a-z]+", text.lower()))
        for text in texts
    ]
