"""A runtime of the CPU, whose kernels count their calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.accelerator import OP_SPECS, OpImpl, OpTable
from lmcore.accelerator.op import torch_kernels
from lmcore.accelerator.op.context import OpContext

CALLS: Counter[str] = Counter()


@pytest.fixture
def counted_runtime(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that makes a runtime with a counted kernel `own` for the ops named.

    The kernels are torch's own functions in another function, from a plugin `chip`; `calls` of the
    runtime counts their calls, `cases` lists the cases that they were offered.
    """
    CALLS.clear()

    def make(*ops: str, **options: Any) -> Any:
        cases: list[OpContext] = []
        impls = []
        for op in ops:
            inner = _inner(op)

            def kernel(*args: Any, _op: str = op, _inner: Any = inner, **named: Any) -> Any:
                CALLS[_op] += 1
                return _inner(*args, **named)

            monkeypatch.setitem(globals(), f"counted_{op}", kernel)

            def supports(case: OpContext) -> None:
                cases.append(case)

            target = f"{__name__}:counted_{op}"
            impls.append(OpImpl(op, "own", target, supports=supports, plugin="chip"))
        return SimpleNamespace(
            ops=OpTable(OP_SPECS, impls, device_plugin="chip", **options),
            device=SimpleNamespace(type="cpu", dtypes=frozenset({"float32", "bfloat16"})),
            precision=SimpleNamespace(activations="float32", keep="float32"),
            calls=CALLS,
            cases=cases,
        )

    return make


def _inner(op: str) -> Callable[..., Any]:
    if op == "linear_cross_entropy":
        from lmcore.accelerator.op import reference

        return reference.linear_cross_entropy
    found: Callable[..., Any] = getattr(torch_kernels, op)
    return found
