"""Level 1: functions of torch on which the core relies, and that no other check calls.

The list of these functions is `lmcore_conformance.contract.torch_needs`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from lmcore.optim.adapter import fixed_random_numbers
from lmcore_conformance.registry import Failure, check, conclude

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_SIZE = 512
_PRODUCTS = 20


@check(
    "device.current-stream",
    "`with stream:` makes it the current stream and restores the previous one; an event that is "
    "recorded without a stream marks the current one.",
    level="L1",
    reason="Batches are copied in such a context, and losses are read after such an event.",
    group="streams",
    requires=["streams", "events"],
)
def current_stream(bench: Bench) -> str:
    """Nest two streams, also with an exception; record an event within a stream."""
    make_stream, make_event = (bench.device.require(name) for name in ("new_stream", "new_event"))
    first, second = make_stream(), make_stream()
    outside = torch.accelerator.current_stream(bench.torch_device)
    seen = []
    with first:
        seen.append(_is_current(first, bench))
        with second:
            seen.append(_is_current(second, bench))
        seen.append(_is_current(first, bench))
    with contextlib.suppress(_EndedByTestError), second:
        raise _EndedByTestError
    seen.append(_is_current(outside, bench))
    if not all(seen):
        raise Failure("`torch.accelerator.current_stream` is not the stream of the context")

    matrix = torch.eye(_SIZE).roll(1, 0).to(bench.torch_device)
    bench.device.synchronize()
    done = make_event()
    with first:
        product = matrix
        for _ in range(_PRODUCTS):
            product = product @ matrix
        done.record()
    second.wait_event(done)
    with second:
        found = product + 1
    second.synchronize()
    if not torch.equal(found.cpu(), torch.eye(_SIZE).roll(_PRODUCTS + 1, 0) + 1):
        raise Failure("an event that was recorded without a stream did not mark the current one")
    return "nested, left by an exception, recorded in"


class _EndedByTestError(Exception):
    """Ends a context in a check."""


def _is_current(stream: torch.Stream, bench: Bench) -> bool:
    return torch.accelerator.current_stream(bench.torch_device) == stream


@check(
    "device.fork-rng",
    "`torch.manual_seed` seeds the device, and `torch.random.fork_rng` restores its generator.",
    level="L1",
    reason="The class of `--optimizer MODULE:CLASS` is tried so before training, which must not "
    "change the random numbers of the run.",
    group="device",
)
def fork_rng(bench: Bench) -> str:
    """Draw with equal seeds in two such contexts, and compare the draws outside."""

    def draw() -> torch.Tensor:
        return torch.rand(100, device=bench.torch_device).cpu()

    inside = []
    bench.device.seed(7)
    expected = [draw(), draw()]
    bench.device.seed(7)
    found = []
    for _ in range(2):
        with fixed_random_numbers(bench.device.torch_device, 11):
            inside.append(draw())
        found.append(draw())
    faults = []
    if not torch.equal(*inside):
        faults.append("one seed of `torch.manual_seed` gives two sequences")
    if not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)):
        faults.append("`torch.random.fork_rng` does not restore the generator of the device")
    return conclude(faults, "seeded and restored")
