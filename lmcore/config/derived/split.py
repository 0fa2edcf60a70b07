"""Parser of `--split`: shares of training, validation and test documents."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lmcore.base.errors import ConfigError

__all__ = ["DataSplit", "parse_split"]

_HINT = "use `--split 969,30,1`, or other shares of training, validation and test"


@dataclass(frozen=True)
class DataSplit:
    """Value of `--split`.

    Attributes:
        text: The value as the user gave it, for messages.
        shares: Shares of training, validation and test documents, in the unit of *text*.
    """

    text: str
    shares: tuple[float, float, float]


def parse_split(text: str) -> DataSplit:
    """Return the split that *text* describes.

    Args:
        text: One to three numbers separated by `,` or `/`, in any unit; missing numbers are 0.

    Raises:
        ConfigError: A word that is no number, a negative number, or no training share.
    """
    parts = text.replace("/", ",").split(",")
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        raise ConfigError(f"`{text}` is not a split", why="not numbers", hint=_HINT) from None
    wrong = None
    if len(shares) > 3:
        wrong = f"{len(shares)} shares, at most 3 are allowed"
    elif any(share < 0 or not math.isfinite(share) for share in shares):
        wrong = "a share is negative or not finite"
    elif shares[0] == 0:
        wrong = "the share of training documents is 0"
    if wrong:
        raise ConfigError(f"`{text}` is not a split", why=wrong, hint=_HINT)
    train, valid, test = shares + [0.0] * (3 - len(shares))
    return DataSplit(text, (train, valid, test))
