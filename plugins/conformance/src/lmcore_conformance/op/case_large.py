"""Inputs of the sizes that real models have: head dims, widths, rows, and prime sizes.

Made when they are needed, because they take memory and time.  Shapes as in `op.case`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from lmcore_conformance.op.case import (
    Case,
    added_case,
    attention_case,
    entropy_case,
    gelu_case,
    head_case,
    linear_case,
    norm_case,
    padding,
    randn,
    rotary_case,
    softmax_case,
    swiglu_case,
)

__all__ = [
    "BATCHED",
    "PRIMES",
    "block_case",
    "huge_cases",
    "large_cases",
    "tall_case",
    "width_cases",
]

PRIMES = "prime sizes"
"""Label of the case that is also computed with arguments that are not contiguous."""

_LARGE = "1024 rows and columns"
_WIDE = "8192 columns"


def _norms(op: str) -> list[Case]:
    return [
        norm_case(op, _LARGE, randn(1, 1024, 1024)),
        norm_case(op, _WIDE, randn(1, 3, 8192)),
        norm_case(op, PRIMES, randn(1, 1031, 257)),
    ]


_MAKERS: Mapping[str, Callable[[], list[Case]]] = {
    "attention": lambda: [
        attention_case("1024 queries and keys", (1, 1, 1024, 64), causal=True),
        attention_case("8192 keys", (1, 1, 3, 128), keys=8192, causal=True),
        attention_case(PRIMES, (1, 2, 1031, 32), causal=True),
    ],
    "layer_norm": lambda: _norms("layer_norm"),
    "rms_norm": lambda: _norms("rms_norm"),
    "linear": lambda: [
        linear_case(_LARGE, randn(1, 1024, 1024), 1024),
        linear_case(_WIDE, randn(1, 3, 8192), 131),
        linear_case(PRIMES, randn(1, 1031, 257), 263),
    ],
    "bias_gelu": lambda: [
        gelu_case(_LARGE, randn(1, 1024, 1024)),
        gelu_case(_WIDE, randn(1, 3, 8192)),
        gelu_case(PRIMES, randn(1, 1031, 257)),
    ],
    "swiglu": lambda: [
        swiglu_case(_LARGE, randn(1, 1024, 2048)),
        swiglu_case(_WIDE, randn(1, 3, 16384)),
        swiglu_case(PRIMES, randn(1, 1031, 2 * 257)),
    ],
    "bias_dropout_add": lambda: [
        added_case(_LARGE, 1, 1024, 1024),
        added_case(_WIDE, 1, 3, 8192),
        added_case(PRIMES, 1, 1031, 257),
    ],
    "scaled_masked_softmax": lambda: [
        softmax_case("1024 queries and keys", 40 * randn(1, 1, 1024, 1024), None, 0.125),
        softmax_case("8192 keys", 40 * randn(1, 1, 3, 8192), None, 0.125),
        softmax_case(PRIMES, 9 * randn(1, 1, 1031, 257), padding(1, 257), 0.3),
    ],
    "rotary_embedding": lambda: [
        rotary_case("1024 positions", randn(1, 2, 1024, 128), 64),
        rotary_case("8192 positions", randn(1, 1, 8192, 64), 32),
        rotary_case(PRIMES, randn(1, 3, 1031, 67), 31),
    ],
    "cross_entropy": lambda: [
        entropy_case("1024 tokens", randn(1024, 1024)),
        entropy_case("a vocabulary of 50257", randn(3, 50257)),
        entropy_case(PRIMES, randn(1031, 257)),
    ],
    "linear_cross_entropy": lambda: [
        head_case("1024 tokens", 1024, 1024, 512),
        head_case("a vocabulary of 50257", 3, 64, 50257),
        head_case(PRIMES, 1031, 67, 257),
    ],
}


def large_cases(op: str) -> list[Case]:
    """Return the large cases of an op, in float64 on the host."""
    return _MAKERS[op]()


HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256)
"""Head dims of published models."""

WIDTHS = (768, 1024, 1280, 1536, 1600, 2048, 2560, 3072, 4096, 5120)
"""Hidden sizes of published models."""

_WIDTH_MAKERS: Mapping[str, Callable[[int], Case]] = {
    "attention": lambda n: attention_case(f"head dim {n}", (1, 2, 19, n), causal=True),
    "rotary_embedding": lambda n: rotary_case(f"head dim {n}", randn(1, 2, 19, n), n // 2),
    "layer_norm": lambda n: norm_case("layer_norm", f"width {n}", randn(1, 5, n)),
    "rms_norm": lambda n: norm_case("rms_norm", f"width {n}", randn(1, 5, n)),
    "linear": lambda n: linear_case(f"width {n}", randn(1, 5, n), 131),
    "bias_gelu": lambda n: gelu_case(f"width {n}", randn(1, 5, n)),
    "swiglu": lambda n: swiglu_case(f"width {n}", randn(1, 5, 2 * n)),
    "bias_dropout_add": lambda n: added_case(f"width {n}", 1, 5, n),
    "scaled_masked_softmax": lambda n: softmax_case(
        f"{n} keys", 9 * randn(1, 2, 5, n), padding(1, n), 0.3
    ),
    "cross_entropy": lambda n: entropy_case(f"vocabulary of {n}", randn(5, n)),
    "linear_cross_entropy": lambda n: head_case(f"width {n}", 5, n, 131),
}


_LONGEST = 2**16 + 5
"""More positions than 16 bits have."""

_VOCABULARY = 2**17
_TARGETS = (100_000, 2**16, 5, _VOCABULARY - 1)
"""Tokens whose numbers need 17 bits, and one that does not."""


def _with_targets(case: Case, place: int) -> Case:
    return replace(case, others={**case.others, place: torch.tensor(_TARGETS)})


def _attention_to_both_ends() -> Case:
    """Return a case with two equal queries, whose attention is on the first key and a last one."""
    case = attention_case(f"{_LONGEST:,} keys", (1, 1, 2, 8), keys=_LONGEST, causal=True)
    q_BNSD, k_BNTD = case.tensors[0], case.tensors[1]
    q_BNSD[:, :, 1] = q_BNSD[:, :, 0]
    k_BNTD[:, :, 0] = k_BNTD[:, :, -2] = 5 * q_BNSD[:, :, 0]
    return case


def _softmax_of_both_ends() -> Case:
    """Return a case whose first and last key outweigh the many others."""
    x_BNST = 9 * randn(1, 1, 2, _LONGEST)
    x_BNST[..., 0] = x_BNST[..., -1] = 60.0
    return softmax_case(f"{_LONGEST:,} keys", x_BNST, None, 0.3)


_WIDEST_MAKERS: Mapping[str, Callable[[], Case]] = {
    "attention": _attention_to_both_ends,
    "rotary_embedding": lambda: rotary_case(f"{_LONGEST:,} positions", randn(1, 1, _LONGEST, 8), 4),
    "layer_norm": lambda: norm_case("layer_norm", "width 16,384", randn(1, 2, 16_384)),
    "rms_norm": lambda: norm_case("rms_norm", "width 16,384", randn(1, 2, 16_384)),
    "linear": lambda: linear_case("width 32,768", randn(1, 2, 32_768), 5),
    "bias_gelu": lambda: gelu_case("width 32,768", randn(1, 2, 32_768)),
    "swiglu": lambda: swiglu_case("width 32,768", randn(1, 2, 2 * 32_768)),
    "bias_dropout_add": lambda: added_case("width 32,768", 1, 2, 32_768),
    "scaled_masked_softmax": _softmax_of_both_ends,
    "cross_entropy": lambda: _with_targets(
        entropy_case(f"vocabulary of {_VOCABULARY:,}", randn(len(_TARGETS), _VOCABULARY)), 1
    ),
    "linear_cross_entropy": lambda: _with_targets(
        head_case(f"vocabulary of {_VOCABULARY:,}", len(_TARGETS), 8, _VOCABULARY), 2
    ),
}


def width_cases(op: str) -> list[Case]:
    """Return small cases of an op: each head dim or width of published models, and a wide one.

    That has more channels than the models, or a vocabulary or positions above 65,536.
    """
    sizes = HEAD_DIMS if op in {"attention", "rotary_embedding"} else WIDTHS
    return [*(_WIDTH_MAKERS[op](size) for size in sizes), _WIDEST_MAKERS[op]()]


_ROWS, _COLUMNS = 2**14 + 1, 257
_HUGE = f"{_ROWS:,} rows, {_ROWS * _COLUMNS:,} elements"

_HUGE_MAKERS: Mapping[str, Callable[[], Case]] = {
    "attention": lambda: attention_case(
        "65,792 rows, 4,210,688 elements", (257, 4, 64, 64), causal=True
    ),
    "rotary_embedding": lambda: rotary_case(
        "32,784 rows, 4,196,352 elements", randn(1, 16, 2049, 128), 64
    ),
    "scaled_masked_softmax": lambda: softmax_case(
        "16,388 rows, 4,211,716 elements", 9 * randn(1, 4, 4097, 257), padding(1, 257), 0.3
    ),
    "layer_norm": lambda: norm_case("layer_norm", _HUGE, randn(1, _ROWS, _COLUMNS)),
    "rms_norm": lambda: norm_case("rms_norm", _HUGE, randn(1, _ROWS, _COLUMNS)),
    "linear": lambda: linear_case(_HUGE, randn(1, _ROWS, _COLUMNS), 67),
    "bias_gelu": lambda: gelu_case(_HUGE, randn(1, _ROWS, _COLUMNS)),
    "swiglu": lambda: swiglu_case(_HUGE, randn(1, _ROWS, 2 * _COLUMNS)),
    "bias_dropout_add": lambda: added_case(_HUGE, 1, _ROWS, _COLUMNS),
    "cross_entropy": lambda: entropy_case(_HUGE, randn(_ROWS, _COLUMNS)),
    "linear_cross_entropy": lambda: head_case(_HUGE, _ROWS, _COLUMNS, 67),
}

_MOST_ROWS = 2**16 + 1
_TALL = f"{_MOST_ROWS:,} rows"
"""More than the 65,535 blocks that the second and third dim of a grid have on many devices."""

_TALL_MAKERS: Mapping[str, Callable[[], Case]] = {
    "attention": lambda: attention_case(
        "65,552 heads of all samples", (4097, 16, 3, 8), causal=True
    ),
    "rotary_embedding": lambda: rotary_case("65,552 heads", randn(4097, 16, 1, 8), 4),
    "scaled_masked_softmax": lambda: softmax_case(
        "65,552 heads", 9 * randn(4097, 16, 1, 7), padding(4097, 7), 0.3
    ),
    "layer_norm": lambda: norm_case("layer_norm", _TALL, randn(1, _MOST_ROWS, 8)),
    "rms_norm": lambda: norm_case("rms_norm", _TALL, randn(1, _MOST_ROWS, 8)),
    "linear": lambda: linear_case(_TALL, randn(1, _MOST_ROWS, 16), 8),
    "bias_gelu": lambda: gelu_case(_TALL, randn(1, _MOST_ROWS, 8)),
    "swiglu": lambda: swiglu_case(_TALL, randn(1, _MOST_ROWS, 16)),
    "bias_dropout_add": lambda: added_case(_TALL, 1, _MOST_ROWS, 8),
    "cross_entropy": lambda: entropy_case(_TALL, randn(_MOST_ROWS, 9)),
    "linear_cross_entropy": lambda: head_case(_TALL, _MOST_ROWS, 8, 9),
}


def tall_case(op: str) -> Case:
    """Return a case of an op with more than 65,535 rows or heads, and few elements."""
    return _TALL_MAKERS[op]()


def huge_cases(op: str) -> list[Case]:
    """Return two cases of an op.

    One has more than 16,384 rows and 2^22 elements, the other more than 65,535 rows or heads.
    """
    return [_HUGE_MAKERS[op](), tall_case(op)]


_BLOCK_MAKERS: Mapping[str, Callable[[str], Case]] = {
    "attention": lambda label: attention_case(label, (1, 3, 5, 64), causal=True),
    "rotary_embedding": lambda label: rotary_case(label, randn(1, 3, 5, 64), 32),
    "scaled_masked_softmax": lambda label: softmax_case(
        label, 9 * randn(1, 3, 5, 67), padding(1, 67), 0.3
    ),
    "layer_norm": lambda label: norm_case("layer_norm", label, randn(1, 7, 257)),
    "rms_norm": lambda label: norm_case("rms_norm", label, randn(1, 7, 257)),
    "linear": lambda label: linear_case(label, randn(1, 7, 67), 67),
    "bias_gelu": lambda label: gelu_case(label, randn(1, 7, 257)),
    "swiglu": lambda label: swiglu_case(label, randn(1, 7, 2 * 257)),
    "bias_dropout_add": lambda label: added_case(label, 1, 7, 257),
    "cross_entropy": lambda label: entropy_case(label, randn(7, 257)),
    "linear_cross_entropy": lambda label: head_case(label, 7, 257, 5),
}

BATCHED: Mapping[str, tuple[int, ...]] = {
    "attention": (0, 1, 2),
    "rotary_embedding": (0,),
    "scaled_masked_softmax": (0, 1),
    "layer_norm": (0,),
    "rms_norm": (0,),
    "linear": (0,),
    "bias_gelu": (0,),
    "swiglu": (0,),
    "bias_dropout_add": (0, 2),
    "cross_entropy": (0, 1),
    "linear_cross_entropy": (0, 2, 3),
}
"""Positions of the arguments whose first dim counts samples or tokens."""


def block_case(op: str, label: str) -> Case:
    """Return a small case of an op, which is repeated along the first dim for a large call."""
    return _BLOCK_MAKERS[op](label)
