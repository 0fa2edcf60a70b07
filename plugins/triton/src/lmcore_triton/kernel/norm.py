"""Layer norm and RMS norm: a row at a time, kept in registers between its two sums."""

import triton
import triton.language as tl

__all__ = ["norm_backward", "norm_forward"]


@triton.jit
def norm_forward(
    x,
    weight,
    bias,
    out,
    mean,
    scale,
    x_stride,
    num_rows,
    epsilon,
    WIDTH: tl.constexpr,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize ROWS rows; keep the factor of each and, where CENTRED, its mean."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
    values = values.to(tl.float32)
    gain = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if CENTRED:
        middle = tl.sum(values, axis=1) / WIDTH
        tl.store(mean + row, middle, mask=row < num_rows)
        values = tl.where(mask, values - middle[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + epsilon)
    tl.store(scale + row, factor, mask=row < num_rows)
    result = values * factor[:, None] * gain[None, :]
    if CENTRED:
        offset = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        result += offset[None, :]
    tl.store(out + row[:, None] * WIDTH + column[None, :], result, mask=mask)


@triton.jit
def norm_backward(
    grad,
    x,
    weight,
    mean,
    scale,
    grad_x,
    weight_parts,
    bias_parts,
    grad_stride,
    x_stride,
    num_rows,
    WIDTH: tl.constexpr,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the rows' gradients, and this program's part of the sums for gain and offset.

    A program takes every so many rows, always the same ones, so that the sums are always the same.
    """
    part = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    gain = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    for_weight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for_bias = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(part * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
        incoming = tl.load(
            grad + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0
        ).to(tl.float32)
        values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
        values = values.to(tl.float32)
        factor = tl.load(scale + row, mask=row < num_rows, other=0.0)[:, None]
        if CENTRED:
            middle = tl.load(mean + row, mask=row < num_rows, other=0.0)[:, None]
            values = tl.where(mask, values - middle, 0.0)
        normal = values * factor
        scaled = incoming * gain
        result = scaled - normal * (tl.sum(normal * scaled, axis=1) / WIDTH)[:, None]
        if CENTRED:
            result -= (tl.sum(scaled, axis=1) / WIDTH)[:, None]
            for_bias += incoming
        tl.store(
            grad_x + row[:, None] * WIDTH + column[None, :],
            result * factor,
            mask=mask,
        )
        for_weight += incoming * normal
    place = part * WIDTH + column
    tl.store(weight_parts + place, tl.sum(for_weight, axis=0), mask=column < WIDTH)
    if CENTRED:
        tl.store(bias_parts + place, tl.sum(for_bias, axis=0), mask=column < WIDTH)
