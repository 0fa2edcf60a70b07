"""Inputs of the sizes that real models have: thousands of rows and columns, and prime sizes.

Made when they are needed, because they take memory and time.  Shapes as in `op.case`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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

__all__ = ["PRIMES", "large_cases"]

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
