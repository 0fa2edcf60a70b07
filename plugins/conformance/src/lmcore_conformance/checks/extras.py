"""Level 5: what makes training faster or easier to watch: compile, graphs, pinning, profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lmcore_conformance.registry import Failure, check
from lmcore_conformance.tiny_run import tiny_runs

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_GROUP = "training"


@check(
    "extras.autocast",
    "L5",
    "`torch.autocast` computes products in the lower dtype and leaves the rest, and ends.",
    reason="Code of other libraries relies on it, whatever the plugin's own precisions do.",
    group=_GROUP,
    requires=["autocast", "bfloat16"],
)
def autocast(bench: Bench) -> str:
    """Look at dtypes inside, outside and in backward."""
    x = bench.values(16, 16).float().to(bench.where)
    weight = bench.values(16, 16, seed=1).float().to(bench.where).requires_grad_()
    with torch.autocast(bench.device.type, dtype=torch.bfloat16):
        inside = torch.nn.functional.linear(x, weight)
        with torch.autocast(bench.device.type, enabled=False):
            disabled = torch.nn.functional.linear(x, weight)
    after = torch.nn.functional.linear(x, weight)
    inside.float().sum().backward()
    found = {
        "inside": (inside.dtype, torch.bfloat16),
        "in a part where it is off": (disabled.dtype, torch.float32),
        "afterwards": (after.dtype, torch.float32),
        "the weight's gradient": (getattr(weight.grad, "dtype", None), torch.float32),
    }
    faults = [f"{name}: {one}, not {right}" for name, (one, right) in found.items() if one != right]
    if faults:
        raise Failure(*faults)
    return "bfloat16"


@check(
    "extras.pinned-memory",
    "L5",
    "`pin_memory` keeps the numbers and pins; copies from it may go on while the host does.",
    reason="Batches come to the device so, without the device waiting for them.",
    group=_GROUP,
    requires=["pin_memory"],
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
    there = found.to(bench.where, non_blocking=True)
    back = bench.device.require("pin_memory")(torch.zeros(300, 700))
    back.copy_(there, non_blocking=True)
    bench.device.synchronize()
    if not torch.equal(back, host):
        faults.append("copies without waiting bring other numbers")
    if faults:
        raise Failure(*faults)
    return "there and back"


@check(
    "extras.profiler",
    "L5",
    "torch's profiler sees the device's work.",
    reason="A step that is slow is looked at with it.",
    group=_GROUP,
    requires=["profiler"],
    seconds=90,
)
def profiler(bench: Bench) -> str:
    """Profile products and look for events of the device, or of the host where that is it."""
    from torch.profiler import profile, supported_activities

    x = bench.values(128, 128).float().to(bench.where)
    with profile(activities=list(supported_activities())) as seen:
        for _ in range(3):
            x = x @ x * 0.01
        bench.device.synchronize()
    events: Any = seen.events()
    names = {event.name for event in events}
    if not any("mm" in name or "matmul" in name for name in names):
        raise Failure(f"no product among its {len(names)} names")
    kinds = {str(event.device_type).rpartition(".")[2].lower() for event in events}
    own = {"cpu"} if bench.is_host else kinds - {"cpu"}
    if not own & kinds:
        raise Failure("it has events of the host alone")
    return f"{len(events)} events of {', '.join(sorted(kinds))}"


@check(
    "extras.graph-capture",
    "L5",
    "Work can be captured by `torch.accelerator.Graph` and played again on new numbers.",
    reason="Small models are limited by launches; graphs take them away.",
    group=_GROUP,
    requires=["graph_capture"],
    seconds=90,
)
def graph_capture(bench: Bench) -> str:
    """Capture a product, change its input in place, replay."""
    weight = bench.values(32, 32).float().to(bench.where)
    given = torch.zeros(8, 32, device=bench.where)
    _ = torch.tanh(given @ weight)
    bench.device.synchronize()
    graph: Any = torch.accelerator.Graph()
    with graph:
        out = torch.tanh(given @ weight)
    for seed in (1, 2):
        fresh = bench.values(8, 32, seed=seed).float()
        given.copy_(fresh.to(bench.where))
        graph.replay()
        bench.device.synchronize()
        if not torch.allclose(out.cpu(), torch.tanh(fresh @ weight.cpu()), rtol=1e-4, atol=1e-5):
            raise Failure("played again, it gives the numbers of other inputs")
    return "played twice"


@check(
    "extras.compile",
    "L5",
    "`--compile` trains with the losses of the eager run.",
    reason="Compiled blocks bind other kernels and fuse the rest.",
    group="compile",
    requires=["compile"],
    seconds=240,
)
def compiled(bench: Bench) -> str:
    """Train three steps with compiled blocks and without."""
    flags = "--precision fp32 --num-layers 1"
    with tiny_runs(bench) as runs:
        plain = runs.train(flags, steps=3)
        found = runs.train(f"{flags} --compile", steps=3)
    off = max(abs(a - b) for a, b in zip(found.losses, plain.losses, strict=True))
    if not off < 2e-5:
        raise Failure(f"losses are off by {off:.1e}")
    return f"off by {off:.1e} at most"
