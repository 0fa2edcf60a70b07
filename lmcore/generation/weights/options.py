"""Names of quantization for the command line; torch-free."""

from __future__ import annotations

__all__ = ["QUANTIZATIONS", "precision_of"]

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
