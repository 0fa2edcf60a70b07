"""Ops by NVIDIA's apex: its optimizer's update, norms over lists of tensors, and normalizations.

The compiled parts are called as `apex.optimizers.FusedAdam`, `apex.normalization` and apex's own
gradient clipping call them.  Those over lists get no tensor without elements: a last one keeps apex
from launching the kernel for the tensors before it.

Shapes: B batch, S sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from apex.normalization.fused_layer_norm import (
    FusedLayerNormAffineFunction,
    FusedLayerNormAffineMixedDtypesFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormAffineMixedDtypesFunction,
)
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lmcore.contract.op.torch_kernels import contiguous_as, contiguous_in_place

try:
    from apex._extensions import amp_C
except ModuleNotFoundError:  # its place in most versions
    import amp_C

__all__ = ["AdamW", "adamw", "grad_norm", "layer_norm", "rms_norm"]

_CHUNK = 2048 * 32
"""Elements that a block of threads works on: apex's own choice."""

_DECOUPLED = 1
"""apex's number for decay that is kept out of the moments."""


class AdamW:
    """AdamW update; apex takes the number of steps from the host, the op has it on the device.

    The count of each weight is read once, and from then on counted on the host; it is read again if
    it has been written from outside, as by loading a checkpoint.
    """

    def __init__(self) -> None:
        """Start without counts."""
        self._counts: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __call__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        steps: Sequence[Tensor],
        *,
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
    ) -> None:
        """Update params and moments in place, all with equal counts together."""
        if not params:
            return
        groups: dict[int, list[int]] = {}
        for place, count in enumerate(self._raise(steps)):
            if params[place].numel():
                groups.setdefault(count, []).append(place)
        ignored = torch.zeros(1, dtype=torch.int32, device=params[0].device)
        for count, places in groups.items():
            given = [contiguous_as(grads[at], params[at].dtype) for at in places]
            written = [
                [tensors[at] for at in places] for tensors in (params, exp_avgs, exp_avg_sqs)
            ]
            arguments = (lr, beta1, beta2, epsilon, count, _DECOUPLED, 1, weight_decay)
            with contiguous_in_place(written, params[places[0]].dtype) as lists:
                amp_C.multi_tensor_adam(_CHUNK, ignored, [given, *lists], *arguments)

    def _raise(self, steps: Sequence[Tensor]) -> list[int]:
        """Raise every count by one, on the device and here, and return them."""
        unknown = [step for step in steps if self._known(step) is None]
        if unknown:  # the host waits for the device, in the first step
            for step, value in zip(unknown, torch.stack(unknown).tolist(), strict=True):
                self._counts[step] = (step._version, int(value))  # noqa: SLF001
        torch._foreach_add_(list(steps), 1)
        counts = [self._counts[step][1] + 1 for step in steps]
        for step, count in zip(steps, counts, strict=True):
            self._counts[step] = (step._version, count)  # noqa: SLF001
        return counts

    def _known(self, step: Tensor) -> int | None:
        version, count = self._counts.get(step, (None, 0))
        return count if version == step._version else None  # noqa: SLF001


adamw = AdamW()


def grad_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm over all tensors, summed in float32."""
    if not grads:
        return torch.zeros(())
    groups: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            groups.setdefault(grad.dtype, []).append(grad.contiguous())
    if not groups:
        return torch.zeros((), device=grads[0].device)
    ignored = torch.zeros(1, dtype=torch.int32, device=grads[0].device)
    norms = [
        amp_C.multi_tensor_l2norm(_CHUNK, ignored, [tensors], False)[0].view(())  # noqa: FBT003 - its flag for a norm of each tensor
        for tensors in groups.values()
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    return total


def layer_norm(x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
    """Normalize the last dim to mean 0 and variance 1, then apply gain and offset."""
    alike = x_BSH.dtype == weight_H.dtype
    function = FusedLayerNormAffineFunction if alike else FusedLayerNormAffineMixedDtypesFunction
    out: Tensor = function.apply(x_BSH, weight_H, bias_H, weight_H.shape, epsilon)
    return out.to(x_BSH.dtype)


def rms_norm(x_BSH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Divide the last dim by its root mean square, then apply the gain."""
    alike = x_BSH.dtype == weight_H.dtype
    function = FusedRMSNormAffineFunction if alike else FusedRMSNormAffineMixedDtypesFunction
    out: Tensor = function.apply(x_BSH, weight_H, weight_H.shape, epsilon)
    return out.to(x_BSH.dtype)
