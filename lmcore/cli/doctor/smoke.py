"""Smoke test of every present device by `lmcore doctor`, the same for all plugins.

These functions run in separate processes, see `lmcore.plugin.isolation.subprocess_call`: each
check is announced before it begins, so that a crash is the crash of that check.  They use the
contract only, as a run does, so what passes here is what a run will meet.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import LmcoreError
from lmcore.contract.probe import Check, CheckStatus
from lmcore.plugin import (
    PluginSet,
    Selection,
    create_device,
    discover,
    doctor_checks,
    precision_policies,
    verify,
)
from lmcore.plugin.isolation.subprocess_call import in_one_line
from lmcore.plugin.selection import HANDED_DOWN
from lmcore.runtime.device_start import set_current

if TYPE_CHECKING:
    from lmcore.contract.device import Device
    from lmcore.contract.op.records import Tolerance

__all__ = ["ALL_REDUCE", "DEVICE", "device_checks", "own_checks", "reduction"]

DEVICE = "device works"
ALL_REDUCE = "all-reduce"
_PRECISION = "precision"
_HEALTH = "health"
_SLOW_HEALTH_SECONDS = 0.1
_INNER_SHARE = 0.8
"""Share of the time limit after which a wait for other processes fails, with a message, before
they are stopped."""

StepValues = dict[str, Any]
"""A check as JSON, or the announcement of one: {"begins": name}."""


def own_checks(plugin: str) -> list[StepValues]:
    """Return the checks of `lmcore_doctor` of one plugin."""
    return [dataclasses.asdict(one) for one in doctor_checks(discover().usable_record(plugin))]


def device_checks() -> Iterator[StepValues]:
    """Create the device that the launcher handed down, and check its products and generator."""
    made: list[Device] = []

    def create() -> Check:
        plugins, selection = _handed_down()
        verify(selection, plugins)
        device = _create(plugins, selection)
        set_current(device, selection)
        made.append(device)
        return Check(DEVICE, CheckStatus.OK, f"{device.name}: {', '.join(sorted(device.dtypes))}")

    yield from _step(DEVICE, create)
    for device in made:
        for dtype in sorted(device.dtypes):
            name = f"product {dtype}"
            yield from _step(name, functools.partial(_product, device, name, dtype))
        yield from _step("random state", functools.partial(_random_state, device))
        yield from _step(_PRECISION, functools.partial(_precision, device))
        if device.health is not None:
            yield from _step(_HEALTH, functools.partial(_health, device))


def _step(name: str, check: Callable[[], Check]) -> Iterator[StepValues]:
    """Yield the beginning of a check, then its result; one that raises has failed."""
    yield {"begins": name}
    try:
        found = check()
    except Exception as error:  # noqa: BLE001 - a device may raise anything
        fix = error.hint if isinstance(error, LmcoreError) else None
        found = Check(name, CheckStatus.FAILED, in_one_line(error), fix)
    yield dataclasses.asdict(found)


def _handed_down() -> tuple[PluginSet, Selection]:
    return discover(), Selection.from_json(os.environ[HANDED_DOWN])


def _create(plugins: PluginSet, selection: Selection) -> Device:
    from lmcore.config.load import load_config
    from lmcore.plugin.registrations import plugin_sections

    defaults = load_config([], plugins=plugin_sections(plugins)).config
    return create_device(plugins, selection, defaults)


def _product(device: Device, name: str, dtype_name: str) -> Check:
    """Compare a product on the device with one of the same numbers in float64 on the host."""
    import torch

    tolerance = _tolerance(dtype_name)
    dtype = getattr(torch, dtype_name, None)
    if tolerance is None or dtype is None:
        detail = f"a product in {dtype_name} needs scales; a plain product is no test"
        return Check(name, CheckStatus.SKIPPED, detail)
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(129, 65, generator=generator, dtype=torch.float64).to(dtype)
    right = torch.randn(65, 33, generator=generator, dtype=torch.float64).to(dtype)
    exact = left.double() @ right.double()
    product = left.to(device.torch_device) @ right.to(device.torch_device)
    device.synchronize()
    error = (product.cpu().double() - exact).abs()
    allowed = tolerance.absolute + tolerance.relative * exact.abs()
    worst = (error / allowed).max().item()
    detail = f"largest error against float64 {error.max().item():.1e}"
    if worst <= 1:  # not for NaN, which compares false
        return Check(name, CheckStatus.OK, detail)
    fix = "do not train on it: look for a faulty device, or update its driver and torch together"
    return Check(name, CheckStatus.FAILED, f"{detail}, {worst:.1f} times what is allowed", fix)


def _tolerance(dtype: str) -> Tolerance | None:
    """Return the tolerance of a projection's product; None for a dtype without one."""
    from lmcore.contract.op.spec import OP_SPECS

    return next(spec for spec in OP_SPECS if spec.name == "linear").tolerances.get(dtype)


def _precision(device: Device) -> Check:
    """Check the dtypes of products under each precision policy, as a run does at its start.

    A policy without autocast may widen attention; the line says which.
    """
    from lmcore.contract.precision.check import wide_attention

    policies = precision_policies(*_handed_down(), device)
    offered = [policy for policy in policies if policy.available() is None]
    faults, fix, wider = [], None, ""
    for policy in offered:
        try:
            policy.verify(device)
            if dtypes := wide_attention(policy, device):
                wider += f"; under {policy.name} the reference of attention computes in {dtypes}"
        except LmcoreError as error:
            faults.append(in_one_line(error))
            fix = error.hint
    if faults:
        return Check(_PRECISION, CheckStatus.FAILED, "; ".join(faults), fix)
    names = ", ".join(policy.name for policy in offered)
    return Check(_PRECISION, CheckStatus.OK, f"products in the dtypes of {names}{wider}")


def _health(device: Device) -> Check:
    """Ask the plugin for the health of the device, as a run does now and then."""
    begin = time.perf_counter()
    reason = device.health_problem()
    seconds = time.perf_counter() - begin
    if reason is not None:
        fix = "do not train on it: look for a faulty device, or reset it"
        return Check(_HEALTH, CheckStatus.FAILED, reason, fix)
    detail = f"the plugin reports no fault, in {1e3 * seconds:.1f} ms"
    if seconds > _SLOW_HEALTH_SECONDS:
        fix = "`--check-device-interval` says how often a run asks"
        return Check(_HEALTH, CheckStatus.WARNING, detail, fix)
    return Check(_HEALTH, CheckStatus.OK, detail)


def _random_state(device: Device) -> Check:
    """Check that a generator's state, once saved and restored, gives the same numbers again."""
    import torch

    def draw() -> list[float]:
        found: list[float] = torch.rand(64, device=device.torch_device).cpu().tolist()
        return found

    name = "random state"
    device.seed(1234)
    first = draw()
    state = device.get_rng_state()
    second = draw()
    device.set_rng_state(state)
    again = draw()
    device.seed(1234)
    faults = []
    if state.dtype != torch.uint8 or state.device.type != "cpu":
        faults.append(f"it is {state.dtype} on {state.device}, not uint8 on the CPU")
    if first == second:
        faults.append("the same numbers come again without it")
    if again != second:
        faults.append("restored, it gives other numbers than before")
    if draw() != first:
        faults.append("one seed gives two sequences")
    if faults:
        fix = "no run can be continued exactly: report this to the plugin's authors"
        return Check(name, CheckStatus.FAILED, "; ".join(faults), fix)
    return Check(name, CheckStatus.OK, f"{state.numel()} bytes, saved and restored")


def reduction(timeout: float) -> Iterator[StepValues]:
    """Reduce a tensor over all processes; each of them calls this function.

    Args:
        timeout: Seconds until this process will be stopped.
    """
    yield from _step(ALL_REDUCE, functools.partial(_reduce, _INNER_SHARE * timeout))


def _reduce(timeout: float) -> Check:
    import torch
    from torch import distributed

    from lmcore.runtime.launch.rank import rank_info
    from lmcore.runtime.process.consistency import check_device
    from lmcore.runtime.process.group import backend_of, start_processes
    from lmcore.runtime.process.join import join_processes

    plugins, selection = _handed_down()
    place = rank_info(os.environ)
    with join_processes(place, timeout=timeout) as rendezvous:
        check_device(rendezvous, selection, plugins)
        device = _create(plugins, selection)
        try:
            backend_of(plugins, selection, device)
        except LmcoreError as error:  # one process can work all the same
            fix = "run one process only"
            return Check(ALL_REDUCE, CheckStatus.WARNING, in_one_line(error), fix)
        begin = time.perf_counter()
        with start_processes(plugins, selection, device, rendezvous, timeout=timeout) as processes:
            size = place.world_size
            own = torch.full((1000,), float(place.rank + 1), device=device.torch_device)
            total, mean = own.clone(), own.clone()
            distributed.all_reduce(total)
            wanted = {"sum": (total, size * (size + 1) / 2)}
            if processes.backend.supports_average:
                distributed.all_reduce(mean, distributed.ReduceOp.AVG)
                wanted["average"] = (mean, (size + 1) / 2)
            device.synchronize()
            wrong = [name for name, (got, right) in wanted.items() if (got != right).any().item()]
        took = time.perf_counter() - begin
    backend = processes.backend.name
    if wrong:
        fix = "do not train on several: look at the links, the driver and the backend's version"
        detail = f"{size} processes over `{backend}`: wrong {' and '.join(wrong)}"
        return Check(ALL_REDUCE, CheckStatus.FAILED, detail, fix)
    many = f"{size} processes" if size > 1 else "1 process, as there is 1 device,"
    detail = (
        f"{many} over `{backend}`: {' and '.join(wanted)} right, connected and done in {took:.2f} s"
    )
    return Check(ALL_REDUCE, CheckStatus.OK, detail)
