"""Level 1: the device's random numbers: seeds, states, streams, and the host's left alone."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.base.errors import LmcoreError
from lmcore_conformance.registry import Failure, check, conclude

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_check = partial(check, level="L1", group="device")


def _draws(bench: Bench) -> dict[str, Callable[[], Tensor]]:
    """Return ways to draw, of odd sizes, so that a state may be in the middle of a block."""
    device = bench.torch_device
    return {
        "rand": lambda: torch.rand(37, device=device),
        "randn": lambda: torch.randn(5, 3, device=device),
        "randint": lambda: torch.randint(1000, (11,), device=device),
        "bernoulli_": lambda: torch.empty(129, device=device).bernoulli_(0.3),
        "dropout": lambda: torch.nn.functional.dropout(torch.ones(77, device=device), 0.5),
        "normal_": lambda: torch.empty(1025, device=device).normal_(),
        "uniform_": lambda: torch.empty(3, device=device).uniform_(-1.0, 1.0),
    }


@_check(
    "device.seed",
    "A seed determines all random numbers; another seed gives different numbers.",
    reason="Runs must be repeatable, and some ranks must draw different numbers.",
)
def seed(bench: Bench) -> str:
    """Draw in several ways after equal and different seeds."""
    faults = []
    for name, draw in _draws(bench).items():
        rounds = []
        for number in (1234, 1234, 1235):
            bench.device.seed(number)
            rounds.append([draw().cpu(), draw().cpu()])
        if not all(torch.equal(a, b) for a, b in zip(rounds[0], rounds[1], strict=True)):
            faults.append(f"`{name}`: one seed gives two sequences")
        if all(torch.equal(a, b) for a, b in zip(rounds[0], rounds[2], strict=True)):
            faults.append(f"`{name}`: another seed gives the same sequence")
        if torch.equal(*rounds[0]):
            faults.append(f"`{name}`: the same numbers come again")
    bits = [0, 1, 8, 16, 24, 31]
    first = {}
    for bit in bits:
        bench.device.seed(2**bit)
        first[bit] = torch.rand(64, device=bench.torch_device).cpu()
    equal = [
        f"2**{low} and 2**{high}"
        for low, high in itertools.combinations(bits, 2)
        if torch.equal(first[low], first[high])
    ]
    if equal:
        faults.append(f"the seeds {', '.join(equal)} give the same numbers")
    bench.device.seed(2**63 - 1)
    return conclude(faults, ", ".join(_draws(bench)))


@_check(
    "device.rng-state",
    "A restored state repeats the numbers; the state is a uint8 tensor on the host, and a copy; "
    "reading it changes no number, also behind a step boundary.",
    reason="Recomputation and `--load` restore states.",
)
def rng_state(bench: Bench) -> str:
    """Save, draw, put back, draw again: for each way to draw, after an odd number of draws."""
    faults = []
    size = 0
    for name, draw in _draws(bench).items():
        bench.device.seed(7)
        draw()
        state = bench.device.get_rng_state()
        size = state.numel()
        if state.dtype != torch.uint8 or state.device.type != "cpu":
            raise Failure(f"the state is {state.dtype} on `{state.device}`, not uint8 on the host")
        kept = state.clone()
        first = [draw().cpu() for _ in range(3)]
        bench.device.get_rng_state()
        if not torch.equal(state, kept):
            faults.append("the state that was returned changes while numbers are drawn")
        bench.device.seed(99)
        draw()
        bench.device.set_rng_state(kept)
        if not torch.equal(bench.device.get_rng_state(), kept):
            faults.append(f"`{name}`: the restored state is not the one that is read")
        again = [draw().cpu() for _ in range(3)]
        if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
            faults.append(f"`{name}`: a restored state gives other numbers")
        plain, watched = (_in_steps(bench, draw, reads=reads) for reads in (False, True))
        if not all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True)):
            faults.append(f"`{name}`: reading the state changes the numbers of later steps")
    return conclude(dict.fromkeys(faults), f"{size} bytes")


def _in_steps(bench: Bench, draw: Callable[[], Tensor], *, reads: bool) -> list[Tensor]:
    """Draw in two steps, and read the state before the boundary between them or not."""
    bench.device.step_boundary()
    bench.device.seed(8)
    first = draw()
    if reads:
        bench.device.get_rng_state()
    bench.device.step_boundary()
    return [first.cpu(), draw().cpu()]


@_check(
    "device.rng-apart-from-host",
    "Seeding and drawing on the device do not change the host's generator, and vice versa.",
    reason="The order of the data is drawn on the host, dropout on the device.",
    requires=["host_apart"],
)
def rng_apart(bench: Bench) -> str:
    """Watch one generator while the other is used."""
    faults = []
    bench.device.seed(3)
    torch.default_generator.manual_seed(5)
    host = torch.get_rng_state()
    bench.device.seed(4)
    for draw in _draws(bench).values():
        draw()
    if not torch.equal(torch.get_rng_state(), host):
        faults.append("drawing or seeding on the device moves the host's generator")
    device = bench.device.get_rng_state().clone()
    torch.default_generator.manual_seed(6)
    torch.rand(9)
    if not torch.equal(bench.device.get_rng_state(), device):
        faults.append("drawing or seeding on the host moves the device's generator")
    return conclude(faults, "both ways")


@_check(
    "device.rng-streams",
    "The tracker's streams are independent of each other and continue at their last state; a "
    "snapshot has the state of the host's generator, too.",
    reason="Dropout draws from streams, so that it can be recomputed, and equal on several "
    "devices.",
)
def rng_streams(bench: Bench) -> str:
    """Draw from two streams in turns, compare with each drawn alone, and restore in the middle."""
    tracker = bench.device.rng_tracker()
    try:
        tracker.verify()
    except LmcoreError as error:
        raise Failure(error.why or error.what) from error
    tracker.add("one", 1)
    tracker.add("other", 2)
    start = tracker.states()

    def draw(name: str) -> Tensor:
        with tracker.fork(name):
            return torch.rand(13, device=bench.torch_device).cpu()

    mixed = [draw("one"), draw("other"), draw("one"), draw("other")]
    tracker.set_states(start)
    alone = [draw("one"), draw("one"), draw("other"), draw("other")]
    if not all(torch.equal(mixed[a], alone[b]) for a, b in ((0, 0), (2, 1), (1, 2), (3, 3))):
        raise Failure("a stream's numbers depend on what another one draws")
    if torch.equal(mixed[0], mixed[2]):
        raise Failure("a stream draws the same numbers at each entry: it begins anew")
    tracker.set_states(start)
    draw("one")
    middle = tracker.states()
    later = [draw("one"), draw("one")]
    tracker.set_states(middle)
    if not all(torch.equal(one, draw("one")) for one in later):
        raise Failure("`set_states` does not continue a stream where `states` was read")
    if torch.equal(mixed[0], mixed[1]):
        raise Failure("streams of different seeds draw the same numbers")
    outside = bench.device.get_rng_state().clone()
    draw("one")
    if not torch.equal(bench.device.get_rng_state(), outside):
        raise Failure("drawing from a stream moves the device's own state")
    snapshot = tracker.snapshot()
    host = torch.rand(13)
    tracker.restore(snapshot)
    if not torch.equal(torch.rand(13), host):
        raise Failure("`restore` does not put back the state of the host's generator")
    return "two streams, and the host's generator"


@_check(
    "device.rng-recompute",
    "A block that draws several times gives the same numbers when it is repeated from its saved "
    "state, whichever of its results are kept, and the draws that follow are not changed.",
    reason="`--recompute` repeats each block so: the forward pass keeps its output alone, the "
    "repetition all tensors. With other draws, gradients belong to another dropout.",
)
def rng_recompute(bench: Bench) -> str:
    """Draw in a block, from a stream and from the device's own, and repeat it before reading."""
    faults = []
    for stream, (name, block) in itertools.product(("", "dropout"), _blocks(bench).items()):
        place = f"{name}, from a stream" if stream else name
        _, alone = _with_repetitions(bench, block, stream, 0)
        (first, again), beside = _with_repetitions(bench, block, stream, 1)
        if not torch.equal(first, again):
            faults.append(
                f"{place}: repeated from the saved state, it draws other numbers; what is drawn "
                "between two states must be drawn in the order of the calls"
            )
        if not all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True)):
            faults.append(f"{place}: the repetition changes the numbers that are drawn next")
    return conclude(faults, f"{len(_blocks(bench))} blocks")


def _blocks(bench: Bench) -> dict[str, Callable[[], list[Tensor]]]:
    """Return blocks that draw twice; the last tensor of each is its output.

    The outputs name the two draws in both orders: a compiler that starts at an output meets them in
    one of the two orders, whichever way it goes.
    """
    ones = torch.ones(3, 37, device=bench.torch_device)
    dropout = torch.nn.functional.dropout

    def in_order() -> list[Tensor]:
        first, second = dropout(ones, 0.5), dropout(ones, 0.5)
        return [first, second, 2 * first + second]

    def in_reverse() -> list[Tensor]:
        first, second = dropout(ones, 0.5), dropout(ones, 0.5)
        return [first, second, second + 2 * first]

    return {"first draw + second draw": in_order, "second draw + first draw": in_reverse}


def _with_repetitions(
    bench: Bench, block: Callable[[], list[Tensor]], stream: str, count: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs of the block and of its repetitions, and the draws around them."""
    bench.device.seed(7)
    tracker = bench.device.rng_tracker()
    if stream:
        tracker.add(stream, 5)

    def forked() -> contextlib.AbstractContextManager[None]:
        return tracker.fork(stream) if stream else contextlib.nullcontext()

    def draw() -> Tensor:
        with forked():
            return torch.rand(13, device=bench.torch_device)

    with forked():
        states = tracker.snapshot()
        outputs = [block()[-1]]  # the other tensors are dropped before a lazy device runs
    around = [draw()]
    kept = []
    for _ in range(count):
        with tracker.restored(states):
            kept += block()
            outputs.append(kept[-1])
        around.append(draw())
    around += [draw() for _ in range(2 - len(around))]
    around.append(torch.rand(13, device=bench.torch_device))
    bench.device.step_boundary()
    return [output.cpu() for output in outputs], [one.cpu() for one in around]


@_check(
    "device.distributions",
    "Uniform, normal and Bernoulli numbers have the correct mean, standard deviation and range.",
    reason="A wrong distribution scales initial weights and dropout by a factor.",
)
def distributions(bench: Bench) -> str:
    """Compare moments of 200,000 numbers with their exact values, at five deviations."""
    count = 200_000
    bench.device.seed(11)
    uniform = bench.host(torch.rand(count, device=bench.torch_device))
    normal = bench.host(torch.randn(count, device=bench.torch_device))
    coins = bench.host(torch.empty(count, device=bench.torch_device).bernoulli_(0.3))
    figures = {
        "mean of uniform numbers": (uniform.mean(), 0.5, (1 / 12) ** 0.5),
        "spread of uniform numbers": (uniform.var(), 1 / 12, (1 / 180) ** 0.5),
        "mean of normal numbers": (normal.mean(), 0.0, 1.0),
        "spread of normal numbers": (normal.var(), 1.0, 2**0.5),
        "fourth moment of normal numbers": (normal.pow(4).mean(), 3.0, 96**0.5),
        "share of ones at 0.3": (coins.mean(), 0.3, 0.21**0.5),
        "neighbours of uniform numbers": (
            ((uniform[1:] - 0.5) * (uniform[:-1] - 0.5)).mean(),
            0.0,
            1 / 12,
        ),
    }
    faults = [
        f"{name}: {float(found):.5f}, not {right:.5f}"
        for name, (found, right, deviation) in figures.items()
        if not abs(float(found) - right) < 5 * deviation / count**0.5
    ]
    if not (uniform.min() >= 0 and uniform.max() < 1):
        faults.append("uniform numbers lie outside [0, 1)")
    return conclude(faults, f"{len(figures)} figures of {count:,} numbers")
