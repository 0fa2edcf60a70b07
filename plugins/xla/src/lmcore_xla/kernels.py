"""Kernels for lists of tensors, which torch's compiler traces once for all steps.

torch_xla records an operation in 0.1 ms, and an update has a dozen for each weight: to record
them in each step took longer than to run the whole step.  Compiled, they are one program that is
found by its arguments.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla
from torch import Tensor
from torch_xla.core import xla_model

from lmcore.contract.op import reference

__all__ = ["adamw", "grad_norm"]

_PROGRAM = 100
"""Weights of one program: the compiler's time grows by the square of their number."""


@torch.no_grad()
def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> None:
    """Update params and moments in place as the reference does, in a program for each 100 of them.

    What changes from step to step is an argument of the program, not a constant.
    """
    if not params:
        return
    wide = torch.float64 if any(one.dtype == torch.float64 for one in params) else torch.float32
    rates = torch.tensor([1 - lr * weight_decay, -lr], dtype=wide).to(params[0].device)
    # As one argument: the bridge of torch's compiler takes scalars that `torch.tensor` has made on
    # the device for one another.
    torch._foreach_add_(list(steps), 1)
    for number, start in enumerate(range(0, len(params), _PROGRAM)):
        some = slice(start, start + _PROGRAM)
        tensors = [list(part[some]) for part in (params, grads, exp_avgs, exp_avg_sqs)]
        counts = torch.stack(list(steps[some]))
        _run(_part_of_update(number), *tensors, counts, rates, beta1, beta2, epsilon)


@torch.no_grad()
def grad_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm over all tensors, summed in at least float32."""
    if not grads:
        return torch.zeros(())
    norm: Tensor = _run(reference.grad_norm, list(grads))
    return norm


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the compiled function.

    It would run what is recorded for its arguments alone, and give their memory to the results:
    views of them that are recorded, too, would be lost.  Random numbers stay as they were: each
    boundary advances them, and the first call has more boundaries than others.
    """
    number = xla_model.get_rng_state()
    torch_xla.sync()
    result = _compiled(function)(*arguments)
    xla_model.set_rng_state(number)
    return result


@functools.cache
def _part_of_update(number: int) -> Callable[..., Any]:
    """Return a function for one part of the weights.

    The compiler keeps eight programs for a function, fewer than a large model has parts.
    """
    code = _update.__code__.replace(co_name=f"update_{number}")
    return types.FunctionType(code, globals())


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="openxla", dynamic=False)


def _update(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    counts: Tensor,
    rates: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    """Do the update; *rates* are the factor of the decay and the negative learning rate.

    *counts* are the updates of each weight, this one among them.
    """
    decay, rate = rates[0], rates[1]
    for param, grad, exp_avg, exp_avg_sq, step in zip(
        params, grads, exp_avgs, exp_avg_sqs, counts.unbind(), strict=True
    ):
        count = step.double() if param.dtype == torch.float64 else step
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (exp_avg_sq / _weight_so_far(beta2, count)).sqrt().add(epsilon)
        change = exp_avg / (root * _weight_so_far(beta1, count)) * rate
        param.mul_(decay).add_(change)


def _weight_so_far(beta: float, count: Tensor) -> Tensor:
    """Return 1 - beta**count, accurate for small results too."""
    return -torch.expm1(count * (math.log(beta) if beta > 0 else -math.inf))
