"""The plugin's settings of a run: flags `--example-...`, section `example:` of a file."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option

__all__ = ["ExampleSection"]


@dataclass(frozen=True)
class ExampleSection:
    """Options of the example plugin."""

    record_events: bool = option(
        False, "Write the run's start and end into `events.jsonl` of the run directory."
    )
