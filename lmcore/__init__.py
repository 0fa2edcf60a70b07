"""Pretraining of GPT and Llama language models, with hardware support as plugins.

Imports nothing, so that `lmcore --help` and the launcher start without torch.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "2026.11.0"
