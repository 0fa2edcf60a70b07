"""Level 1: what lazy, compiling and monitored devices offer does what the contract says."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.base.errors import PluginError, counted
from lmcore.plugin.isolation.subprocess_call import in_one_line
from lmcore_conformance.kept import memory_kept
from lmcore_conformance.registry import Failure, check, conclude

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_check = partial(check, level="L1", group="device")
_WARM_STEPS = 4
_STEPS = 6
_WIDTH = 64
_TOLERANCE = 1e-3
"""Largest difference of a weight: float32 on two devices, or products of fewer bits."""

_HEALTH_SECONDS = 0.1
_COUNT_SECONDS = 0.01


@_check(
    "device.health",
    "`health` returns None on a device that computes, and takes milliseconds, also while work is "
    "queued; it changes no tensor, draws no random numbers and keeps no memory.",
    reason="A run asks for it every few steps, and ends if it returns a reason.",
)
def health(bench: Bench) -> str:
    """Ask three times: before, while and after the device computes."""
    device = bench.device
    if device.health is None:
        return "its plugin cannot tell"
    faults, times = [], []
    for queued in (0, 8, 0):
        _products(bench, queued)
        begin = time.perf_counter()
        try:
            reason = device.health_problem()
        except PluginError as error:
            raise Failure(f"{error.what}; {error.why}") from error
        times.append(time.perf_counter() - begin)
        if reason is not None:
            faults.append(f"`health` reports a fault of a device that computes: {reason}")
    device.synchronize()
    if min(times) > _HEALTH_SECONDS:
        faults.append(f"`health` takes {min(times):.2f} s; it is called between steps")
    if not faults:  # many calls follow, which have to be quick and right
        faults += [f"`health` {fault}" for fault in _side_effects(bench, device.health)]
    return conclude(dict.fromkeys(faults), f"healthy, {min(times) * 1e3:.1f} ms")


@_check(
    "device.step-boundary",
    "`step_boundary` can be called at any time and runs what a lazy device has recorded: steps do "
    "not become slower, and have the host's results; it changes no tensor, draws no random "
    "numbers and keeps no memory.",
    reason="A lazy device that is not told to run records the whole run; each step then contains "
    "all earlier ones.",
)
def step_boundary(bench: Bench) -> str:
    """Call it with nothing to run, then train, and compare times and weights."""
    call = bench.device.step_boundary
    for _ in range(3):
        call()
    faults = []
    training, reference = _Training(bench), _Training(bench)
    count = _WARM_STEPS + _STEPS + 2
    times = [training.step() for _ in range(count)]
    for waits in (True, False):
        taken, again = times, _Training(bench)
        if not waits:
            unsynchronized = _Training(bench)
            taken = [unsynchronized.step(waits=False) for _ in range(count)]
        if _grow(taken) and _grow([again.step(waits=waits) for _ in taken]):  # else a busy host
            faults.append(
                f"steps become slower, from {min(taken):.2f} s to {max(taken[-2:]):.2f} s: "
                "`step_boundary` does not run what the device has recorded"
            )
            break
    reference.move_to_host()
    for _ in times:
        reference.step()
    difference = (training.weight.detach().cpu() - reference.weight.detach()).abs().max().item()
    if not difference < _TOLERANCE:
        faults.append(
            f"after {len(times)} steps a weight differs from the host's by {difference:.1e}"
        )
    if not faults:  # many calls follow, which have to be quick and right
        faults += [f"`step_boundary` {fault}" for fault in _side_effects(bench, call)]
    return conclude(faults, f"{min(times) * 1e3:.0f} ms a step")


def _grow(times: Sequence[float]) -> bool:
    """Return True if each step takes longer than the one before, but for noise."""
    later = times[2:]
    is_straight = len(set(later)) > 1 and statistics.correlation(range(len(later)), later) > 0.85
    return is_straight and min(later[-2:]) > 1.3 * min(later[:2])


@_check(
    "device.compilations",
    "`compilations` returns a number and a time that only grow, in microseconds; steps that repeat "
    "compile nothing more.",
    reason="A run tells the user what a step waits for, and leaves such steps out of its speed; a "
    "device that compiles each step anew is too slow to train.",
)
def compilations(bench: Bench) -> str:
    """Read it around steps of one shape."""
    device = bench.device
    if device.compilations is None:
        return "it compiles nothing while it works, or cannot tell"
    try:
        found = [device.compiled_so_far()]
        times = []
        training = _Training(bench)
        for _ in range(_WARM_STEPS + _STEPS):
            training.step()
            begin = time.perf_counter()
            found.append(device.compiled_so_far())
            times.append(time.perf_counter() - begin)
    except PluginError as error:
        raise Failure(f"{error.what}; {error.why}") from error
    counts = [one.count for one in found if one is not None]
    seconds = [one.seconds for one in found if one is not None]
    faults = []
    if sorted(counts) != counts or sorted(seconds) != seconds or counts[0] < 0 or seconds[0] < 0:
        faults.append(f"its numbers fall: {counts}, {[round(one, 3) for one in seconds]} s")
    more = counts[-1] - counts[_WARM_STEPS]
    if more > 0:
        programs = counted(more, "program")
        faults.append(
            f"{_STEPS} equal steps after {_WARM_STEPS} others compiled {programs} more; does "
            "`step_boundary` run what a lazy device has recorded?"
        )
    if min(times) > _COUNT_SECONDS:
        faults.append(f"`compilations` takes {min(times) * 1e3:.0f} ms; it is read in each step")
    return conclude(faults, f"{counted(counts[-1], 'program')} in {seconds[-1]:.1f} s")


@_check(
    "device.inference-mode",
    "Under `torch.inference_mode` tensors are made, multiplied, written in place and read, or "
    "`inference_mode` is False.",
    reason="Generation and validation compute under it unless the device declares that it cannot.",
)
def inference_mode(bench: Bench) -> str:
    """Fill a cache as generation does, and read it inside and afterwards."""
    if not bench.device.inference_mode:
        return "declared as missing; the core uses `torch.no_grad`"
    weight = bench.values(16, 16).float().to(bench.torch_device).requires_grad_()
    x = bench.values(3, 16, seed=1).float().to(bench.torch_device)
    try:
        with torch.inference_mode():
            cache = torch.zeros(8, 16, device=bench.torch_device)
            cache[2:5].copy_(x @ weight)
            cache.index_add_(0, torch.tensor([2], device=bench.torch_device), x[:1])
            bench.device.step_boundary()
            inside = cache.cpu()
        with torch.no_grad():
            found = (cache.clone() * 2).cpu()
    except RuntimeError as error:
        text = f"`Device.inference_mode` is True, and it raised {in_one_line(error)}"
        raise Failure(text, "pass `inference_mode=False` to the device") from error
    right = torch.zeros(8, 16)
    right[2:5] = x.cpu() @ weight.detach().cpu()
    right[2] += x[0].cpu()
    wrong = [
        f"`Device.inference_mode` is True, and a cache has wrong numbers {place}"
        for place, tensor in (("inside", inside), ("afterwards", found / 2))
        if not torch.allclose(tensor, right, atol=1e-2)
    ]
    return conclude(wrong, "a cache is filled and read")


def _side_effects(bench: Bench, call: Callable[[], object]) -> Iterator[str]:
    """Yield what a function does that is called between steps, and only reads or starts work."""
    yield from _changes(bench, call)
    yield from _draws(bench, call)
    yield from memory_kept(bench, call)


def _changes(bench: Bench, call: Callable[[], object]) -> Iterator[str]:
    """Yield the tensors that have other numbers after a call."""
    weight = bench.values(97).float().to(bench.torch_device).requires_grad_()
    weight.grad = bench.values(97, seed=1).float().to(bench.torch_device)
    live = {"a weight": weight, "a gradient": weight.grad}
    live["an activation"] = bench.values(97, seed=2).float().to(bench.torch_device)
    before = {name: _bits(tensor).clone() for name, tensor in live.items()}
    call()
    for name, tensor in live.items():
        if not torch.equal(_bits(tensor), before[name]):
            yield f"changes numbers: {name} has others after it"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().view(torch.int32)


def _draws(bench: Bench, call: Callable[[], object]) -> Iterator[str]:
    """Yield if numbers that are drawn after a call are others than without it."""

    def drawn(before: Callable[[], object]) -> tuple[Tensor, Tensor]:
        bench.device.seed(7)
        torch.default_generator.manual_seed(7)
        before()
        return torch.rand(13, device=bench.torch_device).cpu(), torch.rand(13)

    accelerator = torch.accelerator.current_accelerator()
    eager = bench.is_host or (accelerator is not None and accelerator.type == bench.device.type)
    places = ("the device's", "the host's")
    for place, plain, found in zip(places, drawn(lambda: None), drawn(call), strict=True):
        # A lazy device may seed each program that it runs anew.
        if not torch.equal(plain, found) and (eager or place != places[0]):
            yield f"draws random numbers: it moves {place} generator"


def _products(bench: Bench, count: int) -> None:
    """Queue some work on the device."""
    square = torch.eye(256, device=bench.torch_device)
    for _ in range(count):
        square = square @ square


class _Training:
    """Training of one matrix, in steps of the same shapes, with the core's boundaries."""

    def __init__(self, bench: Bench) -> None:
        self.device = bench.device
        weight = 0.05 * bench.values(_WIDTH, _WIDTH)
        self.weight = weight.float().to(bench.torch_device).requires_grad_()
        self.x = bench.values(_WIDTH, _WIDTH, seed=1).float().to(bench.torch_device)

    def move_to_host(self) -> None:
        """Use tensors of the host from now on."""
        self.weight = self.weight.detach().cpu().requires_grad_()
        self.x = self.x.cpu()

    def step(self, *, waits: bool = True) -> float:
        """Make a step; return the seconds until its loss is on the host.

        Args:
            waits: True to synchronize before the loss is read.  A run reads losses alone, and
                `synchronize` of some devices runs what is recorded.
        """
        begin = time.perf_counter()
        hidden = self.x
        for _ in range(4):
            hidden = torch.tanh(hidden @ self.weight)
        loss = hidden.square().mean()
        loss.backward()
        self.device.step_boundary()
        with torch.no_grad():
            self.weight -= 0.1 * self.weight.grad  # type: ignore[operator]  # after `backward`
        self.weight.grad = None
        self.device.step_boundary()
        if waits:
            self.device.synchronize()
        loss.item()
        return time.perf_counter() - begin
