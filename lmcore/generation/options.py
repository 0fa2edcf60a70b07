"""Values of the options of generation, shared by commands and server; torch-free."""

from __future__ import annotations

__all__ = [
    "MAX_BEAM_WIDTH",
    "MAX_LENGTH_PENALTY",
    "MAX_LOGPROBS",
    "MAX_SEED",
    "NUM_SEEDS",
    "QUANTIZATIONS",
    "precision_of",
]

MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 128
MAX_LENGTH_PENALTY = 10.0  # a larger exponent could make the score of a text infinite
MAX_SEED = 2**63 - 1
NUM_SEEDS = MAX_SEED + 1
"""A negative seed counts from here, as does the one after `MAX_SEED`."""
QUANTIZATIONS = ("int8", "int4")
"""Values of `--quantization`."""


def precision_of(precision: str | None, quantization: str | None) -> str | None:
    """Return the precision policy to generate in; None: the device's default.

    Products with quantized weights have kernels for bfloat16, so that it is their default.

    Args:
        precision: Policy that the user chose; None: not chosen.
        quantization: One of `QUANTIZATIONS`; None: weights are not quantized.
    """
    return "bf16" if precision is None and quantization is not None else precision
