"""Level 4: collectives of tensors as large as gradient buckets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from lmcore_conformance.process.exchanged import LARGE, OPERATIONS, expect, wide
from lmcore_conformance.registry import Failure, check

if TYPE_CHECKING:
    from lmcore_conformance.process.ranks import RankBench

_check = partial(check, level="L4", group="distributed")


@_check(
    "distributed.large",
    "`all_reduce`, `broadcast` and `all_gather_into_tensor` are right for 2^20 + 1 and for "
    "2^24 + 5 numbers, which need every bit of their dtype.",
    reason="Gradient buckets are this large, and a backend splits such messages.",
    requires=["distributed"],
)
def large(bench: RankBench) -> str:
    """Call each with numbers whose sums are exact."""
    for count in LARGE:
        label = f"of {count:,} numbers"
        every = wide(bench.size, count=count)
        tensor = every[bench.rank].to(bench.torch_device, copy=True)
        distributed.all_reduce(tensor)
        expect(bench, f"all_reduce {label}", tensor, torch.stack(every).sum(0))
        tensor = every[bench.rank].to(bench.torch_device, copy=True)
        distributed.broadcast(tensor, bench.size - 1)
        expect(bench, f"broadcast {label}", tensor, every[-1])
        gathered = torch.empty(count * bench.size, device=bench.torch_device)
        distributed.all_gather_into_tensor(gathered, every[bench.rank].to(bench.torch_device))
        expect(bench, f"all_gather_into_tensor {label}", gathered, torch.cat(every))
    return " and ".join(f"{count:,}" for count in LARGE)


@_check(
    "distributed.large-kinds",
    "At 2^20 + 1 numbers sum, maximum and minimum are right in float32, bfloat16 and int64: in "
    "place, in a view with an offset, asynchronously, in a group; so are `broadcast`, "
    "`all_gather_into_tensor` and `all_gather`. The numbers need every bit of their dtype.",
    reason="A backend has another path for each of them, and real messages are large.",
    requires=["distributed"],
)
def large_kinds(bench: RankBench) -> str:
    """Reduce numbers whose sums are exact in every dtype, in each way."""
    group = bench.processes.new_group(range(bench.size))
    count = LARGE[0]
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        every = wide(bench.size, dtype, count)
        label = f"of {count:,} numbers in {dtype}"
        for name, (operation, right) in OPERATIONS.items():
            wanted = right(torch.stack(every)).to(dtype)
            for how, reduce in _WAYS.items():
                found = reduce(
                    every[bench.rank].to(bench.torch_device, copy=True), operation, group
                )
                expect(bench, f"{name} {label}, {how}", found, wanted)
        tensor = every[bench.rank].to(bench.torch_device, copy=True)
        distributed.broadcast(tensor, bench.size - 1)
        expect(bench, f"broadcast {label}", tensor, every[-1])
        gathered = torch.empty(count * bench.size, dtype=dtype, device=bench.torch_device)
        distributed.all_gather_into_tensor(gathered, every[bench.rank].to(bench.torch_device))
        expect(bench, f"all_gather_into_tensor {label}", gathered, torch.cat(every))
        gathered.zero_()
        parts = list(gathered.chunk(bench.size))
        distributed.all_gather(parts, every[bench.rank].to(bench.torch_device))
        expect(bench, f"all_gather {label}", gathered, torch.cat(every))
    return f"{', '.join(OPERATIONS)}; {', '.join(_WAYS)}"


def _in_place(tensor: Tensor, operation: Any, group: Any) -> Tensor:
    del group
    distributed.all_reduce(tensor, operation)
    return tensor


def _in_view(tensor: Tensor, operation: Any, group: Any) -> Tensor:
    """Reduce a part of a larger tensor, and return it with nothing of its neighbours lost."""
    del group
    buffer = torch.cat((tensor[:3], tensor, tensor[:3]))
    distributed.all_reduce(buffer[3:-3], operation)
    if not torch.equal(torch.cat((buffer[:3], buffer[-3:])), torch.cat((tensor[:3], tensor[:3]))):
        raise Failure("a reduction in a view changes the numbers beside it")
    return buffer[3:-3]


def _asynchronously(tensor: Tensor, operation: Any, group: Any) -> Tensor:
    del group
    work = distributed.all_reduce(tensor, operation, async_op=True)
    work.wait()
    return tensor


def _in_group(tensor: Tensor, operation: Any, group: Any) -> Tensor:
    distributed.all_reduce(tensor, operation, group=group)
    return tensor


_WAYS: dict[str, Callable[[Tensor, Any, Any], Tensor]] = {
    "in place": _in_place,
    "in a view": _in_view,
    "asynchronously": _asynchronously,
    "in a group": _in_group,
}


@_check(
    "distributed.average",
    "`all_reduce` averages if the backend declares it.",
    reason="Gradients are averaged; without this operation the core sums and divides.",
    requires=["distributed", "average"],
)
def average(bench: RankBench) -> str:
    """Average numbers whose mean is exact, few and as many as a gradient bucket has."""
    for dtype, count in (
        *((torch.float32, 1001), (torch.bfloat16, 1001)),
        *((torch.float32, LARGE[0]), (torch.bfloat16, LARGE[0])),
    ):
        every = wide(bench.size, dtype, count)
        tensor = every[bench.rank].to(bench.torch_device, copy=True)
        distributed.all_reduce(tensor, distributed.ReduceOp.AVG)
        label = f"average of {count:,} numbers in {dtype}"
        expect(bench, label, tensor, torch.stack(every).double().mean(0).to(dtype))
    return f"over {bench.size}, in two dtypes, up to {LARGE[0]:,} numbers"
