"""Stand-in."""

from . import functional  # noqa: F401 - as the package does
