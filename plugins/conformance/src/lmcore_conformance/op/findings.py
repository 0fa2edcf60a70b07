"""The use of a kernel in a case, and the findings of a check about such uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.base.errors import counted
from lmcore_conformance.op.call import Kernel, Outcome, call, difference
from lmcore_conformance.op.case import Case
from lmcore_conformance.registry import conclude

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

__all__ = ["BOTH", "Findings", "Use"]

BOTH = "output and gradients"
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_num_threads, torch.set_num_threads),
)
"""Settings of torch on which results depend, restored after each use of a kernel."""


@dataclass(frozen=True)
class Use:
    """A kernel in one case and dtype, with the right result."""

    bench: Bench
    kernel: Kernel
    case: Case
    dtype: str
    wanted: Outcome

    @property
    def label(self) -> str:
        """Case and dtype, for findings."""
        return f"{self.case.label}, {self.dtype}"

    def call(self, **how: Any) -> Outcome:
        """Return the kernel's result; *how* are further arguments of `op.call.call`."""
        dtype = getattr(torch, self.dtype)
        return call(self.kernel.function, self.case, dtype, self.bench.torch_device, **how)

    def differences(self, found: Outcome, parts: str) -> Iterator[str]:
        """Yield how a result differs; *parts* is "output", "gradients" or both."""
        if "output" in parts:
            yield from self._difference("the output", found.out, self.wanted.out)
        for place, grad in self.wanted.grads.items() if "gradients" in parts else ():
            yield from self._difference(
                f"the gradient of argument {place + 1}", found.grads[place], grad
            )

    def _difference(self, name: str, found: Tensor, wanted: Tensor) -> Iterator[str]:
        wrong = difference(self.bench.host(found), wanted, self.kernel.op, self.dtype)
        if wrong:
            yield f"{name} {wrong}"


def _torch(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class Findings:
    """Findings of a check: for each kernel the first one, and their number."""

    def __init__(self) -> None:
        self.first: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self._accepting: set[str] = set()

    @contextmanager
    def of(self, kernel: Kernel, subject: str) -> Iterator[Callable[[str | None], None]]:
        """Take findings about one use of a kernel; an exception is one, too."""

        def add(text: str | None) -> None:
            if text:
                self.first.setdefault(kernel.id, f"{subject}: {text}")
                self.counts[kernel.id] = self.counts.get(kernel.id, 0) + 1

        self.calls[kernel.id] = self.calls.get(kernel.id, 0) + 1
        if kernel.impl is not None and kernel.impl.supports is not None:
            self._accepting.add(kernel.id)
        settings = [(get(), put) for get, put in _SETTINGS]
        try:
            yield add
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything
            first = str(error).strip().partition("\n")[0]
            add(f"it raised {type(error).__name__}: {first:.200}")
        finally:
            for (value, put), (get, _) in zip(settings, _SETTINGS, strict=True):
                if get() != value:  # or the next kernel would be blamed
                    put(value)

    def compare(self, use: Use, suffix: str = "", *, parts: str = BOTH, **how: Any) -> None:
        """Call a kernel (see `Use.call`) and compare the result; *suffix* ends the label."""
        with self.of(use.kernel, f"{use.label}{suffix}") as add:
            for wrong in use.differences(use.call(**how), parts):
                add(wrong)

    def compare_in(
        self,
        use: Use,
        suffix: str,
        given: str,
        context: Callable[[], AbstractContextManager[object]],
        weights: torch.dtype | None = None,
    ) -> None:
        """Compare a call in a context, with arguments of the dtype *given*, or of *weights*."""
        with self.of(use.kernel, f"{use.case.label}{suffix}") as add:
            how: dict[str, Any] = {"incoming": _torch(use.dtype), "weights": weights}
            found = replace(use, dtype=given).call(context=context, **how)
            if weights and found.out.dtype != _torch(given):
                add(f"the output is {found.out.dtype}")
            for wrong in use.differences(found, BOTH):
                add(wrong)

    def conclude(self) -> str:
        """Return a line on the calls made.

        Raises:
            Failure: Something is wrong.
        """
        lines = []
        for name, text in self.first.items():
            more = self.counts[name] - 1
            accepted = "; its `supports` accepts this call" if name in self._accepting else ""
            lines.append(f"`{name}`: {text}{accepted}" + (f" (and {more} more)" if more else ""))
        calls = ", ".join(f"{name}: {counted(count, 'call')}" for name, count in self.calls.items())
        return conclude(lines, calls)
