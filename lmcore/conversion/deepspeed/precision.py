"""Precision in the configuration of DeepSpeed that a checkpoint has (`ds_config`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["saved_precision"]

_SECTIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
"""Name of the precision that each section enables."""


def saved_precision(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the setting `precision` of the run that wrote a checkpoint; empty if not known.

    Args:
        content: Content of the first rank's file.
    """
    config = content.get("ds_config")
    if not isinstance(config, dict):
        return {}
    for section, precision in _SECTIONS.items():
        settings = config.get(section)
        if isinstance(settings, dict) and settings.get("enabled") is True:
            return {"precision": precision}
    return {}
