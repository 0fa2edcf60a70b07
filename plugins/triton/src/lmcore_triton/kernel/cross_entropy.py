"""Cross entropy of rows of logits: a vocabulary does not fit in registers, so a block at a time."""

import triton
import triton.language as tl

__all__ = ["cross_entropy_backward", "cross_entropy_forward", "cross_entropy_in_place"]


@triton.jit
def _log_sum(logits, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return log(sum(exp(logits))) of a row; the sum follows the largest value as it grows."""
    largest = tl.full((), float("-inf"), dtype=tl.float32)
    total = tl.full((), 0.0, dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(logits + column, mask=column < WIDTH, other=float("-inf"))
        values = values.to(tl.float32)
        higher = tl.maximum(largest, tl.max(values, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(values - base), axis=0)
        largest = higher
    return largest + tl.log(total)


@triton.jit
def _chosen(logits, target, WIDTH: tl.constexpr):
    """Return the logit of the target; NaN where there is no such token."""
    exists = (target >= 0) & (target < WIDTH)
    return tl.load(logits + target, mask=exists, other=float("nan")).to(tl.float32)


@triton.jit
def cross_entropy_forward(
    logits, target, loss, log_sum, logits_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the loss of a row, and the logarithm that its gradient needs."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * logits_stride
    total = _log_sum(row_logits, WIDTH, BLOCK)
    tl.store(log_sum + row, total)
    tl.store(loss + row, total - _chosen(row_logits, tl.load(target + row), WIDTH))


@triton.jit
def cross_entropy_backward(
    grad,
    logits,
    target,
    log_sum,
    grad_logits,
    grad_stride,
    logits_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of a row's gradients."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    values = tl.load(logits + row * logits_stride + column, mask=mask, other=0.0)
    result = tl.exp(values.to(tl.float32) - tl.load(log_sum + row))
    result = tl.where(column == tl.load(target + row), result - 1.0, result)
    result *= tl.load(grad + row * grad_stride).to(tl.float32)
    tl.store(grad_logits + row * WIDTH + column, result, mask=mask)


@triton.jit
def cross_entropy_in_place(
    logits,
    target,
    factor,
    loss,
    WIDTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the loss of a row and, where GRADIENT, factor times its gradient over the logits."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * WIDTH
    wanted = tl.load(target + row)
    total = _log_sum(row_logits, WIDTH, BLOCK)
    tl.store(loss + row, total - _chosen(row_logits, wanted, WIDTH))
    if GRADIENT:
        # Every logit of the row has been read by all threads that take part in its sum.
        tl.debug_barrier()
        weight = tl.load(factor + row)
        for start in range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            values = tl.load(row_logits + column, mask=column < WIDTH, other=0.0)
            result = tl.exp(values.to(tl.float32) - total)
            result = tl.where(column == wanted, result - 1.0, result)
            tl.store(row_logits + column, result * weight, mask=column < WIDTH)
