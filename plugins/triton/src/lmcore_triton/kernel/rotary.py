"""Rotation of pairs of channels: the angles of a position are read once for several heads."""

import triton
import triton.language as tl

__all__ = ["rotate"]


@triton.jit
def rotate(
    x,
    cos,
    sin,
    out,
    length,
    heads,
    x_batch,
    x_head,
    x_place,
    out_batch,
    out_head,
    out_place,
    cos_stride,
    sin_stride,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Rotate HEADS heads of one position, or turn them back; REST channels are copied."""
    token = tl.program_id(0).to(tl.int64)
    batch, place = token // length, token % length
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    known = channel < HALF
    mask = (head < heads)[:, None] & known[None, :]
    cosine = tl.load(cos + place * cos_stride + channel, mask=known, other=0.0).to(tl.float32)
    sine = tl.load(sin + place * sin_stride + channel, mask=known, other=0.0).to(tl.float32)
    if BACK:
        sine = -sine
    cosine, sine = cosine[None, :], sine[None, :]
    source = x + batch * x_batch + place * x_place + head[:, None] * x_head
    target = out + batch * out_batch + place * out_place + head[:, None] * out_head
    first = tl.load(source + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(target + channel[None, :], first * cosine - second * sine, mask=mask)
    tl.store(target + HALF + channel[None, :], second * cosine + first * sine, mask=mask)
    if REST > 0:
        channel = tl.arange(0, REST_BLOCK)
        mask = (head < heads)[:, None] & (channel < REST)[None, :]
        kept = tl.load(source + 2 * HALF + channel[None, :], mask=mask, other=0.0)
        tl.store(target + 2 * HALF + channel[None, :], kept, mask=mask)
