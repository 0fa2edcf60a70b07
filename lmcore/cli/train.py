"""`lmcore train`: decide everything that needs no torch, then train."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING

from lmcore.config.command_line import wants_help
from lmcore.config.load import load_config
from lmcore.config.resolve import resolve
from lmcore.config.run_help import render_run_help
from lmcore.config.validate import problems_of

if TYPE_CHECKING:
    from lmcore.train.run import RunResult

__all__ = ["SUMMARY", "run"]

SUMMARY = "Train a GPT; without arguments, a small one on a bundled text."


def run(argv: list[str]) -> int:
    """Run `lmcore train ...` and return the exit status."""
    if wants_help(argv):
        print(render_run_help("lmcore train", SUMMARY))
        return 0
    from lmcore.cli.selection import choose_device
    from lmcore.data.tokenizer.registry import registered_types
    from lmcore.runtime.rank import only_process
    from lmcore.train.corpus import choose_tokenizer
    from lmcore.train.phases import PhaseClock

    clock = PhaseClock()
    rank = only_process(os.environ)
    loaded = load_config(argv, check=lambda loaded: problems_of(loaded, world_size=rank.world_size))
    plugins, selection = choose_device(loaded.config.accelerator.device, rank)
    tokenizer = choose_tokenizer(loaded.config.data, registered_types(plugins))
    plan = resolve(loaded, world_size=rank.world_size, vocab_size=tokenizer.vocab_size)
    clock.mark("launcher")
    import torch  # noqa: F401  # timed by itself: everything below needs it

    clock.mark("import_torch")
    from lmcore.train.run import run_training

    _report(run_training(plan, tokenizer, plugins, selection, rank, clock))
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
