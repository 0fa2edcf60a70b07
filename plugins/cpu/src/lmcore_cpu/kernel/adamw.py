"""AdamW in float32 by `lmcore_cpu._kernels`, whose new moments may go to other memory.

Elements have the values of torch's fused kernel to the bit, apart from the last few of a weight, in
which that kernel rounds in another way.  335 MB of weights took 0.048 s, by torch 0.051 s; with
other memory for the moments 0.051 s, where a copy of the moments would take 0.035 s besides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lmcore.accelerator.op import torch_kernels
from lmcore_cpu.kernel.native import instructions, kernels

__all__ = ["adamw"]


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
    new_moments: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
) -> None:
    """Update params in place, and moments in place or to *new_moments*.

    torch's fused kernel updates what is not in float32 and contiguous, and everything without
    compiled code.
    """
    found = kernels()
    firsts, seconds = new_moments or (exp_avgs, exp_avg_sqs)
    rows = list(zip(params, grads, exp_avgs, exp_avg_sqs, firsts, seconds, strict=True))
    if found is None or not all(_is_plain(tensor) for row in rows for tensor in row):
        if new_moments is not None:
            _copy(exp_avgs, firsts)
            _copy(exp_avg_sqs, seconds)
        torch_kernels.adamw(
            *(params, grads, firsts, seconds, steps),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
            weight_decay=weight_decay,
        )
        return
    torch._foreach_add_(list(steps), 1)
    found.adamw(
        instructions()[0],
        [(*(tensor.data_ptr() for tensor in row), row[0].numel()) for row in rows],
        [_factors(step.item(), lr, beta1, beta2, epsilon, weight_decay) for step in steps],
        torch.get_num_threads(),
    )
    torch.autograd.graph.increment_version([*params, *firsts, *seconds])


def _factors(
    count: float, lr: float, beta1: float, beta2: float, epsilon: float, weight_decay: float
) -> tuple[float, ...]:
    """Return `AdamwStep` of `native/cpu/kernels.hpp`."""
    return (
        1 - lr * weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**count) ** 0.5,
        epsilon,
        -lr / (1 - beta1**count),
    )


def _is_plain(tensor: Tensor) -> bool:
    plain = type(tensor) in {Tensor, nn.Parameter} and tensor.dtype == torch.float32
    return plain and tensor.is_contiguous() and not tensor.is_neg()


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
