"""GELU of a sum and SwiGLU: tiles of a matrix, each read and written once."""

import triton
import triton.language as tl

__all__ = ["bias_gelu_backward", "bias_gelu_forward", "swiglu_backward", "swiglu_forward"]


@triton.jit
def _gate(y):
    """Return sigmoid(2 u) for u = sqrt(2/pi) (y + 0.044715 y^3): (1 + tanh(u)) / 2."""
    inner = 1.5957691216057308 * y * (1.0 + 0.044715 * y * y)
    return 1.0 / (1.0 + tl.exp(-inner))


@triton.jit
def bias_gelu_forward(
    x,
    bias,
    out,
    x_stride,
    num_rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a tile of gelu(x + bias)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
    added = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    y = values.to(tl.float32) + added[None, :]
    tl.store(out + row[:, None] * WIDTH + column[None, :], y * _gate(y), mask=mask)


@triton.jit
def bias_gelu_backward(
    grad,
    x,
    bias,
    grad_x,
    bias_parts,
    grad_stride,
    x_stride,
    num_rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of every so many rows of some columns, and their sum over the rows."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    added = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    for_bias = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(part * ROWS, num_rows, tl.num_programs(1) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
        values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
        incoming = tl.load(
            grad + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0
        ).to(tl.float32)
        y = values.to(tl.float32) + added
        gate = _gate(y)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * y * y)
        result = incoming * (gate + y * gate * (1.0 - gate) * slope)
        tl.store(grad_x + row[:, None] * WIDTH + column[None, :], result, mask=mask)
        for_bias += result
    tl.store(bias_parts + part * WIDTH + column, tl.sum(for_bias, axis=0), mask=column < WIDTH)


@triton.jit
def swiglu_forward(
    x,
    out,
    x_stride,
    num_rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a tile of silu(gate) * up; a row of x has WIDTH gates and then as many ups."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    place = x + row[:, None] * x_stride + column[None, :]
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row[:, None] * WIDTH + column[None, :], result, mask=mask)


@triton.jit
def swiglu_backward(
    grad,
    x,
    grad_x,
    grad_stride,
    x_stride,
    num_rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of a tile's gates and ups."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    place = x + row[:, None] * x_stride + column[None, :]
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=mask, other=0.0).to(tl.float32)
    incoming = tl.load(
        grad + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0
    ).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    open_gate = gate * share
    target = grad_x + row[:, None] * (2 * WIDTH) + column[None, :]
    tl.store(target, incoming * up * (share + open_gate * (1.0 - share)), mask=mask)
    tl.store(target + WIDTH, incoming * open_gate, mask=mask)
