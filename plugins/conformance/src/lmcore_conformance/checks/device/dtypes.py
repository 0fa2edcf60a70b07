"""Level 1: dtypes of `Device.dtypes` that no other check covers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.contract.dtype import dtype_name
from lmcore_conformance.registry import Failure, check, conclude

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_OWN_CHECK = {"float32", "float64", "bfloat16", "float16"}
_EIGHT_BITS = "float8_"
_ROWS, _INNER, _COLUMNS = 48, 64, 32  # multiples of 16, as products of 8-bit numbers need


def _ordinary(bench: Bench, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return a product, its factors' exact product, and the largest number in it."""
    left, right = (
        (3 * bench.values(*shape, seed=seed)).to(dtype)
        for seed, shape in enumerate(((_ROWS, _INNER), (_INNER, _COLUMNS)))
    )
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = left.to(wide) @ right.to(wide)
    found = left.to(bench.torch_device) @ right.to(bench.torch_device)
    bench.device.synchronize()
    if found.dtype != dtype:
        raise Failure(f"products of {dtype} are {found.dtype}")
    return found.cpu().to(wide), exact, exact.abs().max()


def _scaled(bench: Bench, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same for 8-bit numbers, whose product is scaled and wider.

    A dtype with two bits of mantissa is for gradients: it is multiplied by one with three.
    """
    name = dtype_name(dtype)
    other = getattr(torch, name.replace("e5m2", "e4m3" if name.endswith("fnuz") else "e4m3fn"))
    left = bench.values(_ROWS, _INNER).to(dtype)
    right = bench.values(_COLUMNS, _INNER, seed=1).to(other)
    exact = left.double() @ right.double().T
    scales = torch.tensor(2.0), torch.tensor(0.25)
    found = torch._scaled_mm(  # noqa: SLF001 - torch's only product of 8-bit numbers
        left.to(bench.torch_device),
        right.to(bench.torch_device).t(),
        scale_a=scales[0].to(bench.torch_device),
        scale_b=scales[1].to(bench.torch_device),
        out_dtype=torch.bfloat16,
    )
    return bench.host(found), 0.5 * exact, exact.abs().max()


@check(
    "device.dtype.others",
    "Matrix products in every further dtype of `Device.dtypes` are right: `x @ w`, of 8-bit "
    "floating-point numbers `torch._scaled_mm`.",
    level="L1",
    reason="`Device.dtypes` claims them, and precision policies depend on the claim.",
    group="device",
)
def others(bench: Bench) -> str:
    """Compare products with products in float64 on the host."""
    names = sorted(bench.device.dtypes - _OWN_CHECK)
    faults: list[str] = []
    for name in names:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            continue  # another check reports that torch lacks it
        try:
            compute = _scaled if name.startswith(_EIGHT_BITS) else _ordinary
            found, exact, scale = compute(bench, dtype)
        except Failure as failure:
            faults += failure.findings
            continue
        except Exception as error:  # noqa: BLE001 - a device may raise anything
            first = str(error).strip().partition("\n")[0]
            faults.append(
                f"`{name}` is claimed; its product raised {type(error).__name__}: {first}"
            )
            continue
        # A result of bfloat16 has an error of 2^-9 of its size.
        off = float((found - exact).abs().max() / scale.clamp(min=1.0))
        if not off < 2**-7:
            faults.append(f"products of `{name}` are off by {off:.1e} of the largest")
    return conclude(faults, ", ".join(names) or "no further dtype is claimed")
