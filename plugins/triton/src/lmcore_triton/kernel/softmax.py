"""Softmax of scaled scores under a mask: whole rows in registers."""

import triton
import triton.language as tl

__all__ = ["softmax_backward", "softmax_forward"]


@triton.jit
def softmax_forward(
    x,
    mask,
    out,
    scale,
    x_stride,
    num_rows,
    heads,
    queries,
    mask_batch,
    mask_head,
    mask_query,
    mask_key,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the softmax of ROWS rows; a row that is hidden entirely is zeros.

    The mask is read where its strides say, which are 0 in a dim that it is broadcast over.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=there, other=0.0)
    values = values.to(tl.float32) * scale
    seen = there
    if MASKED:
        place = (row // (heads * queries)) * mask_batch
        place += (row // queries) % heads * mask_head + row % queries * mask_query
        hidden = tl.load(
            mask + place[:, None] + column.to(tl.int64)[None, :] * mask_key, mask=there, other=1
        )
        seen = there & (hidden == 0)
    values = tl.where(seen, values, float("-inf"))
    power = tl.exp(values - tl.max(values, axis=1)[:, None])
    result = power / tl.sum(power, axis=1)[:, None]
    if MASKED:
        any_seen = tl.max(seen.to(tl.int32), axis=1) > 0
        result = tl.where(any_seen[:, None], result, 0.0)
    tl.store(out + row[:, None] * WIDTH + column[None, :], result, mask=there)


@triton.jit
def softmax_backward(
    grad,
    probability,
    grad_x,
    scale,
    grad_stride,
    num_rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of ROWS rows of scores; hidden scores have probability 0, and get 0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    place = row[:, None] * WIDTH + column[None, :]
    share = tl.load(probability + place, mask=mask, other=0.0).to(tl.float32)
    incoming = tl.load(
        grad + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0
    ).to(tl.float32)
    mean = tl.sum(share * incoming, axis=1)
    tl.store(grad_x + place, share * (incoming - mean[:, None]) * scale, mask=mask)
