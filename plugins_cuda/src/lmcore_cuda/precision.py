"""The 8-bit precision of this plugin: tensorwise scaled products; torch-free until it is used."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lmcore.contract import Device, PrecisionPolicy, autocast_policy

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FORMAT", "float8_policy"]

FORMAT = "float8_e4m3fn"
"""torch's name of the format that factors are held in; gradients have a wider range, e5m2."""


def float8_policy(device: Device) -> PrecisionPolicy:
    """Return `fp8`: projections in 8 bits, everything between them as under `bf16`.

    It is never a default: users have to compare the losses.
    """

    def prepare(model: nn.Module) -> None:
        from lmcore_cuda.precision_float8 import convert

        convert(model)

    around = autocast_policy(device, name="fp8", compute="bfloat16", priority=50)
    return dataclasses.replace(
        around,
        compute=FORMAT,
        output="bfloat16",
        prepare=prepare,
        summary="dynamic tensorwise scaling",
    )
