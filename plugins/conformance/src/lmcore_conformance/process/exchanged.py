"""Numbers that the ranks of a check exchange, and the comparison of what arrives."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from lmcore.base.errors import counted
from lmcore_conformance.op.call import factor
from lmcore_conformance.registry import Failure

if TYPE_CHECKING:
    from lmcore_conformance.process.ranks import RankBench

__all__ = [
    "LARGE",
    "ODD",
    "OPERATIONS",
    "OVERWRITTEN",
    "call_and_overwrite",
    "expect",
    "expect_in_view",
    "expect_sent",
    "new_view",
    "numbers",
    "own",
    "those_of",
    "wide",
]

LARGE = (2**20 + 1, 2**24 + 5)
"""Numbers of a large tensor: gradient buckets have as many."""

ODD = ((torch.float32, 3), (torch.bfloat16, 3), (torch.bfloat16, 1001))
"""Outputs that end at no multiple of 16 bytes."""

OPERATIONS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "sum": (distributed.ReduceOp.SUM, lambda values: values.sum(0)),
    "max": (distributed.ReduceOp.MAX, lambda values: values.amax(0)),
    "min": (distributed.ReduceOp.MIN, lambda values: values.amin(0)),
}
"""Reductions, with what they do on the host."""

OVERWRITTEN = -5.0
"""Number that `call_and_overwrite` puts in place of what was sent."""

_BITS = {torch.float32: 24, torch.bfloat16: 8, torch.int64: 62}
_GUARD = 301  # odd, so that a view begins at no multiple of 16 bytes
_MARK = 77
_LATE_SECONDS = 1.0
_BEHIND_SECONDS = 0.3


def own(bench: RankBench, dtype: torch.dtype = torch.float32, count: int = 1001) -> Tensor:
    """Return this rank's `numbers` on its device."""
    return numbers(bench.rank, dtype, count).to(bench.torch_device)


def numbers(rank: int, dtype: torch.dtype = torch.float32, count: int = 1001) -> Tensor:
    """Return a rank's numbers on the host: whole ones, that differ by place and rank."""
    return ((torch.arange(count) % 13) + 1 + 16 * rank).to(dtype)


def wide(size: int, dtype: torch.dtype = torch.float32, count: int = 1001) -> list[Tensor]:
    """Return the numbers of every rank: whole ones of both signs, whose sums need every bit."""
    limit = 2 ** _BITS[dtype] // size  # so that sums are exact
    generators = [torch.Generator().manual_seed(rank) for rank in range(size)]
    return [
        torch.randint(-limit, limit + 1, (count,), generator=generator, dtype=dtype)
        for generator in generators
    ]


def those_of(every: list[Tensor]) -> dict[str, Tensor]:
    """Return the numbers of every rank by words, for `expect`."""
    return {f"those of rank {rank}": row for rank, row in enumerate(every)}


def expect(
    bench: RankBench,
    label: str,
    found: Tensor,
    right: Tensor,
    instead: Mapping[str, Tensor] | None = None,
) -> None:
    """Compare what a collective has written with what it should have.

    Args:
        instead: Results of likely faults, by the words that name them.

    Raises:
        Failure: It is wrong, with the likely cause.
    """
    seen = found.clone()  # by the queue, before anything else waits for the collective
    bench.device.synchronize()
    seen = seen.cpu()
    if torch.equal(seen, right):
        return
    differ = (seen != right) & ~(seen.isnan() & right.isnan())
    wrong = int(differ.sum())
    if not wrong:
        return
    text = (
        f"{label}: {wrong:,} of {counted(right.numel(), 'number')} {'is' if wrong == 1 else 'are'}"
    )
    named = [words for words, other in (instead or {}).items() if torch.equal(seen, other)]
    if _is_late(bench, found, right):
        cause = "; they are right a moment later: `wait` returned before the collective was done"
    elif named:
        cause = f"; they are {named[0]}"
    elif not seen.any():
        cause = "; all are 0"
    else:
        cause = factor(seen, right) or _rounding(seen, right, wrong)
    raise Failure(f"{text} wrong{cause}")


def call_and_overwrite(
    bench: RankBench, late: int, call: Callable[[], Any], inputs: Sequence[Tensor]
) -> None:
    """Call a collective, in which rank *late* is behind, and overwrite its inputs after `wait`.

    Args:
        call: Starts the collective and returns its work.
        inputs: Tensors that this rank sends.
    """
    if bench.rank == late:
        time.sleep(_BEHIND_SECONDS)
    call().wait()
    for tensor in inputs:
        tensor.fill_(OVERWRITTEN)


def expect_sent(bench: RankBench, label: str, found: Tensor, right: Tensor) -> None:
    """Compare what arrived of inputs that `call_and_overwrite` has overwritten.

    Raises:
        Failure: It is wrong.
    """
    bench.device.synchronize()
    later = found.cpu() == OVERWRITTEN
    if later.any():
        raise Failure(
            f"{label}: {int(later.sum()):,} of {counted(later.numel(), 'number')} arrived as they "
            "were overwritten after `wait`: it returned before the input was read"
        )
    expect(bench, label, found, right)


def _is_late(bench: RankBench, found: Tensor, right: Tensor) -> bool:
    """Return True if the result is right in the end."""
    end = time.monotonic() + _LATE_SECONDS
    while True:
        bench.device.synchronize()
        if torch.equal(found.cpu(), right):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.05)


def _rounding(seen: Tensor, right: Tensor, wrong: int) -> str:
    """Return words about a lower precision, if that is what many small differences are."""
    if not right.dtype.is_floating_point or wrong * 10 < right.numel():
        return ""
    off = float((seen.double() - right.double()).abs().max() / right.double().abs().max())
    if not off < 2**-6:
        return ""
    return f"; all are off by {off:.1e} of the largest at most: fewer bits than {right.dtype} has"


def new_view(bench: RankBench, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return an output in the middle of a larger tensor, and that, for `expect_in_view`.

    The numbers beside it differ by rank, so that copies of another rank's are seen.
    """
    mark = _MARK + bench.rank
    around = torch.full((count + 2 * _GUARD,), mark, dtype=dtype, device=bench.torch_device)
    return around[_GUARD : _GUARD + count], around


def expect_in_view(
    bench: RankBench,
    label: str,
    view: Tensor,
    around: Tensor,
    right: Tensor,
    instead: Mapping[str, Tensor] | None = None,
) -> None:
    """Compare a view of `new_view`, and what is beside it; *instead* is for `expect`.

    Raises:
        Failure: It is wrong, or a number beside it has changed.
    """
    expect(bench, label, view, right, instead)
    marks = around.cpu()
    for side, guard in (("before", marks[:_GUARD].flip(0)), ("after", marks[-_GUARD:])):
        places = (guard != _MARK + bench.rank).nonzero()
        if places.numel():
            reach = (int(places.max()) + 1) * view.element_size()
            raise Failure(f"{label}: it writes {reach} bytes {side} its output, which is a view")
