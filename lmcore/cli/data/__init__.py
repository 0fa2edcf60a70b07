"""`lmcore data ...`: commands for indexed datasets, corpora and tokenizers."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcore.cli.commands import known_commands
from lmcore.cli.text.terminal import size_text
from lmcore.config.option import option
from lmcore.config.options.command_line import parse_section
from lmcore.config.options.help import fitted
from lmcore.config.section.accelerator import plugin_off_option
from lmcore.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from lmcore.data.prepare.named_text import NamedText

__all__ = ["CorporaSection", "run"]

_SUMMARY = known_commands()["data"].summary

_HELP = f"""{_SUMMARY}

usage: lmcore data COMMAND [arguments]

commands:
  prepare     Tokenize documents into an indexed dataset.
  inspect     Show and check the contents of an indexed dataset.
  merge       Merge indexed datasets.
  split       Split datasets into smaller ones, or JSON lines into train, dev and test.
  weights     Compute weights of datasets from their tokens, for a data file list.
  repair      Repair names, a missing or damaged index, uncounted end tokens.
  clean       Clean a corpus with a chain of steps.
  train-tokenizer
              Train the vocabulary of a tokenizer on text.
  corpora     List the texts for `lmcore train --corpus`.

`lmcore data COMMAND --help` explains a command."""

_COMMANDS = (
    "clean",
    "corpora",
    "inspect",
    "merge",
    "prepare",
    "repair",
    "split",
    "train-tokenizer",
    "weights",
)
"""Names of the commands; the module of each but `corpora` has its name."""


@dataclass(frozen=True)
class CorporaSection:
    """List the texts for `lmcore train --corpus`."""

    json: bool = option(False, "Print JSON.")
    plugin_off: tuple[str, ...] = plugin_off_option()


def run(argv: list[str]) -> int:
    """Run `lmcore data ...` and return the exit status."""
    if not argv or argv[0] in {"-h", "--help"}:
        print(fitted(_HELP))
        return 0
    name, *arguments = argv
    if name not in _COMMANDS:
        raise ConfigError(f"unknown command `lmcore data {name}`", hint=suggestion(name, _COMMANDS))
    if name == "corpora":
        return _corpora(arguments)
    module = importlib.import_module(f"lmcore.cli.data.{name.replace('-', '_')}")
    status: int = module.run(arguments)
    return status


def _corpora(argv: list[str]) -> int:
    section = parse_section(CorporaSection, argv, command="lmcore data corpora")
    from lmcore.cli.selection import find_plugins
    from lmcore.data.prepare.named_text import named_texts

    texts = named_texts(find_plugins(argv, probe=False))
    rows = [_corpus_row(text) for text in texts.values()]
    if section.json:
        print(json.dumps(rows, indent=2))
        return 0
    lines: list[str] = []
    for row in rows:
        size = "no file" if row["bytes"] is None else size_text(row["bytes"])
        owner = f"plugin {row['plugin']}" if row["plugin"] else "lmcore"
        lines += [row["name"], f"  {row['summary']}", f"  {size}, of {owner}: {row['path']}"]
    print("\n".join([*lines, "", f"next: lmcore train --corpus {rows[-1]['name']}"]))
    return 0


def _corpus_row(text: NamedText) -> dict[str, Any]:
    there = text.path.is_file()
    return {
        "name": text.name,
        "summary": text.summary,
        "plugin": text.plugin_name,
        "path": str(text.path),
        "bytes": text.path.stat().st_size if there else None,
    }
