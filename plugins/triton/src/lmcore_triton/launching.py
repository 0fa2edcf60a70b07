"""Launching of kernels: directly in eager mode, as custom ops of torch if a call is traced.

A call of one of torch's custom ops costs about 20 microseconds of the host's time, and 55 more in
the backward pass, which a step in eager mode would wait for.  A compiler, or fake tensors, on the
other hand need an op that they can describe without running it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.library import triton_op
from torch.nn import Parameter

__all__ = [
    "column_block",
    "is_traced",
    "kernel_op",
    "matrix_of",
    "num_parts",
    "power_of_two",
    "warps_for",
]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_PROGRAMS = 1056
"""Programs that share a sum over rows: a few for each multiprocessor of a large GPU.  The number
does not depend on the device, so that equal inputs give equal sums on all of them."""


def is_traced(*tensors: object) -> bool:
    """Return True if a call is traced, and its tensors are symbolic."""
    if torch.compiler.is_compiling():
        return True
    return any(
        isinstance(tensor, Tensor) and type(tensor) not in (Tensor, Parameter) for tensor in tensors
    )


def kernel_op(
    name: str,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Register a function that launches kernels as an op, which is called where it is traced.

    The function changes none of its arguments, and consists of tensor operations and of kernels
    that it takes from `wrap_triton` if `is_traced`.
    """

    def register(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        op: Callable[Arguments, Result] = triton_op(
            f"lmcore_triton::{name}", function, mutates_args=()
        )

        @functools.wraps(function)
        def call(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            if is_traced(*arguments):
                return op(*arguments, **named)
            return function(*arguments, **named)

        return call

    return register


def matrix_of(x: Tensor) -> Tensor:
    """Return all rows of the last dim as a matrix whose columns are contiguous; a view if possible.

    An empty tensor gives no rows.
    """
    width = x.shape[-1]
    if x.numel() == 0:
        return x.new_empty(0, width)
    rows = x.reshape(-1, width)
    return rows if rows.stride(1) == 1 or width == 1 else rows.contiguous()


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is not under *count*."""
    return 1 << max(0, count - 1).bit_length()


def column_block(width: int, most: int) -> int:
    """Return how many columns a tile has: a power of two, little of the last tile being idle."""
    block = min(most, power_of_two(width))
    while block > 128 and width % block and -width % block > width // 16:
        block //= 2
    return block


def num_parts(num_rows: int, rows: int, columns: int = 1) -> int:
    """Return how many programs share the rows of each of *columns* blocks of columns."""
    tiles = -(-num_rows // rows)
    return max(1, min(tiles, _PROGRAMS // columns))


def warps_for(elements: int) -> int:
    """Return how many warps work on a tile: eight elements a thread, within limits."""
    return max(1, min(16, elements // 256))
