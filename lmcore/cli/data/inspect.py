"""`lmcore data inspect`: show and check the contents of an indexed dataset."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from lmcore.base.errors import LmcoreError, counted, printable
from lmcore.cli.selection import find_plugins
from lmcore.cli.text.terminal import size_text
from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_section
from lmcore.config.section.accelerator import plugin_off_option
from lmcore.config.section.tokenizer import TYPES, TokenizerSection
from lmcore.config.tokenizer import TokenizerSettings

if TYPE_CHECKING:
    from lmcore.data.indexed.token_scan import TokenScan
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.data.tools.inspect import DecodedDocument, InspectReport

__all__ = ["InspectSection", "run"]

_EPILOG = """\
The exit status is 1 if there is a problem.

  lmcore data inspect web_text_document --document 0 17
  lmcore data inspect web_text_document --scan
  lmcore data inspect megatron_text_document --document 0 \\
      --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InspectSection(TokenizerSection):
    """Show and check the contents of an indexed dataset."""

    prefix: str = option(REQUIRED, "Path of the dataset, without .bin or .idx.")
    document: tuple[int, ...] = option(
        (), "Show these documents, counted from 0, as text.", minimum=0, metavar="N"
    )
    scan: bool = option(
        False, "Read all tokens: frequencies, duplicate documents, end tokens, all checksums."
    )
    top: int = option(10, "Number of most frequent tokens to show with --scan.", minimum=0)
    eod: int | None = option(None, "End-of-document id; default: the tokenizer's.", minimum=0)
    tokenizer_type: str | None = option(
        None, f"{TYPES}; default: from the dataset's metadata.", metavar="TYPE"
    )
    vocab_size: int | None = option(None, "Vocabulary size of a NullTokenizer.", minimum=1)
    json: bool = option(False, "Print JSON.")
    plugin_off: tuple[str, ...] = plugin_off_option()


def run(argv: list[str]) -> int:
    """Run `lmcore data inspect` and return the exit status."""
    section = parse_section(
        InspectSection,
        argv,
        command="lmcore data inspect",
        positionals=("prefix",),
        epilog=_EPILOG,
    )
    from lmcore.config.derived.data_source import without_ending
    from lmcore.data.tools.inspect import inspect, read_documents

    prefix = without_ending(section.prefix)
    given = _given_tokenizer(section, argv, prefix)
    eod = given.eod if section.eod is None and given is not None else section.eod
    vocab_size = None if given is None else given.vocab_size
    report = inspect(prefix, scan=section.scan, eod=eod, vocab_size=vocab_size, top=section.top)
    documents: list[DecodedDocument] = []
    tokenizer, problem = given, None
    if section.document:
        tokenizer = given or _recorded_tokenizer(argv, prefix)
        documents = read_documents(prefix, section.document, tokenizer)
    elif report.scan is not None and given is None:
        try:  # only to show the text of frequent tokens
            tokenizer = _recorded_tokenizer(argv, prefix)
        except LmcoreError as error:
            problem = error.what
    if section.json:
        shown = [asdict(document) for document in documents]
        print(json.dumps({**report.to_json(), "shown": shown}, indent=2))
    else:
        lines = [*_description(report), *_scan_lines(report.scan, tokenizer, problem)]
        print(printable("\n".join(lines)))
        if documents:  # a file gets their text as it is
            text = "\n".join(_document_lines(documents))
            print(printable(text) if sys.stdout.isatty() else text)
    return 1 if report.problems else 0


def _given_tokenizer(section: InspectSection, argv: list[str], prefix: str) -> Tokenizer | None:
    """Return the tokenizer of the options; its type may come from the metadata."""
    settings = TokenizerSettings.of(section)
    if settings == TokenizerSettings():
        return None
    from lmcore.data.indexed.metadata import read_metadata
    from lmcore.data.tokenizer import tokenizer_from
    from lmcore.data.tokenizer.build import registered_types

    metadata = None
    with suppress(LmcoreError):  # `inspect` reports it as a problem
        metadata = read_metadata(prefix)
    if settings.tokenizer_type is None and metadata is not None:
        recorded = TokenizerSettings.described(metadata.tokenizer).tokenizer_type
        settings = replace(settings, tokenizer_type=recorded)
    extra = registered_types(find_plugins(argv, probe=False))
    tokenizer = tokenizer_from(settings, extra=extra)
    if metadata is not None and metadata.fingerprint != tokenizer.fingerprint():
        _log.warning("`%s` was prepared with another tokenizer than the one given", prefix)
    return tokenizer


def _recorded_tokenizer(argv: list[str], prefix: str) -> Tokenizer | None:
    """Return the tokenizer of the metadata; None without metadata."""
    from lmcore.data.indexed.dataset_tokenizer import dataset_tokenizer
    from lmcore.data.indexed.metadata import read_metadata
    from lmcore.data.tokenizer.build import registered_types

    metadata = read_metadata(prefix)
    if metadata is None:
        return None
    extra = registered_types(find_plugins(argv, probe=False))
    return dataset_tokenizer(metadata.identity, prefix, extra=extra)


def _description(report: InspectReport) -> list[str]:
    counts = {
        "documents": report.documents,
        "sequences": report.sequences,
        "tokens": report.tokens,
        "empty documents": report.empty_documents,
        "empty sequences": report.empty_sequences,
        "longest sequence": report.max_length,
    }
    rows = [(name, f"{count:,}") for name, count in counts.items() if count is not None]
    if report.mean_length is not None:
        rows.append(("mean sequence", f"{report.mean_length:,.1f}"))
    multimodal = ", multimodal" if report.multimodal else ""
    rows += [
        ("format", f"{report.dataset_impl or 'unknown'}{multimodal}"),
        ("token type", report.dtype or "unknown"),
        ("tokenizer", report.tokenizer or "not recorded"),
        ("size", size_text(report.bytes)),
        ("checksums", _verification(report)),
    ]
    lines = [report.prefix, *_table(rows)]
    if not report.problems:
        also = "" if report.blocks is None else ", checksums match"
        return [*lines, f"  valid: sizes, pointers and documents are consistent{also}"]
    lines += [f"  problem: {text}" for text in report.problems]
    if report.dataset_impl is None:  # the index cannot be read
        prefix = shlex.quote(report.prefix)
        command = f"lmcore data repair {prefix} --output-prefix {prefix}-new"
        lines.append(
            f"  hint: `{command}` rebuilds the index, if the .bin file is whole and was prepared "
            "with `--append-eod`"
        )
    return lines


def _verification(report: InspectReport) -> str:
    if report.blocks is None:
        return "not recorded"
    if report.verified == report.blocks:
        return "all compared"
    return (
        f"index and {report.verified} of {counted(report.blocks, 'block')} verified; "
        "`--scan` compares all"
    )


def _scan_lines(
    scan: TokenScan | None, tokenizer: Tokenizer | None, problem: str | None
) -> list[str]:
    if scan is None:
        return []
    rows = [("distinct tokens", f"{scan.distinct:,}")]
    if scan.lowest is not None:
        rows.append(("lowest, highest", f"{scan.lowest}, {scan.highest}"))
    if scan.beyond:
        rows.append(("other tokens", f"{scan.beyond:,} with ids below 0 or above 2^24"))
    duplicates = counted(scan.duplicates, "document")
    rows.append(("duplicates", f"{duplicates} equal to an earlier one"))
    if scan.duplicate_examples:
        shown = ", ".join(f"{later} equals {first}" for later, first in scan.duplicate_examples)
        rows.append(("such as", shown))
    if scan.ended is not None:
        rows.append((f"end with {scan.eod}", counted(scan.ended, "document")))
        rows.append((f"{scan.eod} elsewhere", counted(scan.ends_inside or 0, "time")))
    else:
        rows.append(("ends", "not searched; give the token with `--eod`"))
    lines = ["", *_table(rows)]
    if scan.frequent:
        lines += ["", "most frequent tokens"]
    for token, count in scan.frequent:
        text = ""
        if tokenizer is not None and token < tokenizer.vocab_size:
            text = f"  {json.dumps(tokenizer.decode([token]), ensure_ascii=False)}"
            lines.append(f"  {token:<10}{count:>15,}{text}")
    return [*lines, f"  no text: {problem}"] if problem else lines


def _document_lines(documents: Sequence[DecodedDocument]) -> list[str]:
    lines = []
    for document in documents:
        tokens = counted(len(document.tokens), "token")
        inside = f" in {counted(len(document.lengths), 'sequence')}"
        lines += [
            "",
            f"document {document.number}: {tokens}{inside if len(document.lengths) != 1 else ''}",
        ]
        if document.text is None:
            lines.append(" ".join(map(str, document.tokens)))
        else:
            lines.append(document.text)
    return lines


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"  {name:<18}{value}" for name, value in rows]
