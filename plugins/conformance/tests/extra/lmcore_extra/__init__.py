"""Plugins without a device, each with one hook; `EXTRA_WRONG` makes all of them wrong."""

import os

WRONG = bool(os.environ.get("EXTRA_WRONG"))
