"""Words of error messages."""

from __future__ import annotations

import pytest

from lmcore.base.errors import counted, nearest


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


@pytest.mark.parametrize("name", ["layrnorm", "LAYERNROM", "layer-norm"])
def test_a_slip_in_another_case(name: str) -> None:
    """The case of letters is no part of a slip; the choice is shown as it is written."""
    assert nearest(name, ["LayerNorm", "RMSNorm"]) == "LayerNorm"
