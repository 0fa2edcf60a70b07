"""Train, evaluate and serve Megatron-family language models on any accelerator.

Imports nothing, so that `lmcore --help` and the launcher start without torch.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "2026.11.0"
