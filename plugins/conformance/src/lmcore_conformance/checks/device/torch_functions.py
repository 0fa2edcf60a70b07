"""Level 1: functions of torch on which the core relies, and that no other check calls.

The list of these functions is `lmcore_conformance.contract.torch_needs`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from lmcore.contract.op import reference
from lmcore.contract.precision.products import ProductCounter
from lmcore.optim.adapter import fixed_random_numbers
from lmcore.plugin.isolation.subprocess_call import in_one_line
from lmcore_conformance.registry import Failure, check, conclude

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_SIZE = 512
_PRODUCTS = 20
_WIDTH = 16
_TOLERANCE = 1e-4
"""Largest difference of a gradient: kernels that add in any order differ by less."""


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


@check(
    "device.dispatch-mode",
    "Layers compute within a `TorchDispatchMode`, forward and backward, with the same results as "
    "without one.",
    level="L1",
    reason="Before each run the products of some layers are counted in such a mode, to prove the "
    "dtypes of its precision: without it no run starts.",
    group="device",
)
def dispatch_mode(bench: Bench) -> str:
    """Compute a small block in the mode that a run uses, and compare it with plain computation."""
    plain = _gradients(bench)
    try:
        with ProductCounter() as counter:
            inside = _gradients(bench)
    except Exception as error:
        raise Failure(
            f"within a `TorchDispatchMode` it raised {in_one_line(error)}; without one it did not",
            "every op that reaches the device below autograd must take the tensors of a mode "
            "(`torch.utils._python_dispatch`), which calls it again from Python: "
            "docs/reference/device-requirements.md",
        ) from error
    faults = [
        f"within a `TorchDispatchMode` the {name} has other numbers"
        for name, right in plain.items()
        if not torch.allclose(inside[name], right, rtol=_TOLERANCE, atol=_TOLERANCE)
    ]
    return conclude(faults, f"{counter.products.total()} products are seen")


def _gradients(bench: Bench) -> dict[str, Tensor]:
    """Return the loss of a block of a transformer, and its gradients, on the host."""
    on = bench.torch_device
    sizes = {
        "embedding": (7, _WIDTH),
        "gain": (_WIDTH,),
        "offset": (_WIDTH,),
        "queries": (_WIDTH, _WIDTH),
        "keys": (_WIDTH, _WIDTH),
        "values": (_WIDTH, _WIDTH),
        "bias": (_WIDTH,),
        "output": (_WIDTH, _WIDTH),
    }
    weights = {
        name: bench.values(*size, seed=seed).float().to(on).requires_grad_()
        for seed, (name, size) in enumerate(sizes.items())
    }
    tokens_BS = torch.arange(10, device=on).remainder(7).view(2, 5)
    x_BSH = functional.embedding(tokens_BS, weights["embedding"])
    x_BSH = functional.layer_norm(x_BSH, (_WIDTH,), weights["gain"], weights["offset"])
    heads = [
        functional.linear(x_BSH, weights[name], weights["bias"]).unflatten(-1, (2, -1))
        for name in ("queries", "keys", "values")
    ]
    out_BNSD = reference.attention(*(head.transpose(1, 2) for head in heads), causal=True)
    x_BSH = x_BSH + functional.linear(out_BNSD.transpose(1, 2).flatten(2), weights["output"])
    logits_BSV = functional.linear(functional.gelu(x_BSH), weights["embedding"])
    loss = functional.cross_entropy(logits_BSV.flatten(0, 1).float(), tokens_BS.flatten())
    loss.backward()
    bench.device.step_boundary()
    found = {"loss": loss.detach().cpu()}
    for name, weight in weights.items():
        assert weight.grad is not None
        found[f"gradient of the {name}"] = weight.grad.cpu()
    return found
