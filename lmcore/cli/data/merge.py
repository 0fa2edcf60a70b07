"""`lmcore data merge`: merge indexed datasets."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, counted, printable
from lmcore.base.signals import clean_termination
from lmcore.cli.data.training_command import training_command
from lmcore.cli.text.terminal import size_text
from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_section

if TYPE_CHECKING:
    from lmcore.data.tools.merge import MergeReport

__all__ = ["MergeSection", "run"]

_EPILOG = """\
The result is byte for byte that of preparing all input at once. The datasets must have the same
format, token type and vocabulary.

  lmcore data merge --datasets web-00_text_document web-01_text_document \\
      --output-prefix web_text_document"""


@dataclass(frozen=True)
class MergeSection:
    """Merge indexed datasets, in the order given."""

    output_prefix: str = option(
        REQUIRED, "Path of the new dataset, without .bin or .idx.", metavar="PREFIX"
    )
    datasets: tuple[str, ...] = option(
        (), "Paths of the datasets, without .bin or .idx.", metavar="PREFIX"
    )
    input: str | None = option(
        None, "Directory of datasets, all of them in the order of their names.", metavar="DIR"
    )
    overwrite: bool = option(False, "Replace an existing dataset of that name and tokenizer.")
    json: bool = option(False, "Print the summary as JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore data merge` and return the exit status."""
    from lmcore.config.foreign.megatron_flags import merge_flags

    section = parse_section(
        MergeSection,
        argv,
        command="lmcore data merge",
        foreign=merge_flags(),
        epilog=_EPILOG,
    )
    if bool(section.datasets) == (section.input is not None):
        raise ConfigError(
            "`--datasets` and `--input` exclude each other"
            if section.datasets
            else "`--datasets` or `--input` is required",
            hint="give the datasets with `--datasets`, or their directory with `--input`",
        )
    from lmcore.config.derived.data_source import without_ending
    from lmcore.data.tools.merge import chosen_datasets, merge

    prefixes = chosen_datasets(section.datasets, section.input)
    with clean_termination():
        report = merge(prefixes, without_ending(section.output_prefix), overwrite=section.overwrite)
    print(json.dumps(report.to_json(), indent=2) if section.json else printable(_summary(report)))
    return 0


def _summary(report: MergeReport) -> str:
    speed = report.bytes / max(report.seconds, 1e-9)
    counts = ", ".join(
        [
            counted(report.datasets, "dataset"),
            counted(report.documents, "document"),
            counted(report.tokens, "token"),
        ]
    )
    return "\n".join(
        [
            f"{report.prefix}.bin, .idx",
            f"  {counts} of {report.dtype}",
            f"  {size_text(report.bytes)} in {report.seconds:.1f} s ({size_text(speed)}/s)",
            "",
            f"next: {_next(report)}",
        ]
    )


def _next(report: MergeReport) -> str:
    """Return the command for the merged dataset; GPT and Llama do not train on sentences.

    Training takes the tokenizer from the dataset's record, which it has if all merged ones do.
    """
    prefix, split = shlex.quote(report.prefix), report.sequences > report.documents
    if split or not report.metadata:
        return f"lmcore data inspect {prefix}"
    return training_command(f"--data-path {prefix}", report.documents)
