"""Stand-in of Intel's extension for PyTorch 2.8."""

from . import llm  # noqa: F401 - as the package does
