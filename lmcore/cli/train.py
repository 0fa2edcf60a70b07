"""`lmcore train`: decide everything that needs no torch, then train."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING

from lmcore.cli.selection import choose_device, find_plugins
from lmcore.config.command_line import wants_help
from lmcore.config.load import load_config
from lmcore.config.resolve import resolve
from lmcore.config.run_help import render_run_help
from lmcore.config.validate import problems_of
from lmcore.plugins.registrations import plugin_sections

if TYPE_CHECKING:
    from lmcore.train.run import RunResult

__all__ = ["SUMMARY", "run"]

SUMMARY = "Train a GPT; without arguments, a small one on a bundled text."


def run(argv: list[str]) -> int:
    """Run `lmcore train ...` and return the exit status."""
    if wants_help(argv):
        sections = plugin_sections(find_plugins(argv, probe=False))
        print(render_run_help("lmcore train", SUMMARY, plugins=sections))
        return 0
    from lmcore.data.corpora import named_texts
    from lmcore.data.tokenizer.registry import registered_types
    from lmcore.runtime.rank import only_process
    from lmcore.train.corpus import choose_text, choose_tokenizer
    from lmcore.train.phases import PhaseClock

    clock = PhaseClock()
    rank = only_process(os.environ)
    plugins = find_plugins(argv)
    loaded = load_config(
        argv,
        plugins=plugin_sections(plugins),
        check=lambda loaded: problems_of(loaded, world_size=rank.world_size),
    )
    plugins = plugins.without(loaded.config.accelerator.plugin_off)  # a file's, too
    selection = choose_device(plugins, loaded.config.accelerator.device, rank)
    text = choose_text(loaded.config.data, named_texts(plugins))
    tokenizer = choose_tokenizer(loaded.config.data, registered_types(plugins))
    plan = resolve(loaded, world_size=rank.world_size, vocab_size=tokenizer.vocab_size)
    clock.mark("launcher")
    import torch  # noqa: F401  # timed by itself: everything below needs it

    clock.mark("import_torch")
    from lmcore.train.run import run_training

    _report(run_training(plan, tokenizer, plugins, selection, rank, clock, text=text))
    return 0


def _report(result: RunResult) -> None:
    summary = result.summary
    lines = []
    if result.sample is not None:
        lines += ["", "sample:", "", result.sample.prompt + result.sample.text, ""]
    ended = "" if result.status == "completed" else f" ({result.status})"
    lines.append(f"{summary['iteration']} steps in {summary['duration']}{ended}")
    if summary["valid_loss"] is not None:
        lines.append(
            f"validation loss {summary['valid_loss']:.4f}, perplexity "
            f"{summary['valid_perplexity']:.2f}"
        )
    lines.append(f"run directory   {result.directory}")
    if summary["checkpoint"] is not None:
        directory = shlex.quote(str(result.directory))
        lines += [
            f"checkpoint      {summary['checkpoint']}",
            f"more text       lmcore generate --load {directory} --prompt TEXT",
        ]
    sys.stdout.write("\n".join(lines) + "\n")
