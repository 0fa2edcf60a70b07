"""Level 4: collectives of the plugin's backend between two real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from lmcore.errors import counted
from lmcore_conformance.op.call import factor
from lmcore_conformance.registry import Failure, Gap, NotRun, check

if TYPE_CHECKING:
    from lmcore_conformance.process.ranks import RankBench

_check = partial(check, level="L4", group="distributed")
_DTYPES = (torch.float32, torch.bfloat16, torch.int64)
_REASON = "Parallel training depends on it; a wrong result trains another model."


_OPERATIONS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "sum": (distributed.ReduceOp.SUM, lambda values: values.sum(0)),
    "max": (distributed.ReduceOp.MAX, lambda values: values.amax(0)),
    "min": (distributed.ReduceOp.MIN, lambda values: values.amin(0)),
}


def _own(bench: RankBench, dtype: torch.dtype = torch.float32, count: int = 1001) -> Tensor:
    """Return this rank's numbers: whole ones, that differ by place and rank."""
    return _of(bench.rank, dtype, count).to(bench.torch_device)


def _of(rank: int, dtype: torch.dtype = torch.float32, count: int = 1001) -> Tensor:
    return ((torch.arange(count) % 13) + 1 + 16 * rank).to(dtype)


def _expect(bench: RankBench, label: str, found: Tensor, right: Tensor) -> None:
    bench.device.synchronize()
    if not torch.equal(found.cpu(), right):
        wrong = int((found.cpu() != right).sum())
        are = "is" if wrong == 1 else "are"
        text = f"{label}: {wrong:,} of {counted(right.numel(), 'number')} {are} wrong"
        raise Failure(text + factor(found.cpu(), right))


@_check(
    "distributed.start",
    "Two processes connect over the backend that the plugin offers, each with its own device.",
    reason="Every run of several processes starts this way.",
    requires=["distributed"],
)
def start(bench: RankBench) -> str:
    """Check the group that the core made."""
    if distributed.get_world_size() != bench.size or distributed.get_rank() != bench.rank:
        raise Failure("the group has another size or rank than the run")
    places = bench.processes.gather([bench.device.type, bench.device.index])
    if not bench.is_host and len({tuple(place) for place in places}) < len(places):
        raise Failure(f"two processes use one device: {places}")
    return f"{bench.size} processes over `{bench.processes.backend.name}`"


@_check(
    "distributed.all-reduce",
    "`all_reduce` computes sum, maximum and minimum in float32, bfloat16 and int64.",
    reason=_REASON,
    requires=["distributed"],
)
def all_reduce(bench: RankBench) -> str:
    """Reduce numbers whose sums are exact in every dtype."""
    operations = _OPERATIONS
    for dtype in _DTYPES:
        every = torch.stack([_of(rank, dtype) for rank in range(bench.size)])
        for name, (operation, right) in operations.items():
            tensor = _own(bench, dtype)
            distributed.all_reduce(tensor, operation)
            _expect(bench, f"{name} of {dtype}", tensor, right(every).to(dtype))
    every = torch.stack([_of(rank, torch.int64) + 2**60 for rank in range(bench.size)])
    for name, (operation, right) in operations.items():
        tensor = every[bench.rank].clone().to(bench.torch_device)
        distributed.all_reduce(tensor, operation)
        _expect(bench, f"{name} of torch.int64 above 2**60", tensor, right(every))
    return ", ".join(operations)


_LARGE = (2**20 + 1, 2**24)
"""Numbers of a large tensor: gradient buckets have as many."""


@_check(
    "distributed.large",
    "`all_reduce`, `broadcast` and `all_gather_into_tensor` are right for 2^20 + 1 and for 2^24 "
    "numbers.",
    reason="Gradient buckets are this large, and a backend splits such messages.",
    requires=["distributed"],
)
def large(bench: RankBench) -> str:
    """Call each with numbers whose sums are exact."""
    for count in _LARGE:
        label = f"of {count:,} numbers"
        every = [_of(rank, count=count) for rank in range(bench.size)]
        tensor = every[bench.rank].to(bench.torch_device, copy=True)
        distributed.all_reduce(tensor)
        _expect(bench, f"all_reduce {label}", tensor, torch.stack(every).sum(0))
        tensor = every[bench.rank].to(bench.torch_device, copy=True)
        distributed.broadcast(tensor, bench.size - 1)
        _expect(bench, f"broadcast {label}", tensor, every[-1])
        gathered = torch.empty(count * bench.size, device=bench.torch_device)
        distributed.all_gather_into_tensor(gathered, every[bench.rank].to(bench.torch_device))
        _expect(bench, f"all_gather_into_tensor {label}", gathered, torch.cat(every))
    return " and ".join(f"{count:,}" for count in _LARGE)


@_check(
    "distributed.large-kinds",
    "At 2^20 + 1 numbers sum, maximum and minimum are right in float32, bfloat16 and int64: in "
    "place, in a view with an offset, asynchronously, in a group; so are `broadcast` and "
    "`all_gather_into_tensor`.",
    reason="A backend has another path for each of them, and real messages are large.",
    requires=["distributed"],
)
def large_kinds(bench: RankBench) -> str:
    """Reduce numbers whose sums are exact in every dtype, in each way."""
    group = bench.processes.new_group(range(bench.size))
    count = _LARGE[0]
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        every = [_of(rank, dtype, count) for rank in range(bench.size)]
        label = f"of {count:,} numbers in {dtype}"
        for name, (operation, right) in _OPERATIONS.items():
            wanted = right(torch.stack(every)).to(dtype)
            for how, reduce in _WAYS.items():
                found = reduce(
                    every[bench.rank].to(bench.torch_device, copy=True), operation, group
                )
                _expect(bench, f"{name} {label}, {how}", found, wanted)
        tensor = every[bench.rank].to(bench.torch_device, copy=True)
        distributed.broadcast(tensor, bench.size - 1)
        _expect(bench, f"broadcast {label}", tensor, every[-1])
        gathered = torch.empty(count * bench.size, dtype=dtype, device=bench.torch_device)
        distributed.all_gather_into_tensor(gathered, every[bench.rank].to(bench.torch_device))
        _expect(bench, f"all_gather_into_tensor {label}", gathered, torch.cat(every))
    return f"{', '.join(_OPERATIONS)}; {', '.join(_WAYS)}"


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
    if not bench.processes.backend.supports_average:
        raise Gap("the backend declares that it cannot (`supports_average`)")
    for dtype, count in (
        *((torch.float32, 1001), (torch.bfloat16, 1001)),
        *((torch.float32, _LARGE[0]), (torch.bfloat16, _LARGE[0])),
    ):
        tensor = _own(bench, dtype, count)
        distributed.all_reduce(tensor, distributed.ReduceOp.AVG)
        every = torch.stack([_of(rank, torch.float32, count) for rank in range(bench.size)])
        label = f"average of {count:,} numbers in {dtype}"
        _expect(bench, label, tensor, every.mean(0).to(dtype))
    return f"over {bench.size}, in two dtypes, up to {_LARGE[0]:,} numbers"


@_check(
    "distributed.broadcast",
    "`broadcast` copies tensors of any layout and size from each rank to all ranks.",
    reason=_REASON,
    requires=["distributed"],
)
def broadcast(bench: RankBench) -> str:
    """Broadcast from each rank, a scalar, nothing, and a large tensor."""
    for source in range(bench.size):
        for count in (0, 1, 1001, 300_000):
            tensor = _own(bench, count=count)
            distributed.broadcast(tensor, source)
            _expect(bench, f"{count} numbers from {source}", tensor, _of(source, count=count))
    flag = torch.tensor([bench.rank == 1], device=bench.torch_device)
    distributed.broadcast(flag, 1)
    _expect(bench, "a truth value", flag, torch.tensor([True]))
    return "from each rank"


@_check(
    "distributed.all-gather",
    "`all_gather` and `all_gather_into_tensor` return the tensors of all ranks in rank order.",
    reason=_REASON,
    requires=["distributed"],
)
def all_gather(bench: RankBench) -> str:
    """Gather into a list and into one tensor."""
    right = torch.cat([_of(rank) for rank in range(bench.size)])
    parts = [torch.empty_like(_own(bench)) for _ in range(bench.size)]
    distributed.all_gather(parts, _own(bench))
    _expect(bench, "a list", torch.cat(parts), right)
    gathered = torch.empty(right.numel(), device=bench.torch_device)
    distributed.all_gather_into_tensor(gathered, _own(bench))
    _expect(bench, "one tensor", gathered, right)
    return "both forms"


@_check(
    "distributed.reduce-scatter",
    "`reduce_scatter_tensor` leaves each rank the sum of its part.",
    reason="Sharded data parallelism reduces gradients with it.",
    requires=["distributed", "reduce_scatter"],
)
def reduce_scatter(bench: RankBench) -> str:
    """Reduce and scatter few numbers, and as many as a gradient bucket has."""
    for dtype, count in (
        *((torch.float32, 500), (torch.bfloat16, 500)),
        *((torch.float32, _LARGE[0]), (torch.bfloat16, _LARGE[0]), (torch.float32, _LARGE[-1])),
    ):
        every = [_of(rank, dtype, count * bench.size) for rank in range(bench.size)]
        part = torch.empty(count, dtype=dtype, device=bench.torch_device)
        distributed.reduce_scatter_tensor(part, every[bench.rank].to(bench.torch_device))
        right = torch.stack(every).sum(0).chunk(bench.size)[bench.rank]
        _expect(bench, f"sum of {count:,} numbers each in {dtype}", part, right)
    return f"500 to {_LARGE[-1]:,} numbers each"


@_check(
    "distributed.all-to-all",
    "`all_to_all_single` exchanges parts of equal and of unequal sizes.",
    reason="Expert and sequence parallelism exchange tokens with it.",
    requires=["distributed", "all_to_all"],
)
def all_to_all(bench: RankBench) -> str:
    """Exchange equal parts, then parts of sizes that differ."""
    size, rank = bench.size, bench.rank
    inputs = [_of(peer, count=7 * size) for peer in range(size)]
    found = torch.empty(7 * size, device=bench.torch_device)
    distributed.all_to_all_single(found, inputs[rank].to(bench.torch_device))
    right = torch.cat([tensor.chunk(size)[rank] for tensor in inputs])
    _expect(bench, "equal parts", found, right)
    sizes = [[3 * a + b + 1 for b in range(size)] for a in range(size)]
    given = [_of(peer, count=sum(sizes[peer])) for peer in range(size)]
    takes = [sizes[peer][rank] for peer in range(size)]
    found = torch.empty(sum(takes), device=bench.torch_device)
    distributed.all_to_all_single(found, given[rank].to(bench.torch_device), takes, sizes[rank])
    right = torch.cat([given[peer].split(sizes[peer])[rank] for peer in range(size)])
    _expect(bench, "unequal parts", found, right)
    return "equal and unequal parts"


@_check(
    "distributed.gather-scatter",
    "`gather`, `scatter` and `reduce` work with each rank as the root.",
    reason="Checkpoints and metrics are collected with them.",
    requires=["distributed", "gather_scatter"],
)
def gather_scatter(bench: RankBench) -> str:
    """Do each at each rank."""
    for root in range(bench.size):
        is_root = bench.rank == root
        parts = [torch.empty_like(_own(bench)) for _ in range(bench.size)] if is_root else None
        distributed.gather(_own(bench), parts, root)
        if parts:
            right = torch.cat([_of(rank) for rank in range(bench.size)])
            _expect(bench, f"gather at {root}", torch.cat(parts), right)
        received = torch.empty(1001, device=bench.torch_device)
        rows = (
            [_of(5 + rank).to(bench.torch_device) for rank in range(bench.size)]
            if is_root
            else None
        )
        distributed.scatter(received, rows, root)
        _expect(bench, f"scatter from {root}", received, _of(5 + bench.rank))
        total = _own(bench)
        distributed.reduce(total, root)
        if is_root:
            right = torch.stack([_of(rank) for rank in range(bench.size)]).sum(0)
            _expect(bench, f"reduce at {root}", total, right)
    return "at each rank"


@_check(
    "distributed.send-recv",
    "`send` and `recv` carry tensors in order, also both ways at once.",
    reason="Pipeline stages pass activations with them.",
    requires=["distributed", "send_recv"],
)
def send_recv(bench: RankBench) -> str:
    """Send one way, then exchange with `batch_isend_irecv`."""
    other = (bench.rank + 1) % bench.size
    if bench.rank == 0:
        for number in range(3):
            distributed.send(_of(20 + number).to(bench.torch_device), 1)
    if bench.rank == 1:
        for number in range(3):
            tensor = torch.empty(1001, device=bench.torch_device)
            distributed.recv(tensor, 0)
            _expect(bench, f"message {number}", tensor, _of(20 + number))
    found = torch.empty(1001, device=bench.torch_device)
    works = distributed.batch_isend_irecv(
        [
            distributed.P2POp(distributed.isend, _own(bench), other),
            distributed.P2POp(distributed.irecv, found, (bench.rank - 1) % bench.size),
        ]
    )
    for work in works:
        work.wait()
    _expect(bench, "both ways", found, _of((bench.rank - 1) % bench.size))
    return "one way and both ways"


@_check(
    "distributed.async",
    "Asynchronous collectives complete in order, with correct results.",
    reason="Gradients are reduced during the backward pass.",
    requires=["distributed"],
)
def asynchronous(bench: RankBench) -> str:
    """Start eight reductions, compute, then wait."""
    tensors = [_own(bench) + number for number in range(8)]
    works = [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]
    square = torch.eye(128, device=bench.torch_device)
    for _ in range(20):
        square = square @ square
    for work in works:
        work.wait()
    every = torch.stack([_of(rank) for rank in range(bench.size)]).sum(0)
    for number, tensor in enumerate(tensors):
        _expect(bench, f"reduction {number}", tensor, every + number * bench.size)
    return "eight at once"


@_check(
    "distributed.groups",
    "A collective in a group of some ranks involves only these ranks.",
    reason="Each axis of a parallel run has separate groups.",
    requires=["distributed"],
)
def groups(bench: RankBench) -> str:
    """Reduce in a group of all, and in one of each rank."""
    everyone = bench.processes.new_group(range(bench.size))
    alone = [bench.processes.new_group([rank]) for rank in range(bench.size)]
    tensor = _own(bench)
    distributed.all_reduce(tensor, group=alone[bench.rank])
    _expect(bench, "a group of one", tensor, _of(bench.rank))
    distributed.all_reduce(tensor, group=everyone)
    right = torch.stack([_of(rank) for rank in range(bench.size)]).sum(0)
    _expect(bench, "a group of all", tensor, right)
    return f"{bench.size + 1} groups"


@_check(
    "distributed.leaves-alone",
    "A collective changes no other tensor, and does not change its input if the output is another"
    " tensor.",
    reason="Buffers that are reused too early are read by the next layer.",
    requires=["distributed"],
)
def leaves_alone(bench: RankBench) -> str:
    """Compare neighbours of a reduced slice, and the input of a gather."""
    buffer = torch.full((3000,), 7.0, device=bench.torch_device)
    buffer[1000:2000] = _own(bench, count=1000)
    distributed.all_reduce(buffer[1000:2000])
    right = torch.full((3000,), 7.0)
    right[1000:2000] = torch.stack([_of(rank, count=1000) for rank in range(bench.size)]).sum(0)
    _expect(bench, "the neighbours of a slice", buffer, right)
    given = _own(bench)
    gathered = torch.empty(1001 * bench.size, device=bench.torch_device)
    distributed.all_gather_into_tensor(gathered, given)
    _expect(bench, "the input of a gather", given, _of(bench.rank))
    return "a slice, a gather"


@_check(
    "distributed.missed",
    "A collective that one rank misses ends with an error within the timeout on all ranks.",
    reason="A job that hangs for half an hour after a failure costs its whole allocation.",
    group="distributed-timeout",
    requires=["distributed"],
    seconds=40,
)
def missed(bench: RankBench) -> str:
    """Let rank 1 stay away from a reduction."""
    seconds = bench.processes.timeout
    if bench.rank == 1:
        time.sleep(2 * seconds)
        return "stayed away"
    begin = time.monotonic()
    waited = _raised(lambda: _waiting(bench))
    took = time.monotonic() - begin
    if not waited:
        raise Failure(f"it ended without an error after {took:.1f} s")
    if took > 5 * seconds:
        raise Failure(f"the error came after {took:.1f} s, the timeout is {seconds:g} s")
    return f"{waited} after {took:.1f} s"


def _waiting(bench: RankBench) -> None:
    tensor = _own(bench)
    distributed.all_reduce(tensor)
    bench.device.synchronize()
    tensor.cpu()


def _raised(function: Callable[[], None]) -> str:
    try:
        function()
    except NotRun:
        raise
    except RuntimeError as error:
        return type(error).__name__
    return ""
