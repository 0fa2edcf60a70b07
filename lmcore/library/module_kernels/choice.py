"""Decision whether a module's forward pass is replaced: the kernel, and a comparison of results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lmcore.contract.dtype import dtype_name
from lmcore.contract.op import torch_kernels
from lmcore.contract.op.records import REFERENCE, OpSpec, Resolution
from lmcore.library.op_calls import OpCalls

__all__ = ["Choice", "differs", "group", "has_hooks", "not_comparable", "own_function"]

_SEED = 271828


class Choice:
    """The kernel of an op for modules of one size, and whether it replaces their own code.

    Attributes:
        resolution: Choice of the kernel for the dtype of the weights.
        reason: Reason not to replace; None if the kernel is better than the modules' own code.
    """

    def __init__(
        self,
        calls: OpCalls,
        op: str,
        dtype: torch.dtype,
        *,
        own: Callable[..., Any] | None = None,
        **attributes: Any,
    ) -> None:
        """Choose the kernel.

        Args:
            calls: Ops of the session.
            op: Name of the op.
            dtype: Dtype of the inputs.
            own: Kernel that does what the modules do anyway; None: there is none.
            attributes: Attributes of the case.
        """
        self.op, self.own, self.attributes = op, own, attributes
        self.calls = calls
        self.call: Callable[..., Any] = getattr(calls, op)
        self.resolution = self._resolve(dtype)
        self.reason = self._reason(self.resolution)
        self._takes = {dtype: self.reason is None}

    @property
    def spec(self) -> OpSpec:
        """The op."""
        return self.calls.spec(self.op)

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """Return True if the kernel is for inputs such as *x*; the module's own code is otherwise.

        The model may have moved to another dtype or device since.  A compiler fuses the module's
        own code itself.
        """
        if torch.compiler.is_compiling():
            return False
        dtype = x.dtype
        if dtype is not weight.dtype or x.device.type != self.calls.device_type:
            return False
        found = self._takes.get(dtype)
        if found is None:
            found = self._takes[dtype] = self._reason(self._resolve(dtype)) is None
        return found

    def _resolve(self, dtype: torch.dtype) -> Resolution:
        return self.calls.resolution(self.op, dtype=dtype_name(dtype), **self.attributes)

    def _reason(self, resolution: Resolution) -> str | None:
        if resolution.chosen == REFERENCE:
            if resolution.source == "preference":
                return None
            reasons = "; ".join(f"`{name}`: {why}" for name, why in resolution.rejected)
            return f"the device has no kernel for `{self.op}` ({reasons or 'none is offered'})"
        function = self.calls.bind(
            self.op, dtype=resolution.context.dtype, **resolution.context.attributes
        )
        if function is self.own:
            return f"kernel `{resolution.chosen}` is the function of torch that the module calls"
        return None


def own_function(op: str) -> Callable[..., Any]:
    """Return torch's own function for an op."""
    found: Callable[..., Any] = getattr(torch_kernels, op)
    return found


def not_comparable(weight: Tensor) -> str | None:
    """Return why a module with *weight* cannot be compared with an op; None if it can."""
    if weight.is_meta:
        return "its weights are on the meta device: nothing can be compared"
    if hasattr(weight, "placements"):  # a `DTensor`
        return "its weights are sharded: call `use_kernels` before the model is sharded"
    return None


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for modules with equal code, settings and shapes of parameters."""
    settings = [
        (name, value if isinstance(value, bool | int | float | str | tuple | None) else id(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name not in {"training", "layer_idx"}
    ]
    parameters = [
        (name, tuple(parameter.shape), parameter.dtype, parameter.device)
        for name, parameter in module.named_parameters(recurse=False)
    ]
    children = [(name, _kind(child)) for name, child in module.named_children()]
    return (type(module), tuple(settings), tuple(parameters), tuple(children))


def has_hooks(module: nn.Module) -> bool:
    """Return True if a call of the module does more than its forward pass."""
    return bool(
        module._forward_hooks  # noqa: SLF001
        or module._forward_pre_hooks  # noqa: SLF001
        or module._backward_hooks  # noqa: SLF001
        or module._backward_pre_hooks  # noqa: SLF001
    )


@contextlib.contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Seed the random numbers of torch, and restore their state at the end."""
    if device.type == "cpu":
        fork = torch.random.fork_rng(devices=[])
    else:
        fork = torch.random.fork_rng(devices=[device], device_type=device.type)
    with fork:
        torch.manual_seed(_SEED)
        yield


def differs(
    spec: OpSpec,
    own: Callable[..., Any],
    new: Callable[..., Any],
    *inputs: Tensor,
) -> str | None:
    """Return why *new* does not compute what *own* does, on given inputs; None if it does.

    Both run with the same random numbers, so that dropout is compared too.

    Args:
        spec: Op with its tolerances, here relative to the largest result; products before and
            after the op may add as much again.
        own: The modules' own code.
        new: The code with the kernel.
        inputs: Random inputs.
    """
    device, dtype = inputs[0].device, inputs[0].dtype
    results = []
    for function in (own, new):
        try:
            with _seeded(device), torch.no_grad():
                found = function(*inputs)
        except Exception as error:  # noqa: BLE001 - a module that is not what it looks like
            return f"it does not take such an input: {type(error).__name__}: {error}"[:200]
        results.append(found if isinstance(found, tuple) else (found,))
    tolerance = spec.tolerances.get(dtype_name(dtype))
    if tolerance is None:
        return f"`{spec.name}` has no tolerance for {dtype}"
    if len(results[0]) != len(results[1]):
        return "it returns another number of results than the op"
    for left, right in zip(*results, strict=True):
        if not isinstance(left, Tensor) or left.shape != right.shape or left.dtype != right.dtype:
            return "its result has another shape or dtype than the op's"
        theirs, ours = left.cpu().double(), right.cpu().double()  # not every device has float64
        scale, gap = float(theirs.abs().max()), float((theirs - ours).abs().max())
        if not gap <= 2 * (tolerance.absolute + tolerance.relative) * scale:
            return (
                f"its results are not the op's: they differ by {gap:.1e} at a size of {scale:.1e}"
            )
    return None


def group(modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Return modules in groups of the same kind."""
    groups: dict[tuple[Any, ...], list[nn.Module]] = {}
    for module in modules:
        groups.setdefault(_kind(module), []).append(module)
    return list(groups.values())
