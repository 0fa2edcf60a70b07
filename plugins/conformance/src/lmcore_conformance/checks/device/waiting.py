"""Level 1: functions that the core calls between steps return while queued work still runs.

A wait is seen in two ways.  A call of a function that synchronizes the device is seen on every
device, by a profile of the call.  A read of a result, or a wait that the profile does not know, is
seen where the device works beside the host: work is pending before the call, and done after it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lmcore_conformance.checks.device.streams import Products, queued_products
from lmcore_conformance.registry import check, conclude

if TYPE_CHECKING:
    from types import FrameType

    from lmcore_conformance.bench import Bench

_check = partial(check, level="L1", group="streams")

_FACTORS = (1, 4, 16)
"""Amounts of work, each 25 ms: a busy host may stop this process for as long as one takes."""

_NOTHING = -1.0

Pending = Callable[[], bool]
"""Returns True while queued work is not done."""


@_check(
    "device.does-not-wait",
    "`health`, `compilations` and `step_boundary` return while queued work still runs: they "
    "neither synchronize the device nor read a result of the work.",
    reason="They are called in and between steps: the host that waits there queues nothing, and "
    "the device is idle until the next step begins.",
)
def does_not_wait(bench: Bench) -> str:
    """Look for calls that synchronize, and for work that is done after a call and not before."""
    if bench.is_host:
        return "the device is the host: work is done when its call returns"
    faults, unseen = [], ""
    products = queued_products(bench)
    ways = _ways(bench, products)
    for name, call in _functions(bench).items():
        call()  # the first call may load what later ones need
        if synchronizes := _synchronizing_calls(bench, call):
            faults.append(f"`{name}` calls `{synchronizes[0]}`, which waits for all queued work")
            continue
        found = _waited(products, ways, call)
        if found is None:
            unseen = "; no work is pending when its call returns, so that reads are not seen"
        elif found:
            faults.append(f"`{name}` waits: work that is queued before it is done when it returns")
    return conclude(faults, f"{', '.join(_functions(bench))}{unseen}")


def _functions(bench: Bench) -> dict[str, Callable[[], object]]:
    """Return the functions that must not wait, by name."""
    device = bench.device
    found = {
        "health": device.health,
        "compilations": device.compilations,
        "step_boundary": device.step_boundary,
    }
    return {name: function for name, function in found.items() if function is not None}


def _synchronizing_calls(bench: Bench, call: Callable[[], object]) -> list[str]:
    """Return the names of the functions in which *call* synchronizes the device."""
    names = _synchronizing(bench)
    found: list[str] = []

    def seen(frame: FrameType, event: str, argument: object) -> None:
        key = frame.f_code if event == "call" else argument if event == "c_call" else None
        with_hash = isinstance(key, type(frame.f_code) | type(len))
        if with_hash and key in names:
            found.append(names[key])

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def _synchronizing(bench: Bench) -> Mapping[object, str]:
    """Return the functions that wait for the whole device, by what a profile shows of each."""
    kind = bench.device.type
    places: list[tuple[str, object, str]] = [
        ("Device", bench.device, "synchronize"),
        (f"torch.{kind}", getattr(torch, kind, None), "synchronize"),
        ("torch.accelerator", torch.accelerator, "synchronize"),
        ("torch._C", torch._C, "_accelerator_synchronizeDevice"),  # noqa: SLF001 - no public name
        ("torch._C", torch._C, f"_{kind}_synchronize"),  # noqa: SLF001 - no public name
    ]
    found: dict[object, str] = {}
    for place, owner, name in places:
        function = getattr(owner, name, None)
        if function is not None:
            found.setdefault(_key(function), f"{place}.{name}")
    return found


def _key(function: Any) -> object:
    """Return the code of a Python function, or the function itself if it has none."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", function)


def _ways(bench: Bench, products: Products) -> list[Callable[[int], Pending]]:
    """Return the ways to queue work and see whether it is done, without waiting for it."""
    ways: list[Callable[[int], Pending]] = []
    if bench.device.pin_memory is not None:
        ways.append(partial(_landing, bench.device.pin_memory, products))
    accelerator = torch.accelerator.current_accelerator()
    is_torchs = accelerator is not None and accelerator.type == bench.device.type
    if bench.device.new_event is not None and is_torchs:  # torch knows the current stream
        ways.append(partial(_marked, bench.device.new_event, products))
    return ways


def _landing(
    pin: Callable[[torch.Tensor], torch.Tensor], products: Products, factor: int
) -> Pending:
    """Queue products and a copy of a row to pinned memory, which has other numbers until then."""
    row_N = pin(torch.full((len(products.right_NN),), _NOTHING))
    row_N.copy_(_queued(products, factor)[0], non_blocking=True)
    return lambda: bool((row_N == _NOTHING).any())


def _marked(new_event: Callable[[], Any], products: Products, factor: int) -> Pending:
    """Queue products and an event behind them."""
    _queued(products, factor)
    event = new_event()
    event.record(torch.accelerator.current_stream())
    return lambda: not event.query()


def _queued(products: Products, factor: int) -> torch.Tensor:
    for _ in range(factor - 1):
        products.run()
    return products.run()


def _waited(
    products: Products, ways: list[Callable[[int], Pending]], call: Callable[[], object]
) -> bool | None:
    """Return True if queued work is always done after *call*; None if it is so before, too."""
    found = None
    for way in ways:
        for pending, still in _tries(products, way, call):
            if pending and still:
                return False
            found = found or pending or None
        if found:
            return True
    return found


def _tries(
    products: Products, way: Callable[[int], Pending], call: Callable[[], object]
) -> Iterator[tuple[bool, bool]]:
    """Yield for more and more work whether it is pending before the call, and after it."""
    for factor in _FACTORS:
        is_pending = way(factor)
        before = is_pending()
        call()
        after = is_pending()
        products.new_result()  # waits
        yield before, after
