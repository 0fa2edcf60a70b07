"""`lmcore data clean`: clean a corpus with a chain of steps."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lmcore.base.errors import ConfigError, counted, printable
from lmcore.base.signals import clean_termination
from lmcore.cli.data.input_options import input_options
from lmcore.cli.selection import find_plugins
from lmcore.cli.text.progress import ProgressLine
from lmcore.cli.text.terminal import counts_text, size_text, speed_text
from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_section
from lmcore.config.section.accelerator import MAX_THREADS, plugin_off_option
from lmcore.config.section.input import InputSection
from lmcore.config.section.tokenizer import TokenizerSection
from lmcore.config.tokenizer import TokenizerSettings

if TYPE_CHECKING:
    from lmcore.data.tokenizer import Tokenizer
    from lmcore_data_tools.clean.chain import CleanRequest
    from lmcore_data_tools.clean.run import CleanReport, StepReport

__all__ = ["CleanSection", "run"]

_EPILOG = """\
steps, in the usual order:
  url         drop malformed, unwanted and repeated URLs
  fix         repair wrongly decoded text (needs `pip install ftfy`)
  language    keep the given languages (needs `pip install py3langid`)
  length      drop short documents
  exact       keep the first of documents with the same text
  near        keep the first of near-duplicate documents (MinHash)
  ngram       cut out passages of evaluation sets (decontamination)
  shuffle     shuffle the documents

One step or several, in the order given; documents stream from one to the next. The line of an
unchanged document stays the same, byte for byte.

  lmcore data clean url fix language length near ngram shuffle \\
      --input 'web/*.jsonl.gz' --output clean.jsonl.zst --dropped dropped.jsonl.zst \\
      --min-characters 512 --tasks lambada_test.jsonl --workers 8"""


@dataclass(frozen=True)
class CleanSection(TokenizerSection, InputSection):
    """Clean a corpus with a chain of steps."""

    steps: tuple[str, ...] = option(
        REQUIRED,
        "Steps, in the order of application: url, fix, language, length, exact, near, ngram, "
        "shuffle.",
    )
    input: tuple[str, ...] = option(
        REQUIRED,
        "Files, quoted patterns or directories, as for `lmcore data prepare`; - reads standard "
        "input.",
        metavar="FILE",
    )
    output: str = option(
        REQUIRED,
        "File for the remaining documents, as JSON lines, compressed by its suffix (.gz, .zst, "
        ".xz); - writes standard output.",
        metavar="FILE",
    )
    dropped: str | None = option(
        None, "File for the dropped documents, one line each, with the reason.", metavar="FILE"
    )
    overwrite: bool = option(False, "Replace existing files of --output and --dropped.")
    key: str = option("text", "Key of the text; in JSON lines dots lead into inner objects.")
    workers: int = option(
        1,
        "Number of processes for the steps on single documents.",
        minimum=1,
        maximum=MAX_THREADS,
    )
    on_error: str = option(
        "stop",
        "Stop at an unreadable document, or skip and count it.",
        choices=("stop", "skip"),
    )
    seed: int = option(1234, "Seed of near and shuffle.", minimum=0)
    scratch: str | None = option(
        None, "Directory for temporary files; default: the output's.", metavar="DIR"
    )
    url_key: str = option("url", "url: key of the URL.", metavar="KEY")
    url_rules: tuple[str, ...] = option(
        ("default",),
        "url: files of rules, one per line (example.org, example or .jpg); `default` is the "
        "bundled list.",
        metavar="FILE",
    )
    languages: tuple[str, ...] = option(
        ("en",), "language: languages to keep, as ISO 639-1 codes.", metavar="CODE"
    )
    min_tokens: int = option(128, "length: minimum number of tokens.", minimum=1)
    min_characters: int | None = option(
        None, "length: minimum number of characters, instead of tokens.", minimum=1
    )
    similarity: float = option(
        0.9, "near: minimum Jaccard similarity of a pair.", above=0, maximum=1
    )
    hashes: int = option(100, "near: number of MinHash functions.", minimum=1)
    bands: int = option(10, "near: number of bands of a signature (LSH).", minimum=1)
    shingle: int = option(5, "near: number of characters of a shingle.", minimum=1)
    tasks: tuple[str, ...] = option(
        (), "ngram: evaluation sets: JSON lines, JSON, csv or tsv.", metavar="FILE"
    )
    task_keys: tuple[str, ...] = option(
        ("text",), "ngram: keys of their texts, at any depth.", metavar="KEY"
    )
    ngram: int = option(13, "ngram: number of words of an n-gram.", minimum=1)
    ngram_min: int = option(8, "ngram: minimum number of words of a shorter text.", minimum=1)
    ngram_cut: int = option(
        200, "ngram: characters cut on each side, and on to the end of the sentence.", minimum=0
    )
    ngram_piece: int = option(200, "ngram: minimum characters of a remaining piece.", minimum=1)
    ngram_pieces: int = option(10, "ngram: maximum number of pieces of a document.", minimum=1)
    log_interval: int | None = option(
        None,
        "Documents between progress lines, if there is no live display; default: a line every ten "
        "seconds.",
        minimum=1,
    )
    json: bool = option(False, "Print the summary as JSON.")
    plugin_off: tuple[str, ...] = plugin_off_option()
    vocab_size: int | None = option(None, "Vocabulary size of a NullTokenizer.", minimum=1)
    tokenizer_type: str | None = option(
        None, "length: tokenizer type; its files are given as for prepare.", metavar="TYPE"
    )


def run(argv: list[str]) -> int:
    """Run `lmcore data clean` and return the exit status."""
    section = parse_section(
        CleanSection, argv, command="lmcore data clean", positionals=("steps",), epilog=_EPILOG
    )
    from lmcore_data_tools.clean.run import CleanProgress, clean

    request = _request(section, _tokenizer(section, argv))
    progress = ProgressLine(CleanProgress.line, every=section.log_interval is not None)
    with progress as line, clean_termination():
        interval = 1 if line.live else section.log_interval or 1
        report = clean(request, line, log_interval=interval)
    text = json.dumps(report.to_json(), indent=2) if section.json else _summary(report)
    print(printable(text), file=sys.stderr if section.output == "-" else sys.stdout)
    return 0


def _request(section: CleanSection, tokenizer: Tokenizer | None) -> CleanRequest:
    from lmcore_data_tools.clean.chain import CleanRequest
    from lmcore_data_tools.clean.filter.ngram import NgramSettings
    from lmcore_data_tools.clean.minhash import MinHash

    on_error: Literal["stop", "skip"] = "skip" if section.on_error == "skip" else "stop"
    return CleanRequest(
        steps=section.steps,
        inputs=section.input,
        output=section.output,
        dropped=section.dropped,
        overwrite=section.overwrite,
        key=section.key,
        url_key=section.url_key,
        url_rules=section.url_rules,
        languages=section.languages,
        min_tokens=section.min_tokens,
        min_characters=section.min_characters,
        tokenizer=tokenizer,
        similarity=section.similarity,
        minhash=MinHash(
            seed=section.seed, hashes=section.hashes, bands=section.bands, shingle=section.shingle
        ),
        tasks=section.tasks,
        task_keys=section.task_keys,
        ngram=NgramSettings(
            longest=section.ngram,
            shortest=section.ngram_min,
            cut=section.ngram_cut,
            shortest_piece=section.ngram_piece,
            most_pieces=section.ngram_pieces,
        ),
        seed=section.seed,
        workers=section.workers,
        on_error=on_error,
        scratch=section.scratch,
        input_format=section.input_format,
        reading=input_options(section),
    )


def _tokenizer(section: CleanSection, argv: list[str]) -> Tokenizer | None:
    settings = TokenizerSettings.without_model(section)
    if section.tokenizer_type is None:
        if given := settings.given():
            raise ConfigError(
                f"`{next(iter(given.values()))}` needs `--tokenizer-type`",
                why="a tokenizer's options need its type",
            )
        return None
    if section.min_characters is not None:
        raise ConfigError(
            "`--tokenizer-type` and `--min-characters` exclude each other",
            why="the length is counted either in tokens or in characters",
        )
    from lmcore.data.tokenizer import tokenizer_from
    from lmcore.data.tokenizer.build import registered_types

    return tokenizer_from(settings, extra=registered_types(find_plugins(argv, probe=False)))


def _summary(report: CleanReport) -> str:
    kept = f"{counted(report.kept, 'document')}, {size_text(report.output_bytes)} of JSON"
    lines = [report.output if report.output != "-" else "standard output", f"  {kept}"]
    if report.dropped is not None:
        lines += [report.dropped, "  dropped documents, with reasons"]
    rows = [("step", "documents", "kept", ""), *map(_row, report.steps)]
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    lines.append("")
    for step, documents, kept_documents, notes in rows:
        numbers = f"{documents:>{widths[1]}}  {kept_documents:>{widths[2]}}"
        lines.append(f"{step:<{widths[0]}}  {numbers}  {notes}".rstrip())
    if report.skipped:
        lines += ["", f"skipped: {counts_text(report.skipped)}"]
    speed = speed_text(report.documents, report.megabytes_per_second, report.seconds)
    read = f"read {counted(report.documents, 'document')}, {size_text(report.json_bytes)}"
    lines += ["", f"{read}, in {report.seconds:.1f} s ({speed})"]
    if report.output != "-" and report.kept:
        lines += ["", f"next: lmcore data prepare --input {shlex.quote(report.output)} ..."]
    return "\n".join(lines)


def _row(step: StepReport) -> tuple[str, str, str, str]:
    reasons = [f"{count:,} {reason}" for reason, count in list(step.dropped.items())[:6]]
    if len(step.dropped) > 6:
        others = list(step.dropped.values())[6:]
        reasons.append(f"{sum(others):,} for {len(others)} other reasons")
    parts = [f"dropped: {', '.join(reasons)}"] if reasons else []
    if step.changed:
        parts.append(f"changed: {step.changed:,}")
    if step.added:
        parts.append(f"added pieces: {step.added:,}")
    return step.step, f"{step.documents:,}", f"{step.kept:,}", "; ".join(parts)
