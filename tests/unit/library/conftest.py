"""Sessions on the host, and a runtime whose kernels count their calls."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lmcore
from lmcore.contract import OP_SPECS, OpImpl, OpTable
from lmcore.contract.op import torch_kernels
from lmcore.contract.op.context import OpContext
from lmcore.plugin import HANDED_DOWN

CALLS: Counter[str] = Counter()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`lmcore.start` on the host in float32; its session is closed at the end of the test."""
    before, threads = dict(os.environ), torch.get_num_threads()
    monkeypatch.setenv("LMCORE_PLUGINS", "")
    monkeypatch.delenv(HANDED_DOWN, raising=False)
    opened: list[lmcore.Session] = []

    def begin(**settings: Any) -> lmcore.Session:
        opened.append(lmcore.start(**{"device": "cpu", "precision": "fp32", **settings}))
        return opened[-1]

    yield begin
    for session in opened:
        session.close()
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)


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
        from lmcore.contract.op import reference

        return reference.linear_cross_entropy
    found: Callable[..., Any] = getattr(torch_kernels, op)
    return found
