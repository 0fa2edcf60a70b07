"""The configuration that DeepSpeed gets: a run's settings, and what its file has besides."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmcore.config.foreign.deepspeed_file import AUTO

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan

__all__ = ["deepspeed_config", "zero_stage"]

_DEFAULT_STAGE = 1
"""What is sharded where neither the settings nor the file say."""

_OURS = ("optimizer", "scheduler", "activation_checkpointing", "checkpoint", "dataloader_drop_last")
"""Sections of a file that are settings here or change nothing, and are not passed on."""

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def zero_stage(plan: RunPlan) -> int:
    """Return what DeepSpeed shards: 1 optimizer state, 2 gradients too, 3 weights too."""
    asked = plan.config.parallel.zero_stage
    return _DEFAULT_STAGE if asked is None else asked


def deepspeed_config(
    plan: RunPlan, content: Mapping[str, Any], *, compute: str, reduce: str
) -> dict[str, Any]:
    """Return the configuration.

    Learning rate, weight decay and the loss scale are not in it: the engine of lmcore sets the
    rate of every step, the update is its own, and so are the dynamics of the scale.

    Args:
        plan: The run; what the file says of its settings is in it.
        content: The file; empty where there is none.
        compute: Dtype of the factors of products, "bfloat16".
        reduce: Dtype in which gradients are summed.
    """
    config = {name: copy.deepcopy(value) for name, value in content.items() if name not in _OURS}
    config = _without_auto(config, plan.config.model.hidden_size)
    half = _DTYPES[compute] if compute in {"bfloat16", "float16"} else None
    for name in ("fp16", "bf16", "bfloat16"):
        config.pop(name, None)
    if half is not None:
        config[half] = {"enabled": True}
        # A scale that stays, which the engine replaces at every step.
        config[half] |= {"loss_scale": 1.0} if half == "fp16" else {}
        config.setdefault("communication_data_type", _DTYPES[reduce])
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", _DTYPES[reduce])
    config |= {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.config.training.micro_batch_size,
        "gradient_accumulation_steps": plan.num_micro_batches,
        "gradient_clipping": plan.config.optimizer.clip_grad,
        "zero_optimization": _zero(plan, config.get("zero_optimization", {})),
        # The update is the run's own, elementwise, which any partition bears; on the host too.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return config


def _zero(plan: RunPlan, section: Mapping[str, Any]) -> dict[str, Any]:
    zero = dict(section) | {"stage": zero_stage(plan)}
    zero.pop("cpu_offload", None)  # the older name of what follows
    if plan.config.parallel.cpu_offload:
        zero["offload_optimizer"] = zero.get("offload_optimizer", {}) | {"device": "cpu"}
        if zero["stage"] == 3:
            zero.setdefault("offload_param", {"device": "cpu"})
    else:
        zero.pop("offload_optimizer", None)
    return zero


def _without_auto(config: dict[str, Any], hidden_size: int) -> dict[str, Any]:
    """Fill in the sizes that follow from the model; DeepSpeed's defaults stand for the rest."""
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
    """Return a section without the values that are "auto", at any depth."""
    return {
        name: _plain(value) if isinstance(value, Mapping) else value
        for name, value in section.items()
        if value != AUTO
    }
