"""Command lines of the conversion tools of Megatron and its forks, for `lmcore checkpoint convert`.

The tools are `tools/checkpoint/convert.py` and `util.py`, `checkpoint_util.py`,
`merge_mp_partitions.py`, `deepspeed_to_megatron.py`, `deepspeed_to_transformers.py` and
`hf2megads_weight_converter.py`.  They name directories by flags, which are SOURCE and TARGET here;
the other flags are translated, or change nothing, or are refused with the reason.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping, Sequence

from lmcore.base.errors import ConfigError
from lmcore.config.foreign.generate import without_effect
from lmcore.config.options.flags import ForeignFlag, Translation, UnsupportedFlagError
from lmcore.config.section import run_options

__all__ = [
    "CONVERSION_PROGRAMS",
    "PLACES",
    "SAVERS",
    "TARGET_LAYOUT",
    "convert_flags",
    "names_target_layout",
    "tool_arguments",
]

logger = logging.getLogger(__name__)

CONVERSION_PROGRAMS: Mapping[str, str] = {
    "checkpoint_util.py": "--to megatron --megatron-names legacy",
    "convert.py": "--to megatron",
    "util.py": "--to megatron",
    "merge_mp_partitions.py": "--to megatron --megatron-names legacy",
    "deepspeed_to_megatron.py": "--to megatron --megatron-names legacy",
    "deepspeed_to_transformers.py": "--to huggingface",
    "hf2megads_weight_converter.py": "--to megatron-deepspeed",
    "zero_to_fp32.py": "--to lmcore",
}
"""Programs that convert checkpoints, with the format that each writes by default."""

PLACES: Mapping[str, str] = {
    "--load-dir": "SOURCE",
    "--input-folder": "SOURCE",
    "--hf-ckpt-dir": "SOURCE",
    "--load": "SOURCE",
    "--save-dir": "TARGET",
    "--output-folder": "TARGET",
    "--save": "TARGET",
}
"""Flags that name a directory, with the argument that it is here."""
_OF_TOOLS = frozenset({"--load", "--save"})
"""Flags of training that name a directory only together with another flag of a tool."""

SAVERS: Mapping[str, str] = {
    "megatron": "--to megatron --megatron-names legacy",
    "legacy": "--to megatron --megatron-names legacy",
    "core": "--to megatron",
    "mcore": "--to megatron",
    "hf": "--to huggingface",
    "llama2_hf": "--to huggingface",
}
"""Values of `--saver`, with the flags here."""

_RENAMED = {
    "--target-tensor-parallel-size": "--tensor-model-parallel-size",
    "--target-tp": "--tensor-model-parallel-size",
    "--target-pipeline-parallel-size": "--pipeline-model-parallel-size",
    "--target-pipeline-model-parallel-size": "--pipeline-model-parallel-size",
    "--target-pp": "--pipeline-model-parallel-size",
    "--no-checking": "--no-verify",
    "--to-hf-ckpt": "--to huggingface",
}
_SWITCHES = frozenset({"--no-checking", "--to-hf-ckpt"})
_FIXED = {
    "--loader": ("1", "the format of SOURCE is recognized by its files"),
    "--model-type": ("1", "the checkpoint names the family of its model"),
    "--megatron-path": ("1", "no code of Megatron is loaded"),
    "--max-queue-size": ("1", "two tensors at most are in memory at a time"),
    "--load-mode": ("1", "files of weights are recognized"),
    "--hf-ckpt-num-shards": ("1", "every file that the index names is read"),
    "--true-vocab-size": ("1", "tokenizer and checkpoint give the size of the vocabulary"),
    "--for-release": ("0", "the checkpoint keeps the number of its step"),
    "--loader-transformer-impl": ("1", "the names in SOURCE are recognized"),
}
TARGET_LAYOUT: Mapping[str, str] = {
    name: flag for name, flag in _RENAMED.items() if name.startswith("--target-")
}
"""Flags of the layout to write, with the flags here."""
_TARGETS = frozenset(TARGET_LAYOUT)
_DEFINED = "the checkpoint defines model and layout"
_SOURCE_LAYOUT = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")
_NO_EXPERTS = "leave it out: models of experts are not supported"
_EXPERTS = ("--target-expert-parallel-size", "--target-expert-tensor-parallel-size")


def convert_flags(own: Collection[str]) -> dict[str, ForeignFlag]:
    """Return the foreign flags of `lmcore checkpoint convert` by name.

    Args:
        own: Flags of the command itself, which are not foreign.
    """
    flags = {
        option.flag: without_effect("0" if option.type is bool else "*", _DEFINED)
        for option in run_options().values()
    }
    flags |= {name: without_effect(arity, reason) for name, (arity, reason) in _FIXED.items()}
    for name, replacement in _RENAMED.items():
        arity = "0" if name in _SWITCHES else "1"
        flags[name] = ForeignFlag(arity, functools.partial(_rename, replacement), replacement)
    flags["--saver"] = ForeignFlag("1", _saver, "--to")
    flags["--saver-transformer-impl"] = ForeignFlag("1", _implementation, "--megatron-names")
    for name in _EXPERTS:
        flags[name] = ForeignFlag("1", functools.partial(_experts, name))
    return {name: flag for name, flag in flags.items() if name not in own}


def tool_arguments(argv: Sequence[str], program: str | None = None) -> list[str]:
    """Return the arguments of `lmcore checkpoint convert` for the arguments of a conversion tool.

    Args:
        argv: Arguments; without a flag of a tool that names a directory they are returned as they
            are.
        program: Name of the tool; None: the arguments are lmcore's, perhaps with a tool's flags.

    Raises:
        ConfigError: A directory is named twice, or not at all.
    """
    before, groups = _groups(argv)
    names = {name for name, _ in groups}
    is_tool = bool(names & (PLACES.keys() - _OF_TOOLS))
    is_tool = is_tool or bool(names & {*_TARGETS, "--to-hf-ckpt"} and names & _OF_TOOLS)
    if program is None and not is_tool:
        return list(argv)
    places: dict[str, str] = {}
    rest: list[str] = []
    named: list[str] = []
    for name, words in groups:
        place = PLACES.get(name)
        if place is None:
            if name in _SOURCE_LAYOUT and names_target_layout(argv):
                continue  # the layout of SOURCE, as `merge_mp_partitions.py` has it
            rest += words
            continue
        values = _values(words)
        if place in places or len(values) != 1:
            raise ConfigError(
                f"`{' '.join(words)}`: {place} is one directory",
                why=f"it is `{places[place]}` already" if place in places else None,
                hint="`lmcore checkpoint convert SOURCE TARGET --to FORMAT`",
            )
        places[place] = values[0]
        named.append(f"`{' '.join(words)}` -> {place}")
    if not names & {"--to", "--saver", "--to-hf-ckpt"}:
        default = CONVERSION_PROGRAMS.get(program or "")
        if default is None and names & {"--load-dir", *_TARGETS}:
            default = CONVERSION_PROGRAMS["checkpoint_util.py"]
        rest += (default or "").split()
    made = [*before, *(places[one] for one in ("SOURCE", "TARGET") if one in places), *rest]
    if program is None:
        logger.info("a conversion tool's flags: %s", ", ".join(named))
    return made


def names_target_layout(argv: Sequence[str]) -> bool:
    """Return True if flags of a tool give the layout to write, so that others give SOURCE's."""
    names = {word.partition("=")[0].replace("_", "-") for word in argv}
    return bool(names & _TARGETS)


def _groups(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the words before the first flag, and each flag's name with all its words."""
    before: list[str] = []
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--") and word != "--":
            name = word.partition("=")[0].replace("_", "-")
            groups.append((name, [word]))
        elif groups:
            groups[-1][1].append(word)
        else:
            before.append(word)
    return before, groups


def _values(words: Sequence[str]) -> list[str]:
    _, equals, value = words[0].partition("=")
    return [*([value] if equals else []), *words[1:]]


def _rename(replacement: str, values: tuple[str, ...]) -> Translation:
    return Translation(flags=(*replacement.split(), *values))


def _saver(values: tuple[str, ...]) -> Translation:
    flags = SAVERS.get(values[0].lower())
    if flags is not None:
        return Translation(flags=tuple(flags.split()))
    what = f"`--saver {values[0]}` is not supported"
    hint = "use `--to FORMAT` instead, or one of " + ", ".join(f"`{one}`" for one in SAVERS)
    return Translation(problem=UnsupportedFlagError(what, hint=hint))


def _implementation(values: tuple[str, ...]) -> Translation:
    if values[0] == "local":
        return Translation(flags=("--megatron-names", "core-local"))
    return Translation(no_effect="Megatron's default layers have these names")


def _experts(name: str, values: tuple[str, ...]) -> Translation:
    if values == ("1",):
        return Translation(no_effect="the model has no experts")
    what = f"`{name} {' '.join(values)}` is not supported"
    return Translation(problem=UnsupportedFlagError(what, hint=_NO_EXPERTS))
