"""`lmcore data train-tokenizer`: train a vocabulary on text."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lmcore.base.errors import counted, printable
from lmcore.base.signals import clean_termination
from lmcore.cli.text.progress import ProgressLine
from lmcore.cli.text.terminal import counts_text, size_text
from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_section

if TYPE_CHECKING:
    from lmcore_data_tools.tokenizer_training.text_sample import TextSample
    from lmcore_data_tools.tokenizer_training.train import TrainingReport

__all__ = ["TrainTokenizerSection", "run"]

_OF_SENTENCES = ("BertWordPieceCase", "BertWordPieceLowerCase", "SentencePieceTokenizer")
"""Types with the special tokens of families whose samples are made of sentences."""
_EPILOG = """\
The output directory must be new. The same text gives the same files.

  lmcore data train-tokenizer --input 'tr/*.jsonl.gz' --output-dir turkish \\
      --tokenizer-type GPT2BPETokenizer --vocab-size 32000
  lmcore data train-tokenizer --input 'tr/*.txt' --output-dir turkish-llama \\
      --tokenizer-type Llama2Tokenizer --vocab-size 32000"""


@dataclass(frozen=True)
class TrainTokenizerSection:
    """Train the vocabulary of a tokenizer on text."""

    input: tuple[str, ...] = option(
        REQUIRED,
        "Files, quoted patterns or directories of text, in any format of `lmcore data prepare`; - "
        "reads standard input.",
        metavar="FILE",
    )
    output_dir: str = option(REQUIRED, "New directory for the tokenizer's files.", metavar="DIR")
    tokenizer_type: str = option(
        "GPT2BPETokenizer",
        "GPT2BPETokenizer, BertWordPieceLowerCase, BertWordPieceCase, SentencePieceTokenizer (as "
        "T5's), GPTSentencePieceTokenizer, Llama2Tokenizer, or HFTokenizer (a tokenizer.json).",
        metavar="TYPE",
    )
    vocab_size: int = option(
        32000, "Number of tokens of the vocabulary.", minimum=1, maximum=10_000_000
    )
    special_tokens: tuple[str, ...] = option(
        (), "Special tokens in addition to the type's own.", metavar="TOKEN"
    )
    min_frequency: int | None = option(
        None, "Minimum frequency of a pair to be merged; default: 2.", minimum=1
    )
    model_type: str | None = option(
        None,
        "Model of a SentencePiece tokenizer; default: bpe for Llama2Tokenizer, else unigram.",
        choices=("unigram", "bpe"),
    )
    character_coverage: float | None = option(
        None,
        "Fraction of the text's characters that the alphabet covers; default: 0.9995.",
        above=0,
        maximum=1,
    )
    json_keys: tuple[str, ...] = option(
        ("text",), "Keys or columns whose text is read.", metavar="KEY"
    )
    input_format: str = option(
        "auto", "Format of the input; default: by name and content.", metavar="FORMAT"
    )
    sample_mib: int | None = option(
        None,
        "Size limit of the training text, in MiB; of longer input a sample of lines is used; "
        "default: 1024, for SentencePiece models 128.",
        minimum=1,
    )
    on_error: str = option(
        "stop", "Stop at a bad document, or skip and count it.", choices=("stop", "skip")
    )
    json: bool = option(False, "Print the summary as JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore data train-tokenizer` and return the exit status."""
    section = parse_section(
        TrainTokenizerSection, argv, command="lmcore data train-tokenizer", epilog=_EPILOG
    )
    from lmcore_data_tools.tokenizer_training.text_sample import ReadProgress
    from lmcore_data_tools.tokenizer_training.train import TrainingRequest, train_tokenizer
    from lmcore_data_tools.tokenizer_training.trainers import Recipe

    on_error: Literal["stop", "skip"] = "skip" if section.on_error == "skip" else "stop"
    request = TrainingRequest(
        inputs=section.input,
        output_dir=section.output_dir,
        tokenizer_type=section.tokenizer_type,
        recipe=Recipe(
            section.vocab_size,
            section.special_tokens,
            section.min_frequency,
            section.model_type,
            section.character_coverage,
        ),
        json_keys=section.json_keys,
        sample_bytes=None if section.sample_mib is None else section.sample_mib << 20,
        on_error=on_error,
        input_format=section.input_format,
    )
    with ProgressLine(ReadProgress.line) as line, clean_termination():
        report = train_tokenizer(request, reading=line, training=_print_start)
    print(
        json.dumps(report.to_json(), indent=2)
        if section.json
        else printable(_summary(report, section))
    )
    return 0


def _print_start(sample: TextSample) -> None:
    text = (
        f"training on {size_text(sample.kept_bytes)} of {counted(sample.documents, 'document')} ..."
    )
    text = printable(text)
    print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def _summary(report: TrainingReport, section: TrainTokenizerSection) -> str:
    flags = " ".join(
        f"--{name.replace('_', '-')} {shlex.quote(str(value))}"
        for name, value in report.tokenizer.items()
        if name != "type"
    )
    lines = [f"{report.tokenizer['type']} of {report.vocab_size:,} tokens in {section.output_dir}"]
    if report.vocab_size < section.vocab_size:
        lines.append(f"  fewer than the {section.vocab_size:,} requested: the text has no more")
    read = f"read {counted(report.documents, 'document')}, {size_text(report.bytes)} of text"
    trained = f"trained on {size_text(report.trained_bytes)} in {report.train_seconds:.1f} s"
    lines += [
        f"  {report.bytes_per_token:.2f} bytes of text per token",
        f"{read}, in {report.read_seconds:.1f} s; {trained}",
    ]
    if report.skipped:
        lines.append(f"skipped documents: {counts_text(report.skipped)}")
    if report.tokenizer["type"] in _OF_SENTENCES:
        lines.append("for BERT, T5 or ICT add `--split-sentences` to the next command")
    kind = f"--tokenizer-type {report.tokenizer['type']}"
    return "\n".join(
        [*lines, "", f"next: lmcore data prepare {_read_again(section, report)} {kind} {flags}"]
    )


def _read_again(section: TrainTokenizerSection, report: TrainingReport) -> str:
    """Return the options of `lmcore data prepare` for the same input."""
    words = ["--input", *section.input]
    if section.input_format != "auto":
        words += ["--input-format", section.input_format]
    if section.json_keys != ("text",):
        words += ["--json-keys", *section.json_keys]
    words += ["--output-prefix", Path(section.output_dir).absolute().name]
    if report.eod is not None:
        words.append("--append-eod")
    return shlex.join(words)
