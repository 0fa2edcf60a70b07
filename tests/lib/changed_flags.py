"""Flags of a run with some of them changed."""

from __future__ import annotations


def changed(base: str, change: str) -> str:
    """Return the flags of *base*; flags of *change* replace flags of the same name."""
    settings: dict[str, str] = {}
    for text in f" {base} {change}".split(" --")[1:]:
        flag, _, value = text.partition(" ")
        settings.pop(flag.removeprefix("no-"), None)
        settings[flag] = value.strip()
    return " ".join(f"--{flag} {value}" for flag, value in settings.items() if value != "-")
