"""Command lines of conversion tools, as arguments of `lmcore checkpoint convert`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.cli.checkpoint.convert import ConvertSection
from lmcore.config.foreign.convert import PLACES, convert_flags, tool_arguments
from lmcore.config.option import options_of
from lmcore.config.options.flags import Positional, parse_flags

LISTS = Path(__file__).resolve().parents[5] / "shared" / "data" / "flags"
OPTIONS = {
    one.name: one for one in options_of(ConvertSection) if one.name not in {"source", "target"}
}
OWN = {flag for one in OPTIONS.values() for flag in one.flags}


LEGACY = {"to": "megatron", "megatron_names": "legacy"}


def parsed(line: str, program: str | None = None):
    places = (Positional("source"), Positional("target"))
    words = tool_arguments(line.split(), program)
    return parse_flags(words, OPTIONS, positionals=places, foreign=convert_flags(OWN))


@pytest.mark.parametrize(
    "line,program,values",
    [
        (
            (
                "--model-type GPT --loader megatron --saver megatron --load-dir a --save-dir b "
                "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 3"
            ),
            "checkpoint_util.py",
            {**LEGACY, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3},
        ),
        ("--load-dir=a --save-dir=b", None, LEGACY),
        (
            (
                "--loader mcore --saver mcore --load-dir a --save-dir b --megatron-path /m "
                "--saver-transformer-impl local --no-checking --max-queue-size 50"
            ),
            "convert.py",
            {"to": "megatron", "megatron_names": "core-local", "verify": False},
        ),
        (
            "--input_folder a --output_folder b --target_tp 4 --target_pp 2 --for_release",
            "deepspeed_to_megatron.py",
            {**LEGACY, "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2},
        ),
        (
            "--input_folder a --output_folder b",
            "deepspeed_to_transformers.py",
            {"to": "huggingface"},
        ),
        (
            (
                "--model-type GPT --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
                "--target-pipeline-model-parallel-size 3 --load a --save b --num-layers 2"
            ),
            "merge_mp_partitions.py",
            {**LEGACY, "pipeline_model_parallel_size": 3},
        ),
        (
            "--hf-ckpt-num-shards 2 --hf-ckpt-dir a --load-mode auto --save b --hidden-size 64",
            "hf2megads_weight_converter.py",
            {"to": "megatron-deepspeed"},
        ),
        ("--to-hf-ckpt --load a --save b", "hf2megads_weight_converter.py", {"to": "huggingface"}),
        ("--to-hf-ckpt --load a --save b", None, {"to": "huggingface"}),
        ("a b", "zero_to_fp32.py", {"to": "lmcore"}),
        ("a b --to lmcore", None, {"to": "lmcore"}),
    ],
)
def test_published_command_lines(line, program, values):
    """Directories are SOURCE and TARGET; the other flags act, or change nothing."""
    found = parsed(line, program)
    assert found.problems == ()
    assert found.positionals == {"source": ("a",), "target": ("b",)}
    assert dict(found.values) == values


@pytest.mark.parametrize(
    "line,words",
    [
        ("--load-dir a --save-dir b --saver nemo", "`--saver nemo` is not supported"),
        (
            "--load-dir a --save-dir b --target-expert-parallel-size 2",
            "`--target-expert-parallel-size 2` is not supported",
        ),
        ("--load-dir a --save-dir b --no-such-flag", "unknown flag"),
        ("--input-folder a --output-folder b --for-release 3", "3"),
    ],
)
def test_other_flags_are_named(line, words):
    """A flag that cannot act is an error with the reason."""
    assert words in str(parsed(line).problems[0])


@pytest.mark.parametrize(
    "line",
    ["--load-dir a --load-dir b --save-dir c", "--load-dir --save-dir c", "--save-dir a b"],
)
def test_one_directory_for_each_place(line):
    """A directory that is missing or named twice is an error."""
    with pytest.raises(ConfigError, match="is one directory"):
        parsed(line)


@pytest.mark.parametrize("name", ["argonne_convert", "bigscience_convert"])
def test_every_flag_of_the_tools_is_known(name):
    """The tools' flags act, change nothing, or are refused with a reason; none is unknown."""
    if not LISTS.is_dir():
        pytest.skip(f"no lists at {LISTS}")
    rows = (LISTS / f"{name}.tsv").read_text().splitlines()[1:]
    flags = {row.partition("\t")[0].replace("_", "-") for row in rows}
    assert flags - OWN - {*convert_flags(OWN), *PLACES} == set()
