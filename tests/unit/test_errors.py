"""Words of error messages."""

from __future__ import annotations

import pytest

from lmcore.errors import counted


@pytest.mark.parametrize(
    "number, expected",
    [
        (1, "1 second"),
        (1.0, "1 second"),
        (0, "0 seconds"),
        (0.5, "0.5 seconds"),
        (30.0, "30 seconds"),
        (1000, "1,000 seconds"),
    ],
)
def test_a_number_and_its_noun(number: float, expected: str) -> None:
    """The singular is for one alone."""
    assert counted(number, "second") == expected


def test_an_irregular_plural() -> None:
    assert counted(1, "directory", "directories") == "1 directory"
    assert counted(2, "directory", "directories") == "2 directories"
