"""Call a kernel as a model does, in any dtype and memory layout, and compare with float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.base.errors import counted
from lmcore.contract import OP_SPECS, OpImpl, OpSpec
from lmcore.contract.op.context import op_context
from lmcore.contract.op.records import REFERENCE, load_target, missing_packages
from lmcore_conformance.op.case import Case

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

__all__ = [
    "LAYOUTS",
    "SPECS",
    "Kernel",
    "Outcome",
    "broadcast",
    "broadcast_samples",
    "call",
    "difference",
    "dtypes_of",
    "factor",
    "kernels_of",
    "oracle",
    "plain",
    "rounded",
    "with_nan",
]

SPECS: Mapping[str, OpSpec] = {spec.name: spec for spec in OP_SPECS}

Function = Callable[..., Any]


@dataclass(frozen=True)
class Kernel:
    """A way to compute an op on the device: a kernel of the plugin, or the core's reference."""

    op: str
    id: str
    impl: OpImpl | None

    @cached_property
    def function(self) -> Function:
        """The callable; loaded when it is called first, as the kernel may reject every case."""
        return load_target(SPECS[self.op].reference if self.impl is None else self.impl.load)

    @property
    def is_deterministic(self) -> bool:
        """True if the kernel claims to be deterministic; references count as such."""
        return self.impl is None or "deterministic" in self.impl.traits

    def does(self, device_type: str, dtype: str, attributes: Mapping[str, Any]) -> bool:
        """Return True if the kernel does a case, also if only inside compiled blocks."""
        return not self.reasons_against(device_type, dtype, attributes)

    def reasons_against(
        self, device_type: str, dtype: str, attributes: Mapping[str, Any]
    ) -> list[str]:
        """Return the reasons of the kernel against a case; empty if it does the case.

        Args:
            device_type: Type of the device.
            dtype: Name of the dtype.
            attributes: Attributes of the case; it is done if it is inside or outside compiled
                blocks.
        """
        if self.impl is None:
            return []
        for name in ("score_bias", "score_bias_gradient"):
            if attributes.get(name) and name not in self.impl.traits:
                return [f"it does not claim the trait `{name}`"]
        if self.impl.supports is None:
            return []
        reasons = []
        for compiled in (False, True):
            context = op_context(
                SPECS[self.op], device_type, dtype, {**attributes, "compile": compiled}
            )
            reject = self.impl.supports(context)
            if reject is None:
                return []
            reasons.append(reject.reason)
        return reasons


def kernels_of(bench: Bench, op: str) -> list[Kernel]:
    """Return the kernels under test for *op* whose packages are installed, the reference first.

    The reference is left out if the offers of one plugin alone are under test.
    """
    found = []
    if not bench.subject:
        found.append(Kernel(op, REFERENCE, None))
    found += [
        Kernel(op, _shown(bench, impl), impl)
        for impl in bench.kernels
        if impl.op == op and not missing_packages(impl)
    ]
    return found


def _shown(bench: Bench, impl: OpImpl) -> str:
    """Return the id of a kernel, with its plugin if that does not bring the device."""
    return impl.id if impl.plugin == bench.selection.plugin else f"{impl.id} of {impl.plugin}"


@dataclass(frozen=True)
class Outcome:
    """Result of a call: the output, and the gradients of the arguments that have one."""

    out: Tensor
    grads: Mapping[int, Tensor]


def _gapped(tensor: Tensor) -> Tensor:
    """Return the values in every second place of a larger buffer."""
    buffer = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
    buffer[..., ::2] = tensor
    return buffer[..., ::2]


def _transposed(tensor: Tensor) -> Tensor:
    if tensor.dim() < 2:
        return tensor
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def _outermost_last(tensor: Tensor) -> Tensor:
    """Return the values with the first dim innermost in memory."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0)


def _offset(tensor: Tensor) -> Tensor:
    """Return the values one element behind the beginning of their memory."""
    buffer = tensor.new_zeros(tensor.numel() + 1)
    view = buffer[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "transposed": _transposed,
    "every second element of a buffer": _gapped,
    "first dim innermost": _outermost_last,
    "behind the start of its memory": _offset,
}
"""Ways in which a tensor's values may lie in memory."""


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor unchanged."""
    return tensor


def broadcast(tensor: Tensor) -> Tensor:
    """Return the first row for every row, without a copy; the values change."""
    if tensor.dim() < 2 or not tensor.numel():
        return tensor
    flat = tensor.select(-2, 0).unsqueeze(-2)
    return flat.expand_as(tensor)


def broadcast_samples(tensor: Tensor) -> Tensor:
    """Return the first sample for every sample, without a copy; the values change."""
    if tensor.dim() < 3 or not tensor.numel():
        return tensor
    return tensor[:1].expand_as(tensor)


def rounded(case: Case, dtype: torch.dtype) -> Case:
    """Return the case with numbers that *dtype* can hold, so that only arithmetic differs."""

    def through(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype).double() if floating else value

    return replace(
        case,
        tensors={place: through(value) for place, value in case.tensors.items()},
        others={place: through(value) for place, value in case.others.items()},
    )


def with_nan(case: Case) -> Case:
    """Return the case with its NaN in place."""
    assert case.nan is not None
    place, index = case.nan
    tensor = case.tensors[place].clone()
    tensor[index] = float("nan")
    return replace(case, tensors={**case.tensors, place: tensor})


def call(
    function: Function,
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    *,
    layout: Callable[[Tensor], Tensor] = plain,
    incoming: torch.dtype | None = None,
    only: int | None = None,
    later_calls: int = 0,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
    weights: torch.dtype | None = None,
) -> Outcome:
    """Call an op and return output and gradients, for a fixed incoming gradient.

    Args:
        function: The kernel.
        case: Its numbers.
        dtype: dtype of its floating arguments.
        device: Device.
        layout: memory layout of arguments and incoming gradient.
        incoming: Dtype through which the incoming gradient is rounded; default: *dtype*.
        only: Place of the one argument that requires a gradient; None: all tensors do.
        later_calls: Number of calls with other numbers between this call and its backward pass.
        context: Makes the context of the forward pass.
        weights: Dtype of the arguments that get gradients but the first; default: *dtype*.
    """

    def sent(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None, copy=True)

    arguments = {place: sent(value) for place, value in case.others.items()}
    leaves = {}
    for place, values in case.tensors.items():
        given = sent(values).clone()
        arguments[place] = layout(given.to(weights) if weights and place else given).detach()
        if only in {None, place}:
            leaves[place] = arguments[place].requires_grad_()
    kwargs = {name: sent(value) for name, value in case.kwargs.items()}

    def apply(given: Mapping[int, Any]) -> Any:
        by_name = {name: given[place] for place, name in case.named.items()}
        places = sorted(given.keys() - case.named.keys())
        return function(*(given[place] for place in places), **by_name, **kwargs)

    with context():
        out = apply(arguments)
    others = {place: (2 * leaf).detach().requires_grad_() for place, leaf in leaves.items()}
    kept = [apply(arguments | others) for _ in range(later_calls)]
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    grad = grad.to(incoming or dtype).to(device, out.dtype)
    grad = layout(grad) if grad.dim() else grad
    grads = torch.autograd.grad(out, list(leaves.values()), grad)
    del kept  # until here, as the activations of later layers
    return Outcome(out.detach(), dict(zip(leaves, grads, strict=True)))


def oracle(
    case: Case, incoming: torch.dtype, layout: Callable[[Tensor], Tensor] = plain
) -> Outcome:
    """Return the reference's result in float64 on the host; arguments as for `call`."""
    reference = load_target(SPECS[case.op].reference)
    host = torch.device("cpu")
    return call(reference, case, torch.float64, host, incoming=incoming, layout=layout)


def difference(found: Tensor, wanted: Tensor, op: str, dtype: str) -> str | None:
    """Return the difference of a result on the host from float64's, in words; None if it is close.

    The absolute part of the tolerance scales with the largest value: sums have its error.
    """
    if found.shape != wanted.shape:
        return f"has the shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    if not wanted.numel():
        return None
    tolerance = SPECS[op].tolerances[dtype]
    if not torch.equal(torch.isfinite(found), torch.isfinite(wanted)):
        count = int((torch.isfinite(found) != torch.isfinite(wanted)).sum())
        places = counted(count, "place")
        return f"is finite where it should not be, or not where it should, in {places}"
    scale = max(1.0, wanted.nan_to_num(0.0, 0.0, 0.0).abs().max().item())
    allowed = tolerance.absolute * scale + tolerance.relative * wanted.abs()
    share = ((found - wanted).abs() / allowed).nan_to_num(0.0, 0.0, 0.0)
    worst = int(share.argmax())
    if share.flatten()[worst] <= 1:
        return None
    value, right = found.flatten()[worst].item(), wanted.flatten()[worst].item()
    return (
        f"has {value:.7g} where {right:.7g} is right, {share.max().item():.3g} times the tolerance"
        + factor(found, wanted)
    )


def factor(found: Tensor, wanted: Tensor) -> str:
    """Return "; every number is 0.5 times the right one", or nothing if there is no such factor."""
    found, wanted = found.double().flatten(), wanted.double().flatten()
    size = wanted.abs()
    large = size > 0.01 * size.max() if size.numel() else size > 0
    if int(large.sum()) < 2 or not torch.isfinite(found[large]).all():
        return ""
    ratios = found[large] / wanted[large]
    ratio, spread = ratios.mean().item(), (ratios.max() - ratios.min()).item()
    close = torch.allclose(found, ratio * wanted, rtol=0.01, atol=0.01 * size.max().item())
    if not close or abs(ratio - 1) < 1e-6 or spread > 0.05 * abs(ratio - 1):
        return ""
    return f"; every number is {ratio:.6g} times the right one"


def dtypes_of(bench: Bench) -> Iterator[str]:
    """Yield the dtypes that the device computes in and that the ops have tolerances for."""
    for name in ("float32", "float64", "bfloat16", "float16"):
        if name in bench.device.dtypes:
            yield name
