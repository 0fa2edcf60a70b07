"""Level 3: recompute policies change memory and nothing else, in training and in single blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.accelerator import RecomputePolicy
from lmcore.accelerator.recompute import none_policy, remembering
from lmcore.errors import LmcoreError
from lmcore.runtime.runtime import deterministic_algorithms
from lmcore_conformance.registry import check, conclude
from lmcore_conformance.tiny_run import DROPOUT, tiny_runs

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_check = partial(check, level="L3", group="training", seconds=120)

_REPEATING = frozenset({"selective", "full", "full-offload"})
"""The core's policies that compute again in backward."""

_MANY = 10
_BLOCKS = {"two blocks of 512 x 512 numbers": (2, 512), f"{_MANY} small blocks": (_MANY, 16)}
"""Number of blocks in a row, and the rows and columns of each one's input; 512 x 512 is 1 MiB."""


@_check(
    "train.recompute",
    "`--recompute selective` and `full` change nothing but memory, bit for bit, with dropout and "
    "in half precision, for large blocks and many; backward computes each block again.",
    reason="Random numbers and precision must equal those of the first pass.",
    requires=["recompute", "deterministic"],
)
def recompute(bench: Bench) -> str:
    """Compare with a run without, also in half precision, and single blocks with plain calls."""
    names = ("selective", "full")
    return ", ".join(_recomputed(bench, names, flags) for flags in ("", *_half(bench)))


@_check(
    "train.offload",
    "`--recompute offload` and `full-offload` change nothing but memory, bit for bit, with "
    "dropout.",
    reason="Activations are copied to the host and back on a separate stream.",
    requires=["offload", "deterministic"],
)
def offload(bench: Bench) -> str:
    """Compare with a run without."""
    return _recomputed(bench, ("offload", "full-offload"))


@_check(
    "train.recompute-own",
    "Every other recompute policy of the plugin changes nothing but memory, bit for bit, also in "
    "half precision.",
    reason="A plugin's policies are selected by name, like the core's.",
    requires=["deterministic"],
)
def recompute_own(bench: Bench) -> str:
    """Find the plugin's own and compare each with a run without."""
    core = {none_policy().name, "selective", "full", "offload", "full-offload"}
    own = tuple(
        policy.name
        for policy in bench.recompute_policies
        if policy.name not in core and policy.available() is None
    )
    if not own:
        return "the plugin offers none beside the core's"
    return ", ".join(_recomputed(bench, own, flags) for flags in ("", *_half(bench)))


def _half(bench: Bench) -> list[str]:
    """Return the flags of a half precision, if the device has one."""
    return [
        f"--precision {policy.name}"
        for policy in bench.all_precision_policies
        if policy.name in {"bf16", "fp16"}
        and policy.compute in bench.device.dtypes
        and policy.available() is None
    ][:1]


def _recomputed(bench: Bench, names: tuple[str, ...], precision: str = "") -> str:
    offered = {policy.name: policy for policy in bench.recompute_policies}
    faults, done = [], []
    with tiny_runs(bench) as runs:
        flags = f"--deterministic {DROPOUT} {precision}"
        plain = runs.train(flags, steps=4)
        for name in names:
            if name not in offered:
                faults.append(f"`{name}` is not offered")
                continue
            reason = offered[name].available()
            if reason is not None:
                faults.append(f"`{name}` cannot be used: {reason}")
                continue
            done.append(f"{name} {precision}".strip())
            faults += [
                f"`{name}`: {fault}" for fault in _block_faults(bench, offered[name], precision)
            ]
            try:
                found = runs.train(f"{flags} --recompute {name}", steps=4)
            except LmcoreError as error:
                faults.append(f"`{name}`: {error.what_and_why}")
                continue
            differing = plain.differing(found)
            if differing:
                faults.append(f"`{name}`: {len(differing)} differ: {', '.join(differing[:4])}")
        # Within the runs: a policy whose runs fail is at fault, although they use nothing of it.
        return conclude(faults, ", ".join(done))


def _block_faults(bench: Bench, policy: RecomputePolicy, precision: str) -> Iterator[str]:
    """Run blocks by the policy and plainly, in a precision; yield what differs."""
    name = precision.removeprefix("--precision ")
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    for offered in bench.all_precision_policies:
        if offered.name == name:
            context = offered.context
    for run in (policy.block, policy.attention):
        if run is None:
            continue
        for blocks, (count, size) in _BLOCKS.items():
            with bench.device.rng_tracker().preserved(), deterministic_algorithms():
                right, _ = _through_blocks(bench, _plain_call, count, size, context)
                found, again = _through_blocks(bench, run, count, size, context)
            different = [what for what in right if not torch.equal(right[what], found[what])]
            if different:
                yield f"{blocks} with dropout, {name or 'fp32'}: {', '.join(different)} differ"
            elif policy.name in _REPEATING and again < count:
                yield (
                    f"{blocks}: backward computes {again} of {count} again: the activations of the "
                    "others are kept"
                )


def _plain_call(call: Callable[..., Any], *tensors: Tensor, **_remember: Any) -> Any:
    return call(*tensors)


def _through_blocks(
    bench: Bench,
    run: Callable[..., Any],
    count: int,
    size: int,
    context: Callable[[], contextlib.AbstractContextManager[Any]],
) -> tuple[dict[str, Tensor], int]:
    """Return result, gradients and the next random numbers, and the calls made in backward."""
    device = bench.device
    device.seed(5)
    calls = 0
    weights = [
        (bench.values(size, size, seed=seed) / size**0.5).float().to(bench.torch_device)
        for seed in range(count)
    ]
    given = bench.values(size, size, seed=count).float().to(bench.torch_device)
    leaves = [tensor.requires_grad_() for tensor in (*weights, given)]

    def block(x: Tensor, weight: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        inner = torch.nn.functional.dropout(torch.tanh(x @ weight), 0.25)
        return x + torch.nn.functional.dropout(inner * inner, 0.25)

    remember = remembering(device.rng_tracker(), context)
    with context():
        x = given
        for weight in weights:
            x = run(block, x, weight, remember=remember)
    forward = calls
    x.float().square().mean().backward()
    draw = torch.rand(8, device=bench.torch_device)
    found = {"results": x.detach(), "random numbers": draw}
    grads = [leaf.grad for leaf in leaves]
    assert all(grad is not None for grad in grads)
    found["gradients"] = torch.cat([grad.flatten() for grad in grads if grad is not None])
    return found, calls - forward
