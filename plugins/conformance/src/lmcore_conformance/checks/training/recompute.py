"""Level 3: recompute policies change memory and nothing else, in training and in single blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.base.errors import LmcoreError
from lmcore.contract import RecomputePolicy
from lmcore.contract.recompute import none_policy, remembering
from lmcore.runtime.runtime import deterministic_algorithms
from lmcore_conformance.kept import tensors_kept
from lmcore_conformance.registry import check, conclude
from lmcore_conformance.tiny_run import DROPOUT, tiny_runs

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_check = partial(check, level="L3", group="training", seconds=120)

_REPEATING = frozenset({"selective", "full", "full-offload"})
"""The core's policies that compute again in backward."""

_ROUNDED = MappingProxyType({"curve": 2e-5, "tensors": 1e-3})
_ROUNDED_IN_HALF = MappingProxyType({"curve": 1e-3, "tensors": 2e-2})
"""Differences that a lazy device's compiler may cause, as it fuses what is repeated otherwise: last
bits of a gradient move norms by 1e-4 and tensors by 3e-3 in bfloat16, other random numbers by 5e-3
and 0.2."""

# Adam makes whole steps of gradients that are zero but for rounding, with an epsilon of 1e-8.
_LAZY_FLAGS = "--adam-eps 1e-3"

Context = Callable[[], contextlib.AbstractContextManager[Any]]

_MANY = 10
_SMALL = f"{_MANY} small blocks"
_BLOCKS = {"two blocks of 32,771 x 64 numbers": (2, 32_771, 64), _SMALL: (_MANY, 16, 16)}
"""Number of blocks in a row, and the rows and columns of each one's input; the larger is more than
8 MiB, which a policy may treat in another way than what is small."""


@_check(
    "train.recompute",
    "`--recompute selective` and `full` change nothing but memory, bit for bit, with dropout and "
    "in half precision, for large blocks and many, also if a block's input needs no gradient; "
    "backward computes each block again, within `again()`; no tensor of each call stays. Whole "
    "runs of a lazy device, whose compiler may fuse what is repeated otherwise, are equal but for "
    "rounding.",
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
        flags = f"--deterministic {DROPOUT} {precision} {_LAZY_FLAGS if bench.is_lazy else ''}"
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
            differing, more = plain.differing(found), ""
            if bench.is_lazy:
                rounded = _ROUNDED_IN_HALF if precision else _ROUNDED
                differing, more = plain.apart(found, **rounded), " by more than rounding"
            if differing:
                first = ", ".join(differing[:4])
                faults.append(f"`{name}`: {len(differing)} differ{more}: {first}")
        # Within the runs: a policy whose runs fail is at fault, although they use nothing of it.
        return conclude(faults, ", ".join(done))


def _block_faults(bench: Bench, policy: RecomputePolicy, precision: str) -> Iterator[str]:
    """Run blocks by the policy and plainly, in a precision; yield what differs."""
    name = precision.removeprefix("--precision ")
    context: Context = contextlib.nullcontext
    for offered in bench.all_precision_policies:
        if offered.name == name:
            context = offered.context
    for run in (policy.block, policy.attention):
        if run is None:
            continue
        for blocks, (count, rows, size) in _BLOCKS.items():
            different, again, _ = _compared(bench, run, _Blocks(count, rows, size, context))
            if different:
                yield f"{blocks} with dropout, {name or 'fp32'}: {different} differ"
            elif policy.name in _REPEATING and again < count:
                yield (
                    f"{blocks}: backward computes {again} of {count} again: the activations of the "
                    "others are kept"
                )
        yield from _undrawn_faults(bench, run, name or "fp32", context)
        yield from _tuple_faults(bench, run, context)
        with bench.device.rng_tracker().preserved():
            yield from tensors_kept(bench, partial(_Blocks(1, 64, 64, context).through, bench, run))
    if policy.block is not None:
        yield from _frozen_faults(bench, policy.block, name or "fp32", context)


def _undrawn_faults(
    bench: Bench, run: Callable[..., Any], name: str, context: Context
) -> Iterator[str]:
    """Run blocks that draw no random numbers; yield what differs or is not restored."""
    different, again, outside = _compared(
        bench, run, _Blocks(*_BLOCKS[_SMALL], context, dropout=0.0)
    )
    if different:
        yield f"{_SMALL} without dropout, {name}: {different} differ"
    if outside:
        yield (
            f"{_SMALL} without dropout, {name}: {outside} of {again} calls in backward are "
            "outside of `again()`, which restores the precision's context"
        )


def _tuple_faults(bench: Bench, run: Callable[..., Any], context: Context) -> Iterator[str]:
    """Run a function that returns two tensors; yield if something else comes back."""
    x = bench.values(16, 16).float().to(bench.torch_device).requires_grad_()

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x), 2.0 * x

    words = "a function that returns a tuple of 2"
    wanted = two(x)
    try:
        with bench.device.rng_tracker().preserved(), context():
            found = run(two, x, remember=remembering(bench.device.rng_tracker(), context))
        if not isinstance(found, tuple) or len(found) != len(wanted):
            count = f" of {len(found)}" if isinstance(found, tuple) else ""
            kind = type(found).__name__
            yield f"{words} comes back as `{kind}`{count}: the result of `call` is to be returned"
            return
        (grad,) = torch.autograd.grad(found[0].sum() + found[1].sum(), x)
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        yield f"{words} raised {type(error).__name__}: {error}"
        return
    (right,) = torch.autograd.grad(wanted[0].sum() + wanted[1].sum(), x)
    if not all(map(_equal, (*wanted, right), (*found, grad))):
        yield f"{words} has other results or gradients"


def _frozen_faults(
    bench: Bench, run: Callable[..., Any], name: str, context: Context
) -> Iterator[str]:
    """Run blocks whose input needs no gradient, as behind a frozen embedding; yield what is lost.

    The weights are no arguments of the call, as in a model.
    """
    blocks = _Blocks(*_BLOCKS[_SMALL], context, dropout=0.0, frozen=True)
    different, _, _ = _compared(bench, run, blocks)
    if different:
        yield (
            f"{_SMALL} whose first input needs no gradient, {name}: {different} of the "
            "blocks' weights differ: a model with a frozen embedding would not be trained"
        )


def _compared(bench: Bench, run: Callable[..., Any], blocks: _Blocks) -> tuple[str, int, int]:
    """Return what differs from plain calls, and the calls in backward: all, outside `again()`."""
    with bench.device.rng_tracker().preserved(), deterministic_algorithms():
        right, _, _ = blocks.through(bench, _plain_call)
        found, again, outside = blocks.through(bench, run)
    different = [what for what in right if not _equal(right[what], found[what])]
    return ", ".join(different), again, outside


def _equal(right: Tensor, found: Tensor) -> bool:
    return right.shape == found.shape and torch.equal(right, found)


def _plain_call(call: Callable[..., Any], *tensors: Tensor, **_remember: Any) -> Any:
    return call(*tensors)


@dataclass(frozen=True)
class _Blocks:
    """Blocks in a row, and how they are computed.

    Attributes:
        count: Number of blocks.
        rows: Rows of each one's input.
        size: Columns of it.
        context: The precision's context.
        dropout: Share of elements that are dropped.
        frozen: True if the first input needs no gradient, and weights are no arguments.
    """

    count: int
    rows: int
    size: int
    context: Context
    dropout: float = 0.25
    frozen: bool = False

    def through(self, bench: Bench, run: Callable[..., Any]) -> tuple[dict[str, Tensor], int, int]:
        """Return results, and the calls made in backward: all, and those outside of `again()`.

        Results are the output, gradients and the next random numbers; a gradient that is missing
        is empty.
        """
        device, size = bench.device, self.size
        device.seed(5)
        calls, inside, outside = 0, 0, 0
        weights = [
            (bench.values(size, size, seed=seed) / size**0.5).float().to(bench.torch_device)
            for seed in range(self.count)
        ]
        given = bench.values(self.rows, size, seed=self.count).float().to(bench.torch_device)
        leaves = [
            tensor.requires_grad_() for tensor in (*weights, *(() if self.frozen else (given,)))
        ]

        def dropped(x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(x, self.dropout) if self.dropout else x

        def block(x: Tensor, weight: Tensor) -> Tensor:
            nonlocal calls, outside
            calls += 1
            outside += not inside
            inner = dropped(torch.tanh(x @ weight))
            return x + dropped(inner * inner)

        remember = remembering(device.rng_tracker(), self.context)

        def watched() -> Context:
            again = remember()

            @contextlib.contextmanager
            def entered() -> Iterator[None]:
                nonlocal inside
                inside += 1
                try:
                    with again():
                        yield
                finally:
                    inside -= 1

            return entered

        with self.context():
            x = given
            for weight in weights:
                if self.frozen:
                    x = run(partial(_with_weight, block, weight), x, remember=watched)
                else:
                    x = run(block, x, weight, remember=watched)
        forward, outside = calls, 0
        if x.requires_grad:
            x.float().square().mean().backward()
        draw = torch.rand(8, device=bench.torch_device)
        found = {"results": x.detach(), "random numbers": draw}
        grads = [leaf.grad.flatten() for leaf in leaves if leaf.grad is not None]
        found["gradients"] = torch.cat(grads) if grads else torch.empty(0)
        return found, calls - forward, outside


def _with_weight(block: Callable[..., Tensor], weight: Tensor, x: Tensor) -> Tensor:
    return block(x, weight)
