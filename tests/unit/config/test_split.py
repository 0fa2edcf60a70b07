"""`--split`: shares of training, validation and test documents."""

from __future__ import annotations

import pytest

from lmcore.config.split import parse_split
from lmcore.errors import ConfigError


@pytest.mark.parametrize(
    "text,shares",
    [
        ("969,30,1", (0.969, 0.03, 0.001)),
        ("949/50/1", (0.949, 0.05, 0.001)),
        ("100,0,0", (1.0, 0.0, 0.0)),
        ("95,5", (0.95, 0.05, 0.0)),
        ("1", (1.0, 0.0, 0.0)),
        (" 98, 2, 0", (0.98, 0.02, 0.0)),
    ],
)
def test_shares(text: str, shares: tuple[float, float, float]) -> None:
    """Commas and slashes divide; missing shares are 0; the sum is 1."""
    assert parse_split(text) == pytest.approx(shares)


@pytest.mark.parametrize(
    "text", ["", "a,b,c", "1,2,3,4", "-1,2,3", "0,1,1", "nan,1,1", "inf", "1;2"]
)
def test_refused(text: str) -> None:
    """A wrong split is refused with an example of a right one."""
    with pytest.raises(ConfigError, match="not a split") as caught:
        parse_split(text)
    assert "969,30,1" in (caught.value.hint or "")
