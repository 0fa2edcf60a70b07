"""Versions around a plugin, for messages: its requirements, and the versions of its software."""

from __future__ import annotations

import importlib.metadata

from lmcore.accelerator.probe import API_VERSION
from lmcore.plugin import PluginRecord

__all__ = ["installed_versions", "wanted_versions"]

_FACTS = {"driver": "driver", "runtime": "runtime", "torch_build": "torch build"}
"""Names under which a probe's facts may hold versions, with what they are called here."""


def wanted_versions(record: PluginRecord) -> str:
    """Return which plugin API and torch the plugin wants, each beside what is here."""
    info = record.info
    assert info is not None
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return f"plugin API {info.api} (here {API_VERSION}), torch {info.torch} (here {torch})"


def installed_versions(record: PluginRecord) -> str:
    """Return driver, runtime and torch build as the probe found them; empty where it says none."""
    facts = record.probe.facts if record.probe else {}
    return ", ".join(f"{label} {facts[name]}" for name, label in _FACTS.items() if facts.get(name))
