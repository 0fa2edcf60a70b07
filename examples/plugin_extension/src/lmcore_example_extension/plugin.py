"""The hooks: what lmcore calls, and when.  Torch-free, and quick to import."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.contract import PluginInfo
from lmcore.hookspecs import hookimpl

if TYPE_CHECKING:
    from lmcore.contract.registry import (
        CommandRegistry,
        CorpusRegistry,
        OptionRegistry,
        TokenizerRegistry,
    )

NAME = "example"


@hookimpl
def lmcore_plugin_info() -> PluginInfo:
    """Say who this is; without `lmcore_probe` it brings no device and serves every one."""
    return PluginInfo(name=NAME, api=">=1.3,<2", summary="arithmetic: corpus, tokenizer, command")


@hookimpl
def lmcore_add_options(registry: OptionRegistry) -> None:
    """Add the flag `--example-record-events`."""
    from lmcore_example_extension.settings import ExampleSection

    registry.add(ExampleSection)


@hookimpl
def lmcore_add_commands(registry: CommandRegistry) -> None:
    """Add `lmcore example-exercises`; its module is loaded only when it runs."""
    registry.add(
        "example-exercises",
        "lmcore_example_extension.exercises:run",
        "Print arithmetic exercises, as in the corpus `arithmetic`.",
    )


@hookimpl
def lmcore_add_corpora(registry: CorpusRegistry) -> None:
    """Add `--corpus arithmetic`."""
    registry.add(
        "arithmetic",
        Path(__file__).parent / "arithmetic.txt",
        "Sums, differences and products; made by `lmcore example-exercises`.",
    )


@hookimpl
def lmcore_add_tokenizers(registry: TokenizerRegistry) -> None:
    """Add `--tokenizer-type ArithmeticTokenizer`."""
    from lmcore_example_extension.tokenizer import make_tokenizer

    registry.add("ArithmeticTokenizer", make_tokenizer)


@hookimpl
def lmcore_run_start(run: Mapping[str, Any]) -> None:
    """Write a line into the run directory's `events.jsonl`, if the settings ask for it."""
    _record(run, {"event": "start"})


@hookimpl
def lmcore_run_end(run: Mapping[str, Any]) -> None:
    """Write how the run ended."""
    _record(run, {"event": "end", "status": run["status"], "iteration": run["iteration"]})


def _record(run: Mapping[str, Any], event: dict[str, Any]) -> None:
    settings = run["plan"]["config"]["plugins"][NAME]
    if run["rank"] != 0 or not settings["record_events"]:
        return
    line = json.dumps({**event, "unix_time": time.time()})
    with (Path(run["directory"]) / "events.jsonl").open("a", encoding="utf-8") as events:
        events.write(f"{line}\n")
