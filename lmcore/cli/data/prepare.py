"""`lmcore data prepare`: tokenize documents into indexed data sets."""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

from lmcore.cli.data.input_options import input_options, sentence_options
from lmcore.cli.data.prepare_section import PrepareSection
from lmcore.cli.termination import clean_termination
from lmcore.cli.text.progress import ProgressLine
from lmcore.cli.text.terminal import counts_text, size_text, speed_text
from lmcore.config.options.command_line import parse_section
from lmcore.config.tokenizer import BUILT_IN_TYPES, TokenizerSettings
from lmcore.errors import ConfigError, LmcoreError, counted

if TYPE_CHECKING:
    from lmcore.data.gpt2_preload import BpePreload
    from lmcore.data.input.options import InputOptions
    from lmcore.data.prepare.run import PrepareProgress, PrepareReport, PrepareRequest
    from lmcore.data.prepare.sentence import SentenceSplitter
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["run"]

_EPILOG = """\
Writes PREFIX_KEY_document.bin and .idx for each key; give `lmcore train --data-path` that name.
Megatron's names for these flags are understood.

  lmcore data prepare --input 'web/*.jsonl.gz' --output-prefix web \\
      --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \\
      --append-eod"""


def run(argv: list[str]) -> int:
    """Run `lmcore data prepare` and return the exit status."""
    from lmcore.config.foreign.megatron import prepare_flags

    # No linear algebra is done here, and its threads spin while they wait for some.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    wanted = parse_section(
        PrepareSection,
        argv,
        command="lmcore data prepare",
        foreign=prepare_flags(),
        epilog=_EPILOG,
    )
    preload = _preload(wanted)
    from lmcore.data.prepare.run import PrepareProgress, join, prepare

    gc.freeze()  # what is loaded stays: it is not looked through again, not at the end either
    line = ProgressLine(PrepareProgress.bar)
    request = _request(wanted, argv, preload, live=line.live)
    if wanted.join_partitions:
        with clean_termination():
            report = join(request)
    else:
        with line, clean_termination():
            report = prepare(request, line if line.live else _PlainProgress())
    print(json.dumps(report.to_json(), indent=2) if wanted.json else _summary(report, request))
    return 0


def _preload(wanted: PrepareSection) -> BpePreload | None:
    """Start reading the files of GPT-2's tokenizer, before slow imports."""
    if wanted.tokenizer_type != "GPT2BPETokenizer" or not (wanted.vocab_file and wanted.merge_file):
        return None
    from lmcore.data.gpt2_preload import BpePreload

    return BpePreload(wanted.vocab_file, wanted.merge_file)


def _request(
    wanted: PrepareSection, argv: list[str], preload: BpePreload | None, *, live: bool
) -> PrepareRequest:
    """Return the request; raise all its problems at once."""
    from lmcore.data.prepare.run import request_problems
    from lmcore.data.tokenizer import ByteTokenizer

    problems: list[LmcoreError] = _problems_of_shares(wanted)
    reading, splitter = _input_of(wanted, problems)
    tokenizer: Tokenizer = ByteTokenizer()  # placeholder for finding other problems
    built = True
    try:
        tokenizer = _tokenizer(wanted, argv, preload)
    except LmcoreError as error:
        problems.append(error)
        built = False
    request = replace(
        _with_tokenizer(wanted, tokenizer, live=live),
        reading=reading,
        splitter=splitter,
    )
    if problems:
        known = request if built else replace(request, append_eod=False)
        problems += request_problems(known)
        raise problems[0] if len(problems) == 1 else ConfigError.collect(problems)
    return request


def _tokenizer(wanted: PrepareSection, argv: list[str], preload: BpePreload | None) -> Tokenizer:
    from lmcore.data.tokenizer import tokenizer_from

    settings = TokenizerSettings.without_model(wanted)
    if wanted.tokenizer_type in BUILT_IN_TYPES and not wanted.plugin_off:
        # Without loading plugins, which takes 0.1 s.
        return tokenizer_from(settings, preload=preload)
    from lmcore.cli.selection import find_plugins
    from lmcore.data.tokenizer.registry import registered_types

    return tokenizer_from(settings, extra=registered_types(find_plugins(argv, probe=False)))


def _input_of(
    wanted: PrepareSection, problems: list[LmcoreError]
) -> tuple[InputOptions, SentenceSplitter | None]:
    """Return input options and sentence splitter; add what is wrong to *problems*."""
    from lmcore.data.input.options import InputOptions

    reading, splitter = InputOptions(), None
    try:
        reading = input_options(wanted)
    except LmcoreError as error:
        problems.append(error)
    try:
        sentences = sentence_options(wanted)
        if sentences is not None:
            from lmcore.data.prepare.sentence import build_splitter

            splitter = build_splitter(sentences)
    except LmcoreError as error:
        problems.append(error)
    return reading, splitter


def _problems_of_shares(wanted: PrepareSection) -> list[LmcoreError]:
    if wanted.join_partitions and wanted.partition is not None:
        return [ConfigError("`--join-partitions` and `--partition` exclude each other")]
    if wanted.partitions > 1 and wanted.partition is None and not wanted.join_partitions:
        return [
            ConfigError(
                f"`--partitions {wanted.partitions}` needs `--partition` or `--join-partitions`",
                hint="each host prepares one partition (`--partition 0`, `--partition 1` ...), "
                "then one of them joins all; on a single host use `--workers` instead",
            )
        ]
    return []


def _with_tokenizer(wanted: PrepareSection, tokenizer: Tokenizer, *, live: bool) -> PrepareRequest:
    from lmcore.data.prepare.run import PrepareRequest

    return PrepareRequest(
        inputs=wanted.input,
        output_prefix=wanted.output_prefix,
        tokenizer=tokenizer,
        json_keys=wanted.json_keys,
        append_eod=wanted.append_eod,
        workers=wanted.workers,
        on_error=cast("Literal['stop', 'skip']", wanted.on_error),
        log_interval=1 if live else wanted.log_interval,
        input_format=wanted.input_format,
        dataset_impl=wanted.dataset_impl,
        resume=wanted.resume,
        shard_bytes=wanted.shard_mib << 20,
        partitions=wanted.partitions,
        partition=wanted.partition,
    )


class _PlainProgress:
    """Progress output as Megatron's lines, without repetition."""

    def __init__(self) -> None:
        self.last = -1

    def __call__(self, progress: PrepareProgress) -> None:
        if progress.documents != self.last:
            self.last = progress.documents
            print(progress.line(), file=sys.stderr, flush=True)


def _summary(report: PrepareReport, request: PrepareRequest) -> str:
    lines = []
    for output in report.outputs:
        tokens = f"{counted(output.tokens, 'token')} of {output.dtype}"
        counts = f"{counted(output.documents, 'document')}, {tokens}"
        lines += [f"{output.prefix}.bin, .idx", f"  {counts}, {size_text(output.bytes)}"]
        if output.empty:
            empty = counted(output.empty, "document")
            lines.append(f"  skipped {empty} without text under `{output.key}`")
    if report.skipped:
        lines.append(f"skipped: {counts_text(report.skipped)}")
    speed = speed_text(report.documents, report.megabytes_per_second, report.seconds)
    lines += [
        f"read {size_text(report.json_bytes)} in {report.seconds:.1f} s ({speed})",
        "",
    ]
    return "\n".join([*lines, f"next: {_next(report, request)}"])


def _next(report: PrepareReport, request: PrepareRequest) -> str:
    if request.partition is not None:
        return (
            f"the same command with `--join-partitions` instead of `--partition "
            f"{request.partition}`, when all {request.partitions} partitions are complete"
        )
    return f"lmcore train --data-path {shlex.quote(report.outputs[0].prefix)}"
