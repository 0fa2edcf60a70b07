"""Replacement of the arithmetic of torch's Adam and AdamW by the device's `adamw`.

Only the update of the weights is replaced: `step` with its hooks, closures and learning-rate
schedulers stays torch's, and so do the state and its names.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from lmcore.library.module_kernels.choice import Choice
from lmcore.library.module_kernels.report import KernelReport
from lmcore.library.op_calls import OpCalls

__all__ = ["is_changed", "replace_update"]

_METHOD = "_init_group"
"""Method of the optimizer that collects a group's tensors before they are updated."""

_OTHER_OPTIONS = ("amsgrad", "maximize", "capturable", "differentiable", "fused")


def is_changed(optimizer: Optimizer) -> bool:
    """Return True if the optimizer runs a kernel of `use_kernels`."""
    return _METHOD in vars(optimizer)


def replace_update(optimizer: Optimizer, calls: OpCalls, report: KernelReport) -> None:
    """Update the weights by the device's kernel, in each group whose options the op has."""
    part = type(optimizer).__name__
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    choice = Choice(calls, "adamw", parameters[0].dtype)
    reason = choice.reason
    if type(optimizer) not in {Adam, AdamW}:
        reason = "only the optimizers `Adam` and `AdamW` of torch are replaced"
    elif reason is None:
        reasons = [_other_case(group) for group in optimizer.param_groups]
        reason = reasons[0] if all(reasons) else None
    if reason is not None:
        report.add_kept(part, len(parameters), reason)
        return
    report.changes.on_undo(lambda: _move_steps(optimizer))
    method = MethodType(_init_group(choice, report), optimizer)
    report.changes.set_attribute(optimizer, _METHOD, method)
    report.add_replaced(part, len(parameters), choice.resolution)


def _other_case(group: dict[str, Any]) -> str | None:
    """Return why the update of a group is not the op; None if it is."""
    given = [name for name in _OTHER_OPTIONS if group.get(name)]
    if given:
        return f"`{given[0]}=True`"
    if group["weight_decay"] and not group["decoupled_weight_decay"]:
        return "weight decay is added to the gradient"
    if any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"])):
        return "its learning rate or betas are tensors"
    return None


def _init_group(choice: Choice, report: KernelReport) -> Callable[..., bool]:
    """Return the method that collects a group's tensors, updates them, and leaves none."""

    def init_group(self: Any, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = type(self)._init_group(self, group, *lists)  # noqa: SLF001
        if torch.compiler.is_compiling() or not lists[0]:
            return has_complex
        if (reason := _other_case(group)) is not None:
            report.own_calls[f"{type(self).__name__}: {reason}"] += 1
            return has_complex
        params, grads, exp_avgs, exp_avg_sqs, _, steps = lists
        places: dict[torch.dtype, list[int]] = {}
        others: list[int] = []
        for place, (param, grad) in enumerate(zip(params, grads, strict=True)):
            taken = param.is_floating_point() and choice.takes(param, grad)
            (places.setdefault(param.dtype, []) if taken else others).append(place)
        beta1, beta2 = group["betas"]
        for chosen in places.values():
            for place in chosen:
                steps[place] = _on_device(self.state[params[place]], params[place])
            weights, *tensors = (
                [_local(each[place]) for place in chosen]
                for each in (params, grads, exp_avgs, exp_avg_sqs, steps)
            )
            choice.call(
                weights,
                *tensors,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                epsilon=group["eps"],
                weight_decay=group["weight_decay"],
            )
            torch.autograd.graph.increment_version(weights)  # fused kernels do not
        for each in (params, grads, exp_avgs, exp_avg_sqs, steps):
            each[:] = [each[place] for place in others]
        return has_complex

    return init_group


def _on_device(state: dict[str, Any], param: Tensor) -> Tensor:
    """Return the number of updates of a weight, on its device; torch keeps it on the host."""
    step: Tensor = state["step"]
    if step.device != param.device:
        step = state["step"] = step.to(param.device)
    return step


def _move_steps(optimizer: Optimizer) -> None:
    """Move the numbers of updates to the host, as torch's own code expects them."""
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            continue
        for param in group["params"]:
            state = optimizer.state.get(param)
            if state:
                state["step"] = state["step"].cpu()


def _local(tensor: Tensor) -> Tensor:
    """Return the local part of a sharded tensor; other tensors unchanged."""
    to_local = getattr(tensor, "to_local", None)
    local: Tensor = tensor if to_local is None else to_local()
    return local
