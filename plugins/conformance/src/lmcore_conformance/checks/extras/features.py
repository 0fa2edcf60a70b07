"""Level 5: what makes training faster or easier to watch: compile, graphs, pinning, profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.base.errors import counted
from lmcore.contract.precision.products import (
    Product,
    ProductCounter,
    counted_products,
    in_words,
)
from lmcore_conformance.registry import Failure, check, conclude
from lmcore_conformance.tiny_run import tiny_runs

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_check = partial(check, level="L5", group="training")


@_check(
    "extras.autocast",
    "`torch.autocast` computes all products in the lower dtype, forward and backward: with and"
    " without bias, batched, attention; other operations unchanged, until its context ends.",
    reason="Other libraries depend on it, independent of the plugin's precision policies.",
    requires=["autocast", "bfloat16"],
)
def autocast(bench: Bench) -> str:
    """Check dtypes inside, if it is off, afterwards and in backward, for each product."""
    x = bench.values(2, 16, 16).float().to(bench.torch_device).requires_grad_()
    weight = bench.values(2, 16, 16, seed=1).float().to(bench.torch_device).requires_grad_()
    bias = bench.values(16, seed=2).float().to(bench.torch_device)
    functional = torch.nn.functional
    products: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: functional.linear(x, weight[0]),
        "linear with bias": lambda: functional.linear(x, weight[0], bias),
        "mm": lambda: x[0] @ weight[0],
        "addmm": lambda: torch.addmm(bias, x[0], weight[0]),
        "bmm": lambda: torch.bmm(x, weight),
        "baddbmm": lambda: torch.baddbmm(bias, x, weight),
        "product of four dims": lambda: x[None] @ weight[None],
        "attention": lambda: functional.scaled_dot_product_attention(
            x[None], weight[None], x[None]
        ),
    }
    faults = []
    for name, product in products.items():
        inside, seen = _autocast_product(product, bench.device.type)
        with (
            torch.autocast(bench.device.type, dtype=torch.bfloat16),
            torch.autocast(bench.device.type, enabled=False),
        ):
            disabled = product()
        wide = {each: n for each, n in seen.items() if each.dtype != "bfloat16"}
        found = {
            "inside": (inside.dtype, torch.bfloat16),
            "in a part where it is off": (disabled.dtype, torch.float32),
            "afterwards": (product().dtype, torch.float32),
        }
        faults += [
            f"{name}: {place}: {value}, not {right}"
            for place, (value, right) in found.items()
            if value != right
        ]
        if wide and name != "attention":  # torch's own, without a fused kernel, widens again
            faults.append(f"{name}: not in bfloat16: {in_words(Counter(wide))}")
    with torch.autocast(bench.device.type, dtype=torch.bfloat16):
        if (x + 1).dtype != torch.float32:
            faults.append(f"x + 1: {(x + 1).dtype}, not torch.float32")
    gradients = {getattr(tensor.grad, "dtype", None) for tensor in (x, weight)}
    if gradients != {torch.float32}:
        faults.append(f"gradients: {gradients}, not torch.float32")
    return conclude(faults, f"bfloat16: {', '.join(products)}")


def _autocast_product(
    product: Callable[[], Tensor], device_type: str
) -> tuple[Tensor, Counter[Product]]:
    """Return a product under autocast, and the products of it and of its backward pass."""
    results: list[Tensor] = []

    def compute(counter: ProductCounter) -> None:
        with torch.autocast(device_type, dtype=torch.bfloat16), counter:
            results.append(product())
        with counter:
            results[-1].float().sum().backward()

    seen = counted_products(compute, device_type)
    return results[-1], seen


@_check(
    "extras.pinned-memory",
    "`pin_memory` keeps the values and pins the memory; copies from it are asynchronous.",
    reason="Batches are prefetched to the device this way.",
    requires=["pin_memory"],
    every_index=True,
)
def pinned(bench: Bench) -> str:
    """Pin, copy without waiting, and compare."""
    host = bench.values(300, 700).float()
    found = bench.device.require("pin_memory")(host)
    faults = []
    if not torch.equal(found, host):
        faults.append("a pinned tensor has other numbers")
    if found.device.type != "cpu" or not found.is_pinned():
        faults.append("the tensor is not in pinned host memory")
    on_device = found.to(bench.torch_device, non_blocking=True)
    back = bench.device.require("pin_memory")(torch.zeros(300, 700))
    back.copy_(on_device, non_blocking=True)
    bench.device.synchronize()
    if not torch.equal(back, host):
        faults.append("copies without waiting bring other numbers")
    return conclude(faults, "there and back")


@_check(
    "extras.profiler",
    "torch's profiler sees the device's work.",
    reason="Slow steps are analysed with it.",
    requires=["profiler"],
    seconds=90,
)
def profiler(bench: Bench) -> str:
    """Profile products and search for events of the device, or of the host if it is the device."""
    from torch.profiler import profile, supported_activities

    x = bench.values(128, 128).float().to(bench.torch_device)
    with profile(activities=list(supported_activities())) as seen:
        for _ in range(3):
            x = x @ x * 0.01
        bench.device.synchronize()
    events: Any = seen.events()
    names = {event.name for event in events}
    if not any("mm" in name or "matmul" in name for name in names):
        raise Failure(f"no product among {counted(len(names), 'name')}")
    kinds = {str(event.device_type).rpartition(".")[2].lower() for event in events}
    own = {"cpu"} if bench.is_host else kinds - {"cpu"}
    if not own & kinds:
        raise Failure("it has events of the host alone")
    return f"{counted(len(events), 'event')} of {', '.join(sorted(kinds))}"


@_check(
    "extras.graph-capture",
    "`replay` executes the captured work with the current values of its tensors; capture executes"
    " nothing.",
    reason="The speed of small models is limited by kernel launches, which graphs avoid.",
    requires=["graph_capture", "streams"],
    seconds=90,
)
def graph_capture(bench: Bench) -> str:
    """Record a product and a sum in place, see that neither is done, change the input, play."""
    weight = bench.values(32, 32).float().to(bench.torch_device)
    given = torch.zeros(8, 32, device=bench.torch_device)
    total = torch.zeros(8, 32, device=bench.torch_device)
    _ = torch.tanh(given @ weight) + total
    with _recorded(bench) as graph:
        out = torch.tanh(given @ weight)
        total.add_(out)
    bench.device.synchronize()
    if total.cpu().any():
        raise Failure("what is recorded has been done, too")
    expected = torch.zeros(8, 32)
    for seed in (1, 2):
        fresh = bench.values(8, 32, seed=seed).float()
        given.copy_(fresh.to(bench.torch_device))
        graph.replay()
        bench.device.synchronize()
        right = torch.tanh(fresh @ weight.cpu())
        expected += right
        if not torch.allclose(out.cpu(), right, rtol=1e-4, atol=1e-5):
            raise Failure("played again, it gives the numbers of other inputs")
        if not torch.allclose(total.cpu(), expected, rtol=1e-4, atol=1e-5):
            raise Failure("played again, it does not add to what is there")
    return "played twice"


@_check(
    "extras.graph-random",
    "A graph that draws random numbers draws new numbers in each replay, and a seed repeats them.",
    reason="Otherwise dropout drops the same elements in every step.",
    requires=["graph_capture", "streams"],
    seconds=90,
)
def graph_random(bench: Bench) -> str:
    """Record dropout and play it under a seed, again, and under the seed once more."""
    x = torch.ones(1000, device=bench.torch_device)
    _ = torch.nn.functional.dropout(x, 0.5)
    with _recorded(bench) as graph:
        out = torch.nn.functional.dropout(x, 0.5)
    drawn = []
    for seed in (7, None, 7):
        if seed is not None:
            bench.device.seed(seed)
        graph.replay()
        bench.device.synchronize()
        drawn.append(out.cpu())
    kept = [float((output > 0).float().mean()) for output in drawn]
    faults = []
    if torch.equal(drawn[0], drawn[1]):
        faults.append("played again, the same elements are dropped")
    if not torch.equal(drawn[0], drawn[2]):
        faults.append("under the same seed other elements are dropped")
    if not all(0.4 < fraction < 0.6 for fraction in kept):
        faults.append(f"of every two elements {kept} are kept")
    return conclude(faults, "new numbers each time")


@_check(
    "extras.step-graph",
    "`--step-graph` trains with the losses of a run without capture.",
    reason="The captured graph must contain the whole step.",
    requires=["graph_capture", "streams"],
    seconds=240,
)
def step_graph(bench: Bench) -> str:
    """Train six steps of two micro-batches, recorded from the fourth micro-batch on."""
    flags = "--precision fp32 --num-layers 1 --global-batch-size 8 --no-compile"
    return _trains_the_same(bench, flags, "--step-graph", steps=6)


@_check(
    "extras.compile",
    "`--compile` trains with the losses of the eager run; functions that differ in a constant "
    "alone are compiled to different programs.",
    reason="Compiled blocks bind other kernels and fuse operations; layers of two models may "
    "differ in a constant.",
    group="compile",
    requires=["compile"],
    seconds=240,
)
def compiled(bench: Bench) -> str:
    """Train three steps with compiled blocks and without; compile functions of four constants."""
    trained = _trains_the_same(bench, "--precision fp32 --num-layers 1", "--compile", steps=3)
    return conclude(_shared_programs(bench), trained)


_CONSTANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("the first constants", {}),
    ("another epsilon of a norm", {"epsilon": 0.5}),
    ("another factor", {"factor": 3.0}),
    ("another size of a view", {"columns": 32}),
)


def _norm_and_sum(
    *, epsilon: float = 1e-5, factor: float = 2.0, columns: int = 16
) -> Callable[[Tensor], Tensor]:
    """Return a function of these constants, the same in all else."""

    def compute(x: Tensor) -> Tensor:
        normal = torch.nn.functional.layer_norm(x, (x.shape[-1],), eps=epsilon)
        return (normal * factor).view(-1, columns).cumsum(-1)

    return compute


def _shared_programs(bench: Bench) -> Iterator[str]:
    """Compile functions that differ in a constant; yield which computes other than uncompiled."""
    chosen = bench.device.compile_backend
    backend: dict[str, Any] = {} if chosen is None else {"backend": chosen}
    x = bench.values(8, 64).float().to(bench.torch_device)
    first = bench.host(_norm_and_sum()(x))
    for name, constants in _CONSTANTS:
        function = _norm_and_sum(**constants)
        right = bench.host(function(x))
        found = bench.host(torch.compile(function, dynamic=False, **backend)(x))
        if _close(found, right):
            continue
        if constants and _close(found, first):
            yield (
                f"a function with {name} gets the program of one that was compiled before it: "
                "`compile_backend` keeps programs without their constants"
            )
        else:
            yield f"a function with {name} computes other numbers compiled than uncompiled"


def _close(found: Tensor, right: Tensor) -> bool:
    return found.shape == right.shape and torch.allclose(found, right, rtol=1e-3, atol=1e-4)


@contextmanager
def _recorded(bench: Bench) -> Iterator[Any]:
    """Record what is queued within the context, on a separate stream; give the graph."""
    graph, stream = bench.device.require("new_graph")(), bench.device.require("new_stream")()
    bench.device.synchronize()
    with stream:
        graph.capture_begin()
        yield graph
        graph.capture_end()


def _trains_the_same(bench: Bench, flags: str, more: str, *, steps: int) -> str:
    """Compare the losses of a run with the losses of a run with one more flag."""
    with tiny_runs(bench) as runs:
        plain = runs.train(flags, steps=steps)
        found = runs.train(f"{flags} {more}", steps=steps)
    off = max(abs(a - b) for a, b in zip(found.losses, plain.losses, strict=True))
    if not off < 2e-5:
        raise Failure(f"losses are off by {off:.1e}")
    return f"off by {off:.1e} at most"
