"""Process of the `deepspeed` package that trains or loads a module and saves its checkpoint.

`python deepspeed_peer.py SETTINGS.json`, one process for each rank, with the variables of torchrun.
The module has the parameters that the settings name, of any program; its loss is of no model, but
every parameter has a gradient.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import FusedAdam
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn
from torch.optim.adamw import adamw

STEPS = 3
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}


class Fused(FusedAdam):
    """Stand-in of DeepSpeed's fused Adam, whose kernels are not compiled here.

    It counts the updates of each parameter by a number, as that one does, and computes as torch.
    """

    def __init__(self, groups: Any) -> None:
        torch.optim.Optimizer.__init__(self, groups, ADAM)
        self.set_grad_none = True

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            settings = {"beta1": beta1, "beta2": beta2, "foreach": False, "amsgrad": False}
            settings |= {key: group[key] for key in ("lr", "eps", "weight_decay")}
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                if not state:
                    state["step"] = group.get("step", 0)
                    state |= {key: torch.zeros_like(one) for key in ("exp_avg", "exp_avg_sq")}
                moments = [state["exp_avg"]], [state["exp_avg_sq"]]
                done = [torch.tensor(float(state["step"]))]
                with torch.no_grad():
                    adamw([one], [one.grad], *moments, [], done, **settings, maximize=False)
                state["step"] += 1


class Named(nn.Module):
    """Module with parameters of given names and shapes, which adds their squares to its input."""

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *owners, last = name.split(".")
            place: nn.Module = self
            for owner in owners:
                if owner not in dict(place.named_children()):
                    place.add_module(owner, Named({}))
                place = place.get_submodule(owner)
            place.register_parameter(last, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():  # each gathers its own parameters with ZeRO-3
            x = child(x)
        return x + sum((one.to(x.dtype) ** 2).mean() for one in self.parameters(recurse=False))


class Nested(Named):
    """Module that loads nested mappings, as Megatron's models do."""

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(flat(state_dict), *args, **kwargs)


def flat(content: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of nested mappings, with their names joined by dots."""
    found = {}
    for name, value in content.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": tensor for inner, tensor in flat(value).items()}
        else:
            found[name] = value
    return found


def logits(embedding: Named, x: Tensor) -> Tensor:
    """Use the embedding a second time, as a tied output does."""
    return x * (1 + embedding.word_embeddings.weight.to(x.dtype).mean())


def pipeline(layers: list[dict[str, list[int]]], stages: int) -> PipelineModule:
    """Return a pipeline as Megatron-DeepSpeed's: a function, the embedding, blocks, the norm."""
    embedding, *rest = layers
    specs: list[Any] = [
        lambda x: x,
        TiedLayerSpec("embed", Named, embedding, tied_weight_attr="word_embeddings.weight"),
        *(LayerSpec(Named, layer) for layer in rest),
        TiedLayerSpec(
            "embed", Named, embedding, forward_fn=logits, tied_weight_attr="word_embeddings.weight"
        ),
    ]
    return PipelineModule(
        specs, num_stages=stages, loss_fn=lambda x, _: x.mean(), partition_method="uniform"
    )


def main(settings: dict[str, Any]) -> None:
    """Train, or load, and save."""
    get_accelerator().set_device(0)
    dist.init_process_group("gloo")
    # Before DeepSpeed connects: it would compile an op that leaves shared memory behind.
    for name, built in deepspeed.git_version_info.installed_ops.items():
        if not built:
            deepspeed.ops.__compatible_ops__[name] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    torch.manual_seed(settings.get("seed", 0))
    stages = settings.get("stages", 0)
    model = pipeline(settings["layers"], stages) if stages else Nested(settings["shapes"])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": settings["zero"], "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": settings.get("universal", False)},
    }
    if settings["dtype"] == "bfloat16":
        config["bf16"] = {"enabled": True}
    if settings["dtype"] == "float16":
        get_accelerator().is_fp16_supported = lambda: True
        config["fp16"] = {"enabled": True, "initial_scale_power": 12}
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = Fused(groups) if settings.get("fused") else torch.optim.AdamW(groups, **ADAM)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if "load" in settings:
        weights_only = not settings.get("universal", False)
        found, _ = engine.load_checkpoint(
            settings["load"],
            load_module_only=weights_only,
            load_optimizer_states=not weights_only,
            load_lr_scheduler_states=False,
        )
        assert found is not None, "nothing was loaded"
    else:
        train(engine, stages)
    weights = {}
    for name, parameter in model.named_parameters():
        whole = safe_get_full_fp32_param(parameter) if settings["zero"] else None
        weights[name] = (parameter.detach().float() if whole is None else whole).clone()
    torch.save(weights, f"{settings['out']}.{dist.get_rank()}.weights")
    args = settings.get("args")
    state = {} if args is None else {"args": argparse.Namespace(**args), "iteration": STEPS}
    if args is not None:
        state["universal_checkpoint_info"] = settings.get("universal_info", {})
    engine.save_checkpoint(settings["out"], client_state=state)
    if "more" in settings:
        train(engine, stages, settings["more"])
        state["iteration"] = engine.global_steps
        engine.save_checkpoint(f"{settings['out']}-later", client_state=state)
    dist.barrier()
    dist.destroy_process_group()


def train(engine: Any, stages: int, steps: int = STEPS) -> None:
    """Do a few steps, each on another input."""
    dtype = next(engine.module.parameters()).dtype
    for step in range(steps):
        x = torch.full((1, 1), 1.0 + step, dtype=dtype)
        if stages:
            engine.train_batch(iter([(x, x)] * 8))
        else:
            engine.backward(engine(x).float().mean())
            engine.step()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
