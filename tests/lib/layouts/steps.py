"""Numbers of steps over which layouts are compared: more in the full set of tests."""

from __future__ import annotations

import os

_FULL = os.environ.get("TEST_SET") == "full"
STEPS = 5 if _FULL else 3
"""Steps of a case; the limits of `results.py` were measured after five."""
DROPPING_STEPS = 20 if _FULL else 6
"""Steps with dropout after which replicas are compared."""
