"""Bias, dropout and residual in one pass; the backward pass draws the same numbers again.

An element's number depends on the seed, its row and its column alone.  One call of Philox gives
four numbers, so a tile has four parts, side by side, that share the calls.  Seven rounds are the
fewest that pass the tests of Salmon and others (2011), who recommend ten with a margin.
"""

import triton
import triton.language as tl

__all__ = ["bias_dropout_add_backward", "bias_dropout_add_forward"]

_ROUNDS = tl.constexpr(7)


@triton.jit
def _numbers(seed, row, column):
    """Return four numbers in [0, 1) for each row and column."""
    shape = column[None, :] + row[:, None] * 0
    first = shape.to(tl.uint32)
    second = (row[:, None] + column[None, :] * 0).to(tl.uint32)
    none = first * 0
    a, b, c, d = tl.philox(seed, first, second, none, none, _ROUNDS)
    return (
        tl.uint_to_uniform_float(a),
        tl.uint_to_uniform_float(b),
        tl.uint_to_uniform_float(c),
        tl.uint_to_uniform_float(d),
    )


@triton.jit
def _add_part(
    x,
    bias,
    residual,
    out,
    x_stride,
    residual_stride,
    row,
    column,
    num_rows,
    number,
    dropped,
    factor,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    y = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
    y = y.to(tl.float32)
    if BIAS:
        y += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    if DROPOUT:
        y = tl.where(number >= dropped, y * factor, 0.0)
    base = tl.load(
        residual + row[:, None] * residual_stride + column[None, :], mask=mask, other=0.0
    )
    total = base.to(tl.float32) + y
    tl.store(out + row[:, None] * WIDTH + column[None, :], total, mask=mask)


@triton.jit
def bias_dropout_add_forward(
    x,
    bias,
    residual,
    out,
    seed,
    x_stride,
    residual_stride,
    num_rows,
    dropped,
    factor,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
):
    """Write a tile of residual + dropout(x + bias), four times PART columns wide."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * (4 * PART) + tl.arange(0, PART)
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    if DROPOUT:
        a, b, c, d = _numbers(tl.load(seed), row, column)
    # fmt: off
    _add_part(x, bias, residual, out, x_stride, residual_stride, row, column, num_rows,
              a, dropped, factor, WIDTH, BIAS, DROPOUT)
    _add_part(x, bias, residual, out, x_stride, residual_stride, row, column + PART, num_rows,
              b, dropped, factor, WIDTH, BIAS, DROPOUT)
    _add_part(x, bias, residual, out, x_stride, residual_stride, row, column + 2 * PART, num_rows,
              c, dropped, factor, WIDTH, BIAS, DROPOUT)
    _add_part(x, bias, residual, out, x_stride, residual_stride, row, column + 3 * PART, num_rows,
              d, dropped, factor, WIDTH, BIAS, DROPOUT)
    # fmt: on


@triton.jit
def _grad_part(
    grad,
    grad_x,
    grad_stride,
    row,
    column,
    num_rows,
    number,
    dropped,
    factor,
    WIDTH: tl.constexpr,
    DROPOUT: tl.constexpr,
    WRITE: tl.constexpr,
):
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    result = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    if DROPOUT:
        result = tl.where(number >= dropped, result * factor, 0.0)
    if WRITE:
        tl.store(grad_x + row[:, None] * WIDTH + column[None, :], result, mask=mask)
    return result


@triton.jit
def bias_dropout_add_backward(
    grad,
    grad_x,
    bias_parts,
    seed,
    grad_stride,
    num_rows,
    dropped,
    factor,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    WRITE: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
):
    """Write x's gradient of every so many rows of some columns, and its sum over the rows."""
    column = tl.program_id(0) * (4 * PART) + tl.arange(0, PART)
    part = tl.program_id(1)
    sum_a = tl.zeros([ROWS, PART], dtype=tl.float32)
    sum_b = tl.zeros([ROWS, PART], dtype=tl.float32)
    sum_c = tl.zeros([ROWS, PART], dtype=tl.float32)
    sum_d = tl.zeros([ROWS, PART], dtype=tl.float32)
    for start in range(part * ROWS, num_rows, tl.num_programs(1) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        a, b, c, d = 0.0, 0.0, 0.0, 0.0
        if DROPOUT:
            a, b, c, d = _numbers(tl.load(seed), row, column)
        # fmt: off
        sum_a += _grad_part(grad, grad_x, grad_stride, row, column, num_rows,
                            a, dropped, factor, WIDTH, DROPOUT, WRITE)
        sum_b += _grad_part(grad, grad_x, grad_stride, row, column + PART, num_rows,
                            b, dropped, factor, WIDTH, DROPOUT, WRITE)
        sum_c += _grad_part(grad, grad_x, grad_stride, row, column + 2 * PART, num_rows,
                            c, dropped, factor, WIDTH, DROPOUT, WRITE)
        sum_d += _grad_part(grad, grad_x, grad_stride, row, column + 3 * PART, num_rows,
                            d, dropped, factor, WIDTH, DROPOUT, WRITE)
        # fmt: on
    if BIAS:
        place = bias_parts + part * WIDTH + column
        tl.store(place, tl.sum(sum_a, axis=0), mask=column < WIDTH)
        tl.store(place + PART, tl.sum(sum_b, axis=0), mask=column + PART < WIDTH)
        tl.store(place + 2 * PART, tl.sum(sum_c, axis=0), mask=column + 2 * PART < WIDTH)
        tl.store(place + 3 * PART, tl.sum(sum_d, axis=0), mask=column + 3 * PART < WIDTH)
