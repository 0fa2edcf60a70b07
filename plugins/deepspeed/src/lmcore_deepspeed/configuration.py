"""Configuration for DeepSpeed: a run's settings and the rest of DeepSpeed's file."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmcore.config.foreign.engine_file import AUTO
from lmcore.config.foreign.engine_file_keys import REFUSED

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan

__all__ = ["deepspeed_config", "zero_stage"]

_DEFAULT_STAGE = 1
"""ZeRO stage if neither the settings nor the file set one."""

_OURS = ("optimizer", "scheduler", "activation_checkpointing", "checkpoint", "dataloader_drop_last")
"""Sections of a file that are settings here or have no effect; they are not passed on."""

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def zero_stage(plan: RunPlan) -> int:
    """Return the ZeRO stage: 1 shards optimizer state, 2 gradients too, 3 weights too."""
    asked = plan.config.parallel.zero_stage
    return _DEFAULT_STAGE if asked is None else asked


def deepspeed_config(
    plan: RunPlan, content: Mapping[str, Any], *, compute: str, reduce: str
) -> dict[str, Any]:
    """Return the configuration for DeepSpeed.

    Learning rate, weight decay and loss scale are left out: lmcore's engine computes the update
    itself, with the learning rate of each step and the dynamic loss scale.

    Args:
        plan: Plan of the run, which includes the settings from the file.
        content: Content of DeepSpeed's file; empty without a file.
        compute: Dtype of matrix products, "bfloat16".
        reduce: Dtype in which gradients are summed.
    """
    left_out = {*_OURS, *REFUSED}  # what is refused may be there if it is off
    config = {name: copy.deepcopy(value) for name, value in content.items() if name not in left_out}
    config = _without_auto(config, plan.config.model.hidden_size)
    half = _DTYPES[compute] if compute in {"bfloat16", "float16"} else None
    for name in ("fp16", "bf16", "bfloat16"):
        config.pop(name, None)
    if half is not None:
        config[half] = {"enabled": True}
        # Constant for DeepSpeed; the engine sets the scale at every step.
        config[half] |= {"loss_scale": 1.0} if half == "fp16" else {}
        config.setdefault("communication_data_type", _DTYPES[reduce])
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", _DTYPES[reduce])
    config |= {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.config.training.micro_batch_size,
        "gradient_accumulation_steps": plan.num_micro_batches,
        "gradient_clipping": plan.config.optimizer.clip_grad,
        "zero_optimization": _zero(plan, config.get("zero_optimization", {})),
        # lmcore's optimizer is elementwise, so that any partition works, on the host too.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return config


def _zero(plan: RunPlan, section: Mapping[str, Any]) -> dict[str, Any]:
    zero = dict(section) | {"stage": zero_stage(plan)}
    zero.pop("cpu_offload", None)  # the older name of `offload_optimizer`
    if plan.config.parallel.cpu_offload:
        zero["offload_optimizer"] = zero.get("offload_optimizer", {}) | {"device": "cpu"}
        if zero["stage"] == 3:
            zero.setdefault("offload_param", {"device": "cpu"})
    else:
        zero.pop("offload_optimizer", None)
    return zero


def _without_auto(config: dict[str, Any], hidden_size: int) -> dict[str, Any]:
    """Fill in sizes derived from the model; drop other "auto" values for DeepSpeed's defaults."""
    square = hidden_size * hidden_size
    sizes = {
        "reduce_bucket_size": square,
        "stage3_prefetch_bucket_size": square * 9 // 10,
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    found = _plain(config)
    asked = config.get("zero_optimization")
    if isinstance(asked, dict):
        for name, size in sizes.items():
            if asked.get(name) == AUTO:
                found["zero_optimization"][name] = size
    return found


def _plain(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section without "auto" values, at any depth."""
    return {
        name: _plain(value) if isinstance(value, Mapping) else value
        for name, value in section.items()
        if value != AUTO
    }
