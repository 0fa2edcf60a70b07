"""Level 2: every op on tensors of more than 2^24 elements, of equal blocks.

A whole result in float64 on the host would take gigabytes and minutes.  So the arguments are one
block of a few rows, repeated; the reference computes the block alone.  The incoming gradient is
zero but in some blocks, the first, the last and the block at element 2^24 among them: gradients of
weights are then sums of few terms, which any order of additions computes closely.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore_conformance.op.call import Kernel, difference, dtypes_of, kernels_of, oracle, rounded
from lmcore_conformance.op.case import CALLED_OPS, Case
from lmcore_conformance.op.case_large import BATCHED, block_case
from lmcore_conformance.op.findings import Findings
from lmcore_conformance.op.uses import register_property

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

__all__: list[str] = []

_LIMIT = 2**24
"""Elements above which float32 lacks the next integer, and one dim of a grid of tiles may end."""

_SPREAD = 13
"""Blocks with a gradient, beside the three."""

_LOSSES = {"cross_entropy", "linear_cross_entropy"}
_WEIGHTED = "linear_cross_entropy"
"""The op whose output is a sum: its weights of tokens, the last argument, choose the blocks."""


@dataclass(frozen=True)
class _Blocks:
    """A call of an op with a block many times.

    Attributes:
        case: The block, in numbers of the dtype.
        count: Number of blocks.
        chosen: Numbers of the blocks with an incoming gradient, in order.
    """

    case: Case
    count: int
    chosen: Tensor

    @classmethod
    def of(cls, op: str, dtype: torch.dtype) -> _Blocks:
        """Repeat a block until first argument and output have more than 2^24 elements.

        Losses have one number for each token, or one at all: there the argument decides.
        """
        block = block_case(op, "")
        size = block.tensors[0].numel()
        if op not in _LOSSES:
            size = min(size, oracle(block, dtype).out.numel())
        count = _LIMIT // size + 3
        case = block_case(op, f"{count * size:,} elements of equal blocks")
        generator = torch.Generator().manual_seed(6)
        others = torch.randint(count, (_SPREAD,), generator=generator).tolist()
        chosen = sorted({0, _LIMIT // size, count - 1, *others})
        return cls(rounded(case, dtype), count, torch.tensor(chosen))

    def repeated(self, block: Tensor, device: torch.device) -> Tensor:
        """Return a block along the first dim as often as there are blocks."""
        return block.to(device).repeat(self.count, *(1 for _ in block.shape[1:]))

    def of_chosen(self, block: Tensor, device: torch.device) -> Tensor:
        """Return a block where blocks are chosen, and zero elsewhere."""
        blocks = torch.zeros(self.count, *block.shape, dtype=block.dtype, device=device)
        blocks[self.chosen.to(device)] = block.to(device)
        return blocks.flatten(0, 1)


def _elements(bench: Bench, op: str) -> str:
    """Compare all blocks of the output and of the gradients with the reference's one block."""
    findings = Findings()
    name = next(dtypes_of(bench))
    blocks = _Blocks.of(op, getattr(torch, name))
    for kernel in kernels_of(bench, op):
        if kernel.does(bench.device.type, name, blocks.case.attributes):
            with findings.of(kernel, f"{blocks.case.label}, {name}") as add:
                for wrong in _differences(bench, kernel, blocks, name):
                    add(wrong)
    return findings.conclude()


def _differences(bench: Bench, kernel: Kernel, blocks: _Blocks, name: str) -> Iterator[str]:
    """Call a kernel, forward and backward; yield how the results differ."""
    case, dtype, device = blocks.case, getattr(torch, name), bench.torch_device
    batched = BATCHED[case.op]
    arguments: dict[int, Any] = {}
    for place, value in {**case.others, **case.tensors}.items():
        if not isinstance(value, Tensor):
            arguments[place] = value
            continue
        given = value.to(dtype) if value.is_floating_point() else value
        spread = blocks.repeated if place in batched else Tensor.to
        if case.op == _WEIGHTED and place == max(batched):
            spread = blocks.of_chosen
        arguments[place] = spread(given, device)
    leaves = {place: arguments[place].requires_grad_() for place in case.tensors}
    out = kernel.function(*(arguments[place] for place in sorted(arguments)), **case.kwargs)
    wanted = oracle(case, dtype)
    generator = torch.Generator().manual_seed(5)
    block = torch.randn(wanted.out.shape, dtype=torch.float64, generator=generator).to(dtype)
    if out.dim():
        incoming = blocks.of_chosen(block.to(out.dtype), device)
    else:
        incoming = block.to(device, out.dtype)
    wrong = partial(_block_difference, bench, blocks, name)
    if out.dim():
        yield from wrong("the output", out.detach(), wanted.out)
    elif text := difference(bench.host(out), len(blocks.chosen) * wanted.out, case.op, name):
        yield f"the output {text}"
    grads = torch.autograd.grad(out, list(leaves.values()), incoming)
    for place, grad in zip(leaves, grads, strict=True):
        label, exact = f"the gradient of argument {place + 1}", wanted.grads[place]
        if place in batched:
            yield from wrong(label, grad, exact, chosen=True)
        elif text := difference(bench.host(grad), len(blocks.chosen) * exact, case.op, name):
            yield f"{label} {text}"


def _block_difference(
    bench: Bench,
    blocks: _Blocks,
    dtype: str,
    label: str,
    found: Tensor,
    exact: Tensor,
    *,
    chosen: bool = False,
) -> Iterator[str]:
    """Yield the first block of a result that is not right; of gradients, others must be zero."""
    size = blocks.count * exact.shape[0]
    if found.shape != (size, *exact.shape[1:]):
        yield f"{label} has the shape {tuple(found.shape)}, not {(size, *exact.shape[1:])}"
        return
    every = found.reshape(blocks.count, *exact.shape)
    some = every[blocks.chosen.to(found.device)] if chosen else every
    numbers = blocks.chosen.tolist() if chosen else range(blocks.count)
    edges = [bench.host(some.amin(0)), bench.host(some.amax(0))]
    if any(difference(edge, exact, blocks.case.op, dtype) for edge in edges):
        for number, block in zip(numbers, some, strict=True):
            wrong = difference(bench.host(block), exact, blocks.case.op, dtype)
            if wrong:
                yield f"{label} in block {number:,} of {blocks.count:,} {wrong}"
                return
    if chosen:
        rest = every.detach().clone()
        rest[blocks.chosen.to(found.device)] = 0
        at = rest.flatten(1).ne(0).any(1).nonzero()
        if at.numel():
            yield f"{label} in block {int(at[0]):,} of {blocks.count:,} is not 0, as it should be"


for _op in CALLED_OPS:
    register_property(
        _op,
        "elements",
        _elements,
        "`{op}` and its gradients are right above 2^24 elements.",
        "The activations of a batch have more; an index in float32, or one of 24 bits, ends there.",
    )
