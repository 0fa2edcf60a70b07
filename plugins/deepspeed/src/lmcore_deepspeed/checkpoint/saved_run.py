"""Run that a checkpoint of DeepSpeed records: precision, position, schedule, and state of Adam.

The precision is in the configuration of DeepSpeed that a checkpoint has (`ds_config`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lmcore.conversion.megatron.run import saved_arguments
from lmcore.conversion.megatron.run.schedule import SavedSchedule, read_schedule
from lmcore.conversion.state import ADAM, WEIGHT, Progress
from lmcore_deepspeed.checkpoint.directory import DeepSpeedDirectory
from lmcore_deepspeed.checkpoint.rank_tensors import RankTensors

__all__ = [
    "read_kinds",
    "recorded_precision",
    "run_progress",
    "run_schedule",
    "saved_precision",
    "weight_notes",
]

_SECTIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
"""Name of the precision that each section enables."""
_IN_TOKENS = ("lr_warmup_tokens", "lr_decay_tokens", "warmup_tokens", "decay_tokens")


def saved_precision(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the setting `precision` of the run that wrote a checkpoint; empty if not known.

    Args:
        content: Content of the first rank's file.
    """
    config = content.get("ds_config")
    if not isinstance(config, dict):
        return {}
    for section, precision in _SECTIONS.items():
        settings = config.get(section)
        if isinstance(settings, dict) and settings.get("enabled") is True:
            return {"precision": precision}
    return {}


def recorded_precision(
    content: Mapping[str, Any], args: Mapping[str, Any] | None = None
) -> str | None:
    """Return the precision of the run that wrote a checkpoint; None if it is not recorded.

    Args:
        content: Content of the first rank's file.
        args: Arguments of the run, which decide if they have it; None without any.
    """
    known = saved_arguments.saved_precision(args or {})
    if known is not None:
        return known
    half, config = saved_precision(content).get("precision"), content.get("ds_config")
    if half is not None or not isinstance(config, dict) or not config:
        return half
    # DeepSpeed computes in float32 if its configuration enables neither of the two.
    given = [config[name] for name in _SECTIONS if config.get(name) is not None]
    off = all(isinstance(one, dict) and one.get("enabled", False) is False for one in given)
    return "fp32" if off else None


def run_progress(
    content: Mapping[str, Any], args: Mapping[str, Any], rank: RankTensors, *, adam: bool
) -> Progress | None:
    """Return the position of the run; None if it is not recorded.

    Args:
        content: Content of the first rank's file.
        args: Arguments of the run; empty without any.
        rank: Tensors of the first rank of tensor parallelism.
        adam: True if the state of Adam is read.
    """
    iteration = content.get("iteration", content.get("global_steps"))
    samples = args.get("consumed_train_samples", content.get("global_samples", 0))
    if not all(type(value) is int and value >= 0 for value in (iteration, samples)):
        return None
    found = Progress(int(iteration or 0), samples)
    if not adam:
        return found
    return dataclasses.replace(
        found, optimizer_step=rank.step, adam=rank.settings or None, loss_scale=rank.loss_scale
    )


def run_schedule(content: Mapping[str, Any], args: Mapping[str, Any]) -> SavedSchedule:
    """Return the schedule of the learning rate.

    BigScience's scheduler does not save the length of a decay in tokens, which only the arguments
    have.

    Args:
        content: Content of the first rank's file.
        args: Arguments of the run.
    """
    saved = content.get("lr_scheduler")
    held = saved if isinstance(saved, dict) else {}
    if held and any(held.get(name) or args.get(name) for name in _IN_TOKENS):
        return SavedSchedule(note="its learning-rate schedule, which counts tokens, is not read")
    return read_schedule(content, args)


def weight_notes(
    files: DeepSpeedDirectory, content: Mapping[str, Any], dtypes: set[torch.dtype | None]
) -> list[str]:
    """Return a note if the weights are the model's in 16 bits, not the optimizer's in float32.

    Args:
        files: Files of the checkpoint.
        content: Content of the first rank's file.
        dtypes: Dtypes of the weights.
    """
    described = bool(content.get("param_shapes"))
    if (files.optimizers and described) or files.universal is not None:
        return []
    low = sorted(
        str(one).removeprefix("torch.") for one in dtypes & {torch.float16, torch.bfloat16}
    )
    if not low:
        return []
    dtype = " and ".join(low)
    why = "no partitions of ZeRO in float32 were read"
    if files.optimizers:
        why = "the partitions of ZeRO are not read, as the checkpoint lacks `param_shapes`"
    elif content.get("optimizer"):
        why = "no weights in float32 were read"
    return [f"the weights are {dtype}: {why}"]


def read_kinds(
    files: DeepSpeedDirectory,
    content: Mapping[str, Any],
    ranks: Sequence[RankTensors],
    names: Sequence[Sequence[str]],
) -> tuple[tuple[str, ...], str | None]:
    """Return the kinds of tensors that all parameters have, and why Adam's state is not read.

    The reason is None if it is read, or if the checkpoint has none.

    Args:
        files: Files of the checkpoint.
        content: Content of the first rank's file.
        ranks: Tensors of each rank of tensor parallelism.
        names: Names of the model's parameters in the module of each rank.
    """
    lacking = [
        name
        for rank, held in zip(ranks, names, strict=True)
        for name in held
        if not all(rank.has(name, kind) for kind in ADAM)
    ]
    if not lacking:
        return (WEIGHT, *ADAM), None
    why = next((rank.without_adam for rank in ranks if rank.without_adam), None)
    if why is None and files.optimizers and not content.get("param_shapes"):
        why = "the checkpoint lacks `param_shapes`, the order of ZeRO's parameters"
    elif why is None and files.optimizers:
        why = f"`{lacking[0]}` has none, as a parameter that is not trained"
    elif why is None and content.get("param_shapes"):
        why = "there are no `*_optim_states.pt` beside the model's files"
    elif why is None and content.get("optimizer"):
        why = f"`{lacking[0]}` has none in the files of the model"
    return (WEIGHT,), why
