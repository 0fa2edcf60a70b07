"""Precision in the configuration of DeepSpeed that a checkpoint has (`ds_config`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcore.conversion.megatron.run import saved_arguments

__all__ = ["recorded_precision", "saved_precision"]

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


def recorded_precision(
    content: Mapping[str, Any], args: Mapping[str, Any] | None = None
) -> str | None:
    """Return the precision of the run that wrote a checkpoint; None if it is not recorded.

    Args:
        content: Content of the first rank's file.
        args: Arguments of the run, which decide if they have it; None without any.
    """
    known = saved_arguments.saved_precision(args or {})
    if known is not None:
        return known
    half, config = saved_precision(content).get("precision"), content.get("ds_config")
    if half is not None or not isinstance(config, dict) or not config:
        return half
    # DeepSpeed computes in float32 if its configuration enables neither of the two.
    given = [config[name] for name in _SECTIONS if config.get(name) is not None]
    off = all(isinstance(one, dict) and one.get("enabled", False) is False for one in given)
    return "fp32" if off else None
