"""`lmcore data ...`: from JSON lines to indexed data sets, and the texts that have a name."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lmcore.cli.selection import find_plugins
from lmcore.cli.terminal_text import size_text
from lmcore.cli.termination import clean_termination
from lmcore.config.command_line import parse_section
from lmcore.config.option import REQUIRED, option
from lmcore.config.section.accelerator import plugin_off_option
from lmcore.config.section.tokenizer import (
    TYPES,
    add_special_tokens_option,
    merge_file_option,
    parse_special_tokens_option,
    tokenizer_model_option,
    tokenizer_name_or_path_option,
    vocab_extra_ids_option,
    vocab_file_option,
)
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from lmcore.data.corpora import NamedText
    from lmcore.data.prepare import PrepareReport, Progress

__all__ = ["SUMMARY", "CorporaSection", "PrepareSection", "run"]

SUMMARY = "Prepare and inspect data sets, list texts."

_HELP = f"""{SUMMARY}

usage: lmcore data COMMAND [arguments]

commands:
  prepare     Tokenize JSON lines into an indexed data set.
  inspect     Show what an indexed data set holds, and check it.
  merge       Put indexed data sets together into one.
  split       Cut data sets into smaller ones, or JSON lines into train, dev and test.
  weights     Weigh data sets by their tokens, for a data file list.
  clean       Take a corpus through a chain of cleaning steps.
  corpora     List the texts that `lmcore train --corpus` takes.

`lmcore data COMMAND --help` explains a command."""

_MODULES = {
    "clean": "lmcore.cli.data_clean",
    "inspect": "lmcore.cli.data_inspect",
    "merge": "lmcore.cli.data_merge",
    "split": "lmcore.cli.data_split",
    "weights": "lmcore.cli.data_weights",
}
"""The module of each command that is not in this one."""

_PREPARE_EPILOG = """\
Writes PREFIX_KEY_document.bin and .idx for each key; give `lmcore train --data-path` that name.
Megatron's names for these flags are understood.

  lmcore data prepare --input 'web/*.jsonl.gz' --output-prefix web \\
      --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \\
      --append-eod --workers 8"""


@dataclass(frozen=True)
class PrepareSection:
    """Tokenize JSON lines into an indexed data set."""

    input: tuple[str, ...] = option(
        REQUIRED,
        "Files or quoted patterns of JSON lines, compressed with gz, zst or xz or not; - reads "
        "standard input.",
        metavar="FILE",
    )
    output_prefix: str = option(
        REQUIRED, "First part of the names of the files written.", metavar="PREFIX"
    )
    tokenizer_type: str = option(REQUIRED, f"{TYPES}.", metavar="TYPE")
    vocab_file: str | None = vocab_file_option()
    merge_file: str | None = merge_file_option()
    tokenizer_model: str | None = tokenizer_model_option()
    tokenizer_name_or_path: str | None = tokenizer_name_or_path_option()
    vocab_extra_ids: int = vocab_extra_ids_option()
    add_special_tokens: bool | None = add_special_tokens_option()
    parse_special_tokens: bool = parse_special_tokens_option()
    vocab_size: int | None = option(
        None, "Numbers that a NullTokenizer's text may hold.", minimum=1
    )
    json_keys: tuple[str, ...] = option(
        ("text",), "Keys whose text is taken; each gives a data set.", metavar="KEY"
    )
    append_eod: bool = option(False, "End each document with the end-of-document token.")
    workers: int = option(1, "Processes that tokenize.", minimum=1)
    on_error: str = option(
        "stop", "What a bad line does; skipped ones are counted.", choices=("stop", "skip")
    )
    log_interval: int = option(
        1000, "Documents between progress lines, where they are not shown live.", minimum=1
    )
    json: bool = option(False, "Print the summary as JSON.")
    plugin_off: tuple[str, ...] = plugin_off_option()


@dataclass(frozen=True)
class CorporaSection:
    """List the texts that `lmcore train --corpus` takes."""

    json: bool = option(False, "Print JSON.")
    plugin_off: tuple[str, ...] = plugin_off_option()


def run(argv: list[str]) -> int:
    """Run `lmcore data ...` and return the exit status."""
    commands = {"prepare": _prepare, "corpora": _corpora, **dict.fromkeys(_MODULES)}
    if not argv or argv[0] in {"-h", "--help"}:
        print(_HELP)
        return 0
    if argv[0] not in commands:
        what = f"unknown command `lmcore data {argv[0]}`"
        raise ConfigError(what, hint=suggestion(argv[0], commands))
    command = commands[argv[0]]
    if command is None:
        command = importlib.import_module(_MODULES[argv[0]]).run
    status: int = command(argv[1:])
    return status


def _prepare(argv: list[str]) -> int:
    from lmcore.config.megatron import prepare_flags

    wanted = parse_section(
        PrepareSection,
        argv,
        command="lmcore data prepare",
        foreign=prepare_flags(),
        epilog=_PREPARE_EPILOG,
    )
    from lmcore.data.prepare import PrepareRequest, prepare
    from lmcore.data.tokenizer import tokenizer_from
    from lmcore.data.tokenizer.registry import registered_types

    tokenizer = tokenizer_from(
        TokenizerSettings.of(wanted), extra=registered_types(find_plugins(argv, probe=False))
    )
    live = sys.stderr.isatty()
    on_error: Literal["stop", "skip"] = "skip" if wanted.on_error == "skip" else "stop"
    request = PrepareRequest(
        inputs=wanted.input,
        output_prefix=wanted.output_prefix,
        tokenizer=tokenizer,
        json_keys=wanted.json_keys,
        append_eod=wanted.append_eod,
        workers=wanted.workers,
        on_error=on_error,
        log_interval=1 if live else wanted.log_interval,
    )
    try:
        with clean_termination():
            report = prepare(request, _LiveProgress() if live else _PlainProgress())
    finally:
        if live:  # what follows starts on a clean line
            print("\x1b[K", end="", file=sys.stderr, flush=True)
    print(json.dumps(report.to_json(), indent=2) if wanted.json else _summary(report))
    return 0


class _PlainProgress:
    """One line for each call; none twice."""

    def __init__(self) -> None:
        self.last = -1

    def __call__(self, progress: Progress) -> None:
        if progress.documents != self.last:
            self.last = progress.documents
            print(progress.line(), file=sys.stderr, flush=True)


class _LiveProgress:
    """One line that is written over, at most ten times a second."""

    def __init__(self) -> None:
        self.shown = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self.shown > 0.1:
            self.shown = now
            # The cursor stays at the start, so that a warning is written over the line.
            print(f"\x1b[K{progress.line()}", end="\r", file=sys.stderr, flush=True)


def _summary(report: PrepareReport) -> str:
    lines = []
    for output in report.outputs:
        counts = f"{output.documents:,} documents, {output.tokens:,} tokens of {output.dtype}"
        lines += [f"{output.prefix}.bin, .idx", f"  {counts}, {size_text(output.bytes)}"]
        if output.empty:
            lines.append(f"  {output.empty:,} documents without text under `{output.key}` left out")
    if report.skipped:
        told = ", ".join(f"{count:,} {reason}" for reason, count in report.skipped.items())
        lines.append(f"lines skipped: {told}")
    documents = f"{report.documents / max(report.seconds, 1e-9):,.0f} documents/s"
    speed = f"{documents}, {report.megabytes_per_second:.1f} MB/s"
    lines += [
        f"read {size_text(report.json_bytes)} of JSON in {report.seconds:.1f} s ({speed})",
        "",
    ]
    prefix = shlex.quote(report.outputs[0].prefix)
    return "\n".join([*lines, f"next: lmcore train --data-path {prefix}"])


def _corpora(argv: list[str]) -> int:
    wanted = parse_section(CorporaSection, argv, command="lmcore data corpora")
    from lmcore.data.corpora import named_texts

    texts = named_texts(find_plugins(argv, probe=False))
    rows = [_corpus_row(text) for text in texts.values()]
    if wanted.json:
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
