"""Flags of Megatron's generation scripts and of training runs, for `lmcore generate`."""

from __future__ import annotations

from collections.abc import Collection

from lmcore.config.option import options_of
from lmcore.config.options.command_line import ForeignFlag, Translation
from lmcore.config.section import ModelSection, OptimizerSection, TrainingSection

__all__ = ["generate_flags"]


def generate_flags(own: Collection[str]) -> dict[str, ForeignFlag]:
    """Return the foreign flags of `lmcore generate` by name.

    Args:
        own: Flags of the command itself, which are not foreign.
    """
    return {
        **_run_flags(own),
        "--recompute": ForeignFlag(
            "0", lambda _: Translation(flags=("--no-cache",)), replacement="--no-cache"
        ),
        "--genfile": ForeignFlag(
            "1",
            lambda values: Translation(flags=("--sample-output-file", *values)),
            replacement="--sample-output-file",
        ),
        "--bf16": _precision("bf16"),
        "--fp16": _precision("fp16"),
    }


def _precision(name: str) -> ForeignFlag:
    return ForeignFlag(
        "0",
        lambda _: Translation(flags=("--precision", name)),
        replacement=f"--precision {name}",
    )


def _run_flags(own: Collection[str]) -> dict[str, ForeignFlag]:
    """Return the flags of a training run that scripts pass to generation too."""
    sections = {"model": ModelSection, "training": TrainingSection, "optimizer": OptimizerSection}
    return {
        option.flag: ForeignFlag(
            "0" if option.type is bool else "1",
            lambda _: Translation(no_effect="the checkpoint defines the model"),
        )
        for name, section in sections.items()
        for option in options_of(section, name=name)
        if option.flag not in own
    }
