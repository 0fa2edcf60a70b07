"""Weights that do not change any more: cast once, and in the layout that the device likes best."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.model.layers import Embedding, Linear

if TYPE_CHECKING:
    from lmcore.accelerator.precision import PrecisionPolicy
    from lmcore.model.protocol import CausalLM
    from lmcore.runtime.runtime import Runtime

__all__ = ["fix_weights"]

logger = logging.getLogger(__name__)

_NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def fix_weights(
    model: CausalLM, runtime: Runtime, rows: int
) -> Callable[[], AbstractContextManager[Any]]:
    """Prepare a loaded model for generation and return the context of its forward passes.

    A policy that would cast the weights of products in every pass is replaced by weights that are
    cast here: the products are the same.  The model cannot be trained afterwards.

    Args:
        model: Model on the run's device, in evaluation mode.
        runtime: Device and precision.
        rows: Usual number of rows of a product: the sequences that are decoded together.
    """
    dtype = _narrow_dtype(runtime.precision)
    make = runtime.device.constant_projection
    for module in model.modules():
        if isinstance(module, Linear):
            if dtype is not None:
                module.to(dtype)
            module.op = _fixed(module.op, module.weight, module.bias, dtype, make, rows)
        elif isinstance(module, Embedding) and dtype is not None:
            module.output_dtype = module.weight.dtype
            module.to(dtype)
    head = _fixed(_linear, model.head_weight, None, dtype, make, rows)
    model.head_projection = lambda hidden: head(hidden, model.head_weight, None)
    return runtime.precision.context if dtype is None else nullcontext


def _narrow_dtype(policy: PrecisionPolicy) -> torch.dtype | None:
    """Return the dtype of a policy that casts the factors of products; None for another policy."""
    casts = policy.prepare is None and not policy.output and policy.keep == "float32"
    return _NARROW.get(policy.compute) if casts else None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def _fixed(
    op: Callable[..., Tensor],
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    make: Callable[[Tensor, Tensor | None, int], Callable[[Tensor], Tensor] | None] | None,
    rows: int,
) -> Callable[..., Tensor]:
    """Return the op of a projection, with the weight in the device's own layout if it has one."""
    with torch.no_grad():
        projection = make(weight, bias, rows) if make is not None else None
    if projection is not None and dtype is None:
        return lambda x, _weight, _bias: projection(x)
    if projection is not None:
        return lambda x, _weight, _bias: projection(x.to(dtype))
    if dtype is not None:
        return lambda x, weight, bias: op(x.to(dtype), weight, bias)
    return op
