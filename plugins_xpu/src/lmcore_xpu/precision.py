"""The precisions of an Intel GPU: what it computes products in, and which is the default."""

from __future__ import annotations

from lmcore.accelerator import (
    Device,
    PrecisionPolicy,
    autocast_policy,
    double_precision_policy,
    full_precision_policy,
)

__all__ = ["precision_policies"]


def precision_policies(device: Device) -> list[PrecisionPolicy]:
    """Return `fp32`, `fp16`, `fp64`, and `bf16` before them where the GPU has it.

    The core refuses those whose dtype the device does not have, with that as the reason.  There is
    none in 8 bits: torch has no such products for these GPUs that train.
    """
    policies = [
        full_precision_policy(),
        autocast_policy(device, name="fp16", compute="float16", loss_scaling=True),
        double_precision_policy(),
    ]
    if "bfloat16" in device.dtypes:
        policies.append(autocast_policy(device, name="bf16", compute="bfloat16", priority=200))
    return policies
