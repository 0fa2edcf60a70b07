"""Parser of `--split`, the fractions of training, validation and test documents."""

from __future__ import annotations

import math

from lmcore.errors import ConfigError

__all__ = ["parse_split"]

_HINT = "write three shares, such as `969,30,1`"


def parse_split(text: str) -> tuple[float, float, float]:
    """Return the fractions of training, validation and test documents; they sum to 1.

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
    shares += [0.0] * (3 - len(shares))
    total = math.fsum(shares)
    return shares[0] / total, shares[1] / total, shares[2] / total
