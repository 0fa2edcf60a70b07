"""Results of a plugin's kernels in one small case each, compared with the reference in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lmcore.contract.op.records import OpImpl, missing_packages
from lmcore.contract.probe import Check, CheckStatus
from lmcore.plugin.record import located

if TYPE_CHECKING:
    from lmcore.contract.device import Device
    from lmcore_conformance.op.call import Kernel
    from lmcore_conformance.op.case import Case

__all__ = ["check_results"]

_DTYPE = "float32"


def check_results(kernels: Sequence[OpImpl], device: Device, plugin: str) -> Iterator[Check]:
    """Yield a check for each kernel whose packages are installed: its first case in float32.

    Args:
        kernels: Kernels that can be bound.
        device: The device, which must have float32.
        plugin: Name of the plugin that offers them.
    """
    from lmcore_conformance.op.call import Kernel
    from lmcore_conformance.op.case import CASES

    for impl in kernels:
        if missing_packages(impl) or impl.op not in CASES:
            continue
        name = f"{impl.op}={impl.id}"
        kernel = Kernel(impl.op, impl.id, impl)
        case = next(
            (
                case
                for case in CASES[impl.op]
                if case.kind == "value" and kernel.does(device.type, _DTYPE, case.attributes)
            ),
            None,
        )
        if case is None:
            detail = f"not computed: it does no case of the conformance suite on `{device.type}`"
            yield Check(name, CheckStatus.SKIPPED, detail)
            continue
        try:
            faults = list(_faults(kernel, case, device))
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything
            faults = [f"it raised {located(error)}"]
        shown = f"{case.label}, {_DTYPE}"
        if faults:
            more = f" (and {len(faults) - 1} more)" if faults[1:] else ""
            hint = (
                f"`python -m pytest --pyargs lmcore_conformance --plugin {plugin}` tries all cases"
            )
            yield Check(name, CheckStatus.FAILED, f"{shown}: {faults[0]}{more}", hint)
        else:
            detail = f"{shown}: output and gradients as the reference in float64"
            yield Check(name, CheckStatus.OK, detail)


def _faults(kernel: Kernel, case: Case, device: Device) -> Iterator[str]:
    """Yield how the output and the gradients of a kernel differ from the reference's."""
    import torch

    from lmcore_conformance.op.call import call, difference, oracle, rounded

    held = rounded(case, torch.float32)
    wanted = oracle(held, torch.float32)
    found = call(kernel.function, held, torch.float32, device.torch_device)
    device.synchronize()
    pairs = [("the output", found.out, wanted.out)]
    pairs += [
        (f"the gradient of argument {place + 1}", found.grads[place], grad)
        for place, grad in wanted.grads.items()
    ]
    for name, tensor, right in pairs:
        wrong = difference(tensor.cpu().double(), right, kernel.op, _DTYPE)
        if wrong:
            yield f"{name} {wrong}"
