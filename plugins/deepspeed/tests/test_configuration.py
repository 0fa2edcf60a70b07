"""The configuration that DeepSpeed gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmcore.config.load import load_config
from lmcore.config.plan import RunPlan
from lmcore.config.resolve import resolve
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate
from lmcore_deepspeed.configuration import deepspeed_config, zero_stage

pytestmark = pytest.mark.usefixtures("package_is_there")


def plan_of(line: str, world_size: int = 2) -> RunPlan:
    loaded = load_config(["--engine", "deepspeed", *line.split()])
    return resolve(
        validate(loaded, world_size=world_size), tokenizer=TokenizerIdentity(vocab_size=257)
    )


def config_of(
    line: str, content: dict[str, Any] | None = None, compute: str = "float32"
) -> dict[str, Any]:
    return deepspeed_config(plan_of(line), content or {}, compute=compute, reduce="float32")


def test_it_is_made_from_the_plan() -> None:
    """Batches, clipping and the stage are the run's; rate and decay are not DeepSpeed's."""
    line = "--micro-batch-size 4 --global-batch-size 32 --clip-grad 0.5 --zero-stage 2"
    assert config_of(line) == {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def test_the_default_shards_optimizer_state() -> None:
    """The default ZeRO stage is 1."""
    assert zero_stage(plan_of("")) == 1
    assert config_of("")["zero_optimization"] == {"stage": 1}


@pytest.mark.parametrize("compute,section", [("bfloat16", "bf16"), ("float16", "fp16")])
def test_half_precision_sums_as_the_policy_says(compute: str, section: str) -> None:
    """Gradients are exchanged and accumulated in the policy's dtype, unless the file differs."""
    made = config_of("", compute=compute)
    assert made[section]["enabled"] is True
    assert made["communication_data_type"] == "fp32"
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}
    own = {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}
    assert config_of("", own, compute)["communication_data_type"] == "bf16"
    assert config_of("", own, compute)["data_types"] == {"grad_accum_dtype": "bf16"}


def test_the_loss_scale_is_not_deepspeeds() -> None:
    """Its own dynamics are off: the engine gives it the scale of every step."""
    content = {"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 4}}
    assert config_of("", content, "float16")["fp16"] == {"enabled": True, "loss_scale": 1.0}


def test_offload_moves_what_the_stage_shards() -> None:
    """The optimizer's state, and of stage 3 the weights; the file's own details stay."""
    two = config_of("--zero-stage 2 --cpu-offload")["zero_optimization"]
    assert two == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    content = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    three = config_of("--zero-stage 3 --cpu-offload", content)["zero_optimization"]
    assert three["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert three["offload_param"] == {"device": "cpu"}
    older = {"zero_optimization": {"cpu_offload": False, "offload_optimizer": {"device": "none"}}}
    assert config_of("--zero-stage 1", older)["zero_optimization"] == {"stage": 1}


def test_the_rest_of_the_file_passes_through(tmp_path: Path) -> None:
    """DeepSpeed gets the values that are not settings here; others and idle ones are removed."""
    content = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "steps_per_print": 10,
        "activation_checkpointing": {"partition_activations": True},
        "zero_optimization": {"stage": 3, "overlap_comm": False},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    made = config_of(f"--deepspeed-config {path}", content)
    assert made["steps_per_print"] == 10
    assert made["zero_optimization"] == {"stage": 3, "overlap_comm": False}
    assert not made.keys() & {"optimizer", "activation_checkpointing"}
    assert content["zero_optimization"] == {"stage": 3, "overlap_comm": False}


def test_auto_sizes_follow_from_the_model() -> None:
    """Three sizes come from the hidden size, every other "auto" is left to DeepSpeed."""
    content = {
        "zero_optimization": {
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "overlap_comm": "auto",
        },
        "communication_data_type": "auto",
    }
    made = config_of("--hidden-size 64 --num-attention-heads 4 --zero-stage 3", content)
    assert made["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 4096,
        "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640,
    }
    assert "communication_data_type" not in made
