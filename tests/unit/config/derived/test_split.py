"""`--split`: shares of training, validation and test documents."""

from __future__ import annotations

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.derived.split import DataSplit, parse_split


@pytest.mark.parametrize(
    "text,shares",
    [
        ("969,30,1", (969, 30, 1)),
        ("949/50/1", (949, 50, 1)),
        ("0.7,0.2,0.1", (0.7, 0.2, 0.1)),
        ("100,0,0", (100, 0, 0)),
        ("95,5", (95, 5, 0)),
        ("1", (1.0, 0.0, 0.0)),
        (" 98, 2, 0", (98, 2, 0)),
    ],
)
def test_shares(text: str, shares: tuple[float, float, float]) -> None:
    """Commas and slashes divide; missing shares are 0."""
    assert parse_split(text) == DataSplit(text, shares)


@pytest.mark.parametrize(
    "text", ["", "a,b,c", "1,2,3,4", "-1,2,3", "1,-1,0", "0,1,1", "0,0,0", "nan,1,1", "inf", "1;2"]
)
def test_refused(text: str) -> None:
    """A wrong split is refused with an example of a right one."""
    with pytest.raises(ConfigError, match="not a split") as caught:
        parse_split(text)
    assert f"`{text}`" in caught.value.what
    assert "969,30,1" in (caught.value.hint or "")
