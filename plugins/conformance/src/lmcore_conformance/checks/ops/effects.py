"""Level 2: effects of a call besides its result: on arguments, on later calls, on torch's settings.

As `ops`, a check is an op and a property, and reports the first fault of each kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.contract.op.records import load_target
from lmcore.runtime.runtime import deterministic_algorithms
from lmcore_conformance.kept import tensors_kept
from lmcore_conformance.op.call import SPECS, Outcome, dtypes_of, oracle, rounded
from lmcore_conformance.op.case import CALLED_OPS, Case
from lmcore_conformance.op.case_large import tall_case
from lmcore_conformance.op.findings import BOTH, Findings, Use
from lmcore_conformance.op.uses import each, in_autocast, made, register_property, regular
from lmcore_conformance.plugin_check.traces import TorchState

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

__all__: list[str] = []


@dataclass(frozen=True)
class _Arguments:
    """Arguments of one call on the device.

    Attributes:
        by_place: Arguments by position.
        by_name: Arguments by name.
        leaves: Places of the arguments that get gradients.
        names: Names of all, by position or name.
    """

    by_place: dict[int, Any]
    by_name: dict[str, Any]
    leaves: tuple[int, ...]
    names: Mapping[int | str, str]

    @classmethod
    def of(
        cls, use: Use, *, gradients: bool, given: str = "", weights: torch.dtype | None = None
    ) -> _Arguments:
        """Send a case to the device, in the dtype *given*; arguments but the first in *weights*."""
        dtype = getattr(torch, given or use.dtype)

        def sent(value: Any, own: torch.dtype = dtype) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(
                use.bench.torch_device, own if value.is_floating_point() else None, copy=True
            )

        case = use.case
        by_place = {place: sent(value) for place, value in case.others.items()}
        for place, value in case.tensors.items():
            by_place[place] = sent(value, weights if weights and place else dtype)
        if gradients:
            for place in case.tensors:
                by_place[place].requires_grad_()
        names: dict[int | str, str] = dict(
            enumerate(signature(load_target(SPECS[case.op].reference)).parameters)
        )
        return cls(
            dict(sorted(by_place.items())),
            {name: sent(value) for name, value in case.kwargs.items()},
            tuple(case.tensors),
            {**names, **{name: name for name in case.kwargs}},
        )

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a kernel with them."""
        return function(*self.by_place.values(), **self.by_name)

    def tensors(self) -> Iterator[tuple[int | str, Tensor]]:
        """Yield the tensors, by position or name."""
        for place, value in self.by_place.items():
            if isinstance(value, Tensor):
                yield place, value
        for name, value in self.by_name.items():
            if isinstance(value, Tensor):
                yield name, value

    def copies(self) -> dict[int | str, Tensor]:
        """Return copies of all tensors on the host, where comparing them compiles nothing."""
        return {key: value.detach().to("cpu", copy=True) for key, value in self.tensors()}

    def changed(self, before: Mapping[int | str, Tensor]) -> Iterator[str]:
        """Yield the tensors that differ from their copies."""
        for key, value in self.tensors():
            if not _same(value, before[key]):
                yield f"it changes its argument `{self.names[key]}`"

    def overwrite(self, case: Case) -> None:
        """Write the numbers of another case into the same memory; take its scalars as they are."""
        with torch.no_grad():
            for place, value in {**case.others, **case.tensors}.items():
                if isinstance(value, Tensor):
                    self.by_place[place].copy_(value)
                else:
                    self.by_place[place] = value
            for name, value in case.kwargs.items():
                if isinstance(value, Tensor):
                    self.by_name[name].copy_(value)


def _same(*tensors: Tensor) -> bool:
    """Return True if two tensors have the same numbers; the device must be done with them."""
    first, second = (tensor.detach().cpu().nan_to_num(7.0) for tensor in tensors)
    return torch.equal(first, second)


def _incoming(out: Tensor) -> Tensor:
    return torch.ones_like(out)


def _uses(bench: Bench, op: str) -> Iterator[Use]:
    """Yield each use in every dtype; cases of many numbers in the first one alone."""
    first = next(dtypes_of(bench))
    for use in each(bench, op):
        if use.dtype == first or sum(map(Tensor.numel, use.case.tensors.values())) < _MANY:
            yield use


_MANY = 100_000


def _modes(bench: Bench) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Return the contexts without gradients that a run uses on the device."""
    modes: dict[str, Callable[[], AbstractContextManager[Any]]] = {"no_grad": torch.no_grad}
    if bench.device.inference_mode:
        modes["inference_mode"] = torch.inference_mode
    return modes


def _pure(bench: Bench, op: str) -> str:
    """Compare arguments and torch's settings before and after, and two backward passes."""
    findings = Findings()
    for use in _uses(bench, op):
        with findings.of(use.kernel, use.label) as add:
            state = TorchState.now(bench.device.type)
            for wrong in _changes(use):
                add(wrong)
            if _draws(use, use.kernel.function) and not _draws(
                use, load_target(SPECS[op].reference)
            ):
                add("it draws random numbers, and the reference draws none")
            for wrong in state.changes(bench.device.type):
                add(wrong)
    return findings.conclude()


def _draws(use: Use, function: Callable[..., Any]) -> bool:
    """Return True if a call or its backward pass moves the generator of the device or the host."""
    device = use.bench.device
    arguments = _Arguments.of(use, gradients=True)
    leaves = [arguments.by_place[place] for place in arguments.leaves]
    before = device.get_rng_state().clone(), torch.get_rng_state()
    out = arguments.call(function)
    torch.autograd.grad(out, leaves, _incoming(out))
    device.step_boundary()
    after = device.get_rng_state(), torch.get_rng_state()
    return not all(map(torch.equal, before, after))


def _changes(use: Use) -> Iterator[str]:
    """Yield the tensors that a call or its backward pass changes without being allowed to."""
    arguments = _Arguments.of(use, gradients=True)
    before = arguments.copies()
    out = arguments.call(use.kernel.function)
    kept, grad = out.detach().clone(), _incoming(out)
    leaves = [arguments.by_place[place] for place in arguments.leaves]
    first = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(out, leaves, grad)
    use.bench.device.synchronize()
    yield from arguments.changed(before)
    if not _same(grad, torch.ones(grad.shape, dtype=grad.dtype)):
        yield "it changes the incoming gradient"
    if not _same(out, kept):
        yield "backward changes the output"
    places = dict(zip(arguments.leaves, first, strict=True))
    again = Outcome(out, dict(zip(arguments.leaves, second, strict=True)))
    right = Outcome(
        use.wanted.out, {place: use.bench.host(tensor) for place, tensor in places.items()}
    )
    for wrong in replace(use, wanted=right).differences(again, "gradients"):
        yield f"a second backward pass gives other gradients: {wrong}"


def _no_grad(bench: Bench, op: str) -> str:
    """Call without gradients: the result is the same, and no argument changes."""
    findings = Findings()
    for use in _uses(bench, op):
        for name, mode in _modes(bench).items():
            with findings.of(use.kernel, f"{use.label}, under `{name}`") as add, mode():
                arguments = _Arguments.of(use, gradients=False)
                before = arguments.copies()
                out = arguments.call(use.kernel.function)
                for wrong in use.differences(Outcome(out, {}), "output"):
                    add(wrong)
                for wrong in arguments.changed(before):
                    add(wrong)
    return findings.conclude()


def _history(bench: Bench, op: str) -> str:
    """Call with numbers A, then B in the same memory, then A again; count what stays."""
    findings = Findings()
    for use in regular(bench, op):
        with findings.of(use.kernel, use.label) as add:
            for wrong in tensors_kept(bench, use.call):
                add(f"it {wrong}")
            for wrong in use.differences(_in_another_thread(use), BOTH):
                add(f"in another thread, {wrong}")
    for use in _uses(bench, op):
        other = rounded(_other_numbers(use.case), getattr(torch, use.dtype))
        later = replace(use, case=other, wanted=oracle(other, getattr(torch, use.dtype)))
        for mode in (None, *_modes(bench)):
            label = f"{use.label}, under `{mode}`" if mode else use.label
            context = _modes(bench)[mode] if mode else nullcontext
            with findings.of(use.kernel, label) as add, context():
                arguments = _Arguments.of(use, gradients=mode is None)
                for wrong in _remembered(use, later, arguments, gradients=mode is None):
                    add(wrong)
    _history_in_autocast(bench, op, findings)
    return findings.conclude()


def _in_another_thread(use: Use) -> Outcome:
    """Return the result of a call in a thread that ends with it."""

    def called() -> Outcome:
        use.bench.device.set_current()
        return use.call()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(called).result()


def _history_in_autocast(bench: Bench, op: str, findings: Findings) -> None:
    """Do the same inside each policy's autocast, which each call enters again as in a run."""
    for use, suffix, given, context, weights in in_autocast(bench, op):
        lower = getattr(torch, use.dtype)
        other = rounded(_other_numbers(use.case), lower)
        later = replace(use, case=other, wanted=oracle(other, lower))
        for gradients in (True, False):
            label = f"{use.case.label}{suffix}" + ("" if gradients else ", under `no_grad`")
            mode = nullcontext() if gradients else torch.no_grad()
            with findings.of(use.kernel, label) as add, mode:
                arguments = _Arguments.of(use, gradients=gradients, given=given, weights=weights)
                for wrong in _remembered(use, later, arguments, context, gradients=gradients):
                    add(wrong)


def _remembered(
    use: Use,
    later: Use,
    arguments: _Arguments,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    gradients: bool,
) -> Iterator[str]:
    """Yield what a call has of a call before or after it, with the same memory and shapes."""
    parts = BOTH if gradients else "output"

    def called(one: Use) -> Outcome:
        arguments.overwrite(one.case)
        with context():
            out = arguments.call(one.kernel.function)
        if not gradients:
            return Outcome(out, {})
        dtype = getattr(torch, one.dtype)
        generator = torch.Generator().manual_seed(5)
        grad = torch.randn(out.shape, dtype=torch.float64, generator=generator).to(dtype)
        leaves = [arguments.by_place[place] for place in arguments.leaves]
        grads = torch.autograd.grad(out, leaves, grad.to(out.device, out.dtype))
        return Outcome(out.detach(), dict(zip(arguments.leaves, grads, strict=True)))

    first = called(use)
    if any(use.differences(first, parts)):
        return  # wrong by itself: other checks say so
    for wrong in later.differences(called(later), parts):
        yield f"after a call with other numbers in the same memory, {wrong}"
    for wrong in use.differences(first, parts):
        yield f"a later call changes an earlier result: {wrong}"
    for wrong in use.differences(called(use), parts):
        yield f"with the first numbers again, {wrong}"


def _other_numbers(case: Case) -> Case:
    """Return the case with other numbers of the same shapes, masks, targets and scalars too."""

    def other(value: Any) -> Any:
        if isinstance(value, float):
            return value * 0.5
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return 0.5 * value.flip(*{0, value.dim() - 1}) if value.dim() else 0.5 * value
        return value.flip(-1)

    return replace(
        case,
        tensors={place: other(value) for place, value in case.tensors.items()},
        others={place: other(value) for place, value in case.others.items()},
        kwargs={
            name: other(value) if isinstance(value, Tensor) else value
            for name, value in case.kwargs.items()
        },
    )


def _repeatable(bench: Bench, op: str) -> str:
    """Call kernels with the trait `deterministic` again, as such a run does, and compare bits."""
    findings = Findings()
    tall = made(bench, op, [tall_case(op)], [next(dtypes_of(bench))])
    for use in chain(_uses(bench, op), tall):
        if not use.kernel.is_deterministic:
            continue
        with findings.of(use.kernel, use.label) as add, deterministic_algorithms():
            calls = []
            for _ in range(3):
                calls.append(use.call())
                bench.device.step_boundary()  # else a lazy device computes it once
            bench.device.synchronize()
            first, *later = calls
            for other in later:
                pairs = [(first.out, other.out)]
                pairs += [(first.grads[p], other.grads[p]) for p in other.grads]
                if not all(_same(one, again) for one, again in pairs):
                    add("a second call gives other bits")
    return findings.conclude()


_PROPERTIES: dict[str, tuple[Callable[[Bench, str], str], str, str]] = {
    "pure": (
        _pure,
        (
            "`{op}` changes neither its arguments nor the incoming gradient, no setting of torch, "
            "and no random state unless it drops, in any dtype."
        ),
        "Recomputation and residual connections read them again, and other layers draw next.",
    ),
    "no-grad": (
        _no_grad,
        (
            "`{op}` has the same result under `no_grad` and `inference_mode`, in any dtype, and "
            "changes no argument there."
        ),
        "Evaluation and generation need no gradients, and a kernel may save memory then.",
    ),
    "history": (
        _history,
        (
            "`{op}` does not depend on earlier calls, also if the same memory held other numbers, "
            "with and without autocast and gradients, or on the thread that calls; it changes no "
            "earlier result, and keeps no tensor of each call."
        ),
        (
            "Memory is reused: a kernel that recognises shapes or addresses returns old numbers. "
            "The server computes in a thread of its own."
        ),
    ),
    "repeatable": (
        _repeatable,
        (
            "Under `--deterministic`, where `{op}` claims to be so, repeated calls give the same "
            "bits, also with more than 65,535 rows."
        ),
        "`--deterministic` binds kernels by that claim, and many rows may be summed otherwise.",
    ),
}


for _op in CALLED_OPS:
    for _name, (_make, _title, _reason) in _PROPERTIES.items():
        _group = "deterministic" if _name == "repeatable" else "ops"
        register_property(_op, _name, _make, _title, _reason, _group)
