"""`lmcore data prepare`: tokenize documents into indexed datasets."""

from __future__ import annotations

import gc
import json
import os
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from lmcore.base.errors import ConfigError, LmcoreError, counted, printable
from lmcore.base.signals import clean_termination
from lmcore.cli.data.input_options import input_options, sentence_options
from lmcore.cli.data.prepare_section import PrepareSection
from lmcore.cli.data.training_command import training_command
from lmcore.cli.text.progress import ProgressLine
from lmcore.cli.text.terminal import counts_text, size_text, speed_text
from lmcore.config.options.command_line import parse_section
from lmcore.config.tokenizer import BUILT_IN_TYPES, TokenizerSettings

if TYPE_CHECKING:
    from lmcore.data.gpt2_preload import BpePreload
    from lmcore.data.prepare.run import PrepareReport, PrepareRequest
    from lmcore.data.prepare.sentences import SentenceSplitter
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["run"]

_T = TypeVar("_T")

_EPILOG = """\
Writes PREFIX_KEY_document.bin and .idx for each key; give `lmcore train --data-path` that name.
With --split-sentences the name is PREFIX_KEY_sentence, for BERT.
Megatron's names for these flags are understood.

  lmcore data prepare --input 'web/*.jsonl.gz' --output-prefix web \\
      --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \\
      --append-eod"""


def run(argv: list[str]) -> int:
    """Run `lmcore data prepare` and return the exit status."""
    from lmcore.config.foreign.megatron_flags import prepare_flags

    # No linear algebra is done here, and its threads spin while they wait for some.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    section = parse_section(
        PrepareSection,
        argv,
        command="lmcore data prepare",
        foreign=prepare_flags(),
        epilog=_EPILOG,
    )
    preload = _preload(section)
    from lmcore.data.prepare.run import PrepareProgress, join, prepare

    gc.freeze()  # what is loaded stays: it is not looked through again, not at the end either
    line = ProgressLine(
        PrepareProgress.bar, log=PrepareProgress.line, every=section.log_interval is not None
    )
    request = _request(section, argv, preload, live=line.live)
    if section.join_partitions:
        with clean_termination():
            report = join(request)
    else:
        with line, clean_termination():
            report = prepare(request, line)
    print(
        json.dumps(report.to_json(), indent=2)
        if section.json
        else printable(_summary(report, request))
    )
    return 0


def _preload(section: PrepareSection) -> BpePreload | None:
    """Start reading the files of GPT-2's tokenizer, before slow imports."""
    if section.tokenizer_type != "GPT2BPETokenizer" or not (
        section.vocab_file and section.merge_file
    ):
        return None
    from lmcore.data.gpt2_preload import BpePreload

    return BpePreload(section.vocab_file, section.merge_file)


def _request(
    section: PrepareSection, argv: list[str], preload: BpePreload | None, *, live: bool
) -> PrepareRequest:
    """Return the request; raise all its problems at once."""
    from lmcore.data.input.options import InputOptions
    from lmcore.data.prepare.run import PrepareRequest, request_problems
    from lmcore.data.tokenizer import ByteTokenizer

    problems = _partition_problems(section)
    reading = _attempt(lambda: input_options(section), problems)
    splitter = _attempt(lambda: _splitter(section), problems)
    tokenizer = _attempt(lambda: _tokenizer(section, argv, preload), problems)
    request = PrepareRequest(
        inputs=section.input,
        output_prefix=section.output_prefix,
        tokenizer=tokenizer or ByteTokenizer(),  # a placeholder, to find further problems
        json_keys=section.json_keys,
        append_eod=section.append_eod and tokenizer is not None,
        workers=section.workers,
        on_error=cast("Literal['stop', 'skip']", section.on_error),
        log_interval=1 if live else section.log_interval or 1,
        input_format=section.input_format,
        dataset_impl=section.dataset_impl,
        resume=section.resume,
        overwrite=section.overwrite,
        shard_bytes=section.shard_mib << 20,
        partitions=section.partitions,
        partition=section.partition,
        reading=reading or InputOptions(),
        splitter=splitter,
        shuffle=section.shuffle,
    )
    if problems:
        problems += request_problems(request)
        raise problems[0] if len(problems) == 1 else ConfigError.collect(problems)
    return request


def _attempt(build: Callable[[], _T], problems: list[LmcoreError]) -> _T | None:
    """Return the result of *build*; add its error to *problems* and return None if it fails."""
    try:
        return build()
    except LmcoreError as error:
        problems.append(error)
        return None


def _splitter(section: PrepareSection) -> SentenceSplitter | None:
    options = sentence_options(section)
    if options is None:
        return None
    from lmcore.data.prepare.sentences import build_splitter

    return build_splitter(options)


def _tokenizer(section: PrepareSection, argv: list[str], preload: BpePreload | None) -> Tokenizer:
    from lmcore.data.tokenizer import tokenizer_from

    settings = TokenizerSettings.without_model(section)
    if section.tokenizer_type in BUILT_IN_TYPES and not section.plugin_off:
        # Without loading plugins, which takes 0.1 s.
        return tokenizer_from(settings, preload=preload)
    from lmcore.cli.selection import find_plugins
    from lmcore.data.tokenizer.build import registered_types

    return tokenizer_from(settings, extra=registered_types(find_plugins(argv, probe=False)))


def _partition_problems(section: PrepareSection) -> list[LmcoreError]:
    if section.join_partitions and section.partition is not None:
        return [ConfigError("`--join-partitions` and `--partition` exclude each other")]
    if section.partitions > 1 and section.partition is None and not section.join_partitions:
        return [
            ConfigError(
                f"`--partitions {section.partitions}` needs `--partition` or `--join-partitions`",
                hint="each host prepares one partition (`--partition 0`, `--partition 1` ...), "
                "then one of them joins all; on a single host use `--workers` instead",
            )
        ]
    return []


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
        others = f", when all {request.partitions} partitions are complete"
        return (
            "the same command with `--join-partitions` instead of `--partition "
            f"{request.partition}`{others if request.partitions > 1 else ''}"
        )
    output = report.outputs[0]
    prefix = shlex.quote(output.prefix)
    if request.splitter is not None:
        return (
            f"lmcore data inspect {prefix}\n"
            "Documents that are split into sentences are for `lmcore train --model-family bert`, "
            "`ict`,\nor `t5` with `--vocab-extra-ids`; GPT and Llama take documents that are not "
            "split"
        )
    return training_command(f"--data-path {prefix}", output.documents)
