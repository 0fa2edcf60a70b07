"""Level 4: collectives of the plugin's backend between two real processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from lmcore_conformance.checks.device.streams import queued_products
from lmcore_conformance.process.exchanged import (
    LARGE,
    ODD,
    OPERATIONS,
    call_and_overwrite,
    expect,
    expect_in_view,
    expect_sent,
    new_view,
    numbers,
    own,
    those_of,
    wide,
)
from lmcore_conformance.registry import Failure, check

if TYPE_CHECKING:
    from lmcore_conformance.process.ranks import RankBench

_check = partial(check, level="L4", group="distributed")
_DTYPES = (torch.float32, torch.bfloat16, torch.int64)
_REASON = "Parallel training depends on it; a wrong result trains another model."


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
    if not bench.is_shared and len({tuple(place) for place in places}) < len(places):
        raise Failure(f"two processes use one device: {places}")
    return f"{bench.size} processes over `{bench.processes.backend.name}`"


@_check(
    "distributed.all-reduce",
    "`all_reduce` computes sum, maximum and minimum in float32, bfloat16 and int64, of positive and"
    " of negative numbers; a sum keeps NaN and infinity.",
    reason=_REASON,
    requires=["distributed"],
)
def all_reduce(bench: RankBench) -> str:
    """Reduce numbers whose sums are exact in every dtype."""
    for dtype in _DTYPES:
        positive = torch.stack([numbers(rank, dtype) for rank in range(bench.size)])
        for sign, every in (("", positive), (" of negative numbers", -positive)):
            for name, (operation, right) in OPERATIONS.items():
                tensor = every[bench.rank].clone().to(bench.torch_device)
                distributed.all_reduce(tensor, operation)
                expect(bench, f"{name}{sign} of {dtype}", tensor, right(every).to(dtype))
    every = torch.stack([numbers(rank, torch.int64) + 2**60 for rank in range(bench.size)])
    for name, (operation, right) in OPERATIONS.items():
        tensor = every[bench.rank].clone().to(bench.torch_device)
        distributed.all_reduce(tensor, operation)
        expect(bench, f"{name} of torch.int64 above 2**60", tensor, right(every))
    inf = float("inf")
    rows = [[float("nan"), 1.0, inf, inf, -inf, 1.0], [1.0, float("nan"), 1.0, -inf, 1.0, 1.0]]
    for dtype in (torch.float32, torch.bfloat16):
        every = torch.tensor(rows[:1] + rows[1:] * (bench.size - 1), dtype=dtype)
        tensor = every[bench.rank].clone().to(bench.torch_device)
        distributed.all_reduce(tensor)
        expect(bench, f"sum of NaN and infinity in {dtype}", tensor, every.sum(0))
    return ", ".join(OPERATIONS)


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
            every = wide(bench.size, count=count)
            tensor = every[bench.rank].to(bench.torch_device, copy=True)
            distributed.broadcast(tensor, source)
            label = f"{count} numbers from {source}"
            expect(bench, label, tensor, every[source], those_of(every))
    flag = torch.tensor([bench.rank == 1], device=bench.torch_device)
    distributed.broadcast(flag, 1)
    expect(bench, "a truth value", flag, torch.tensor([True]))
    return "from each rank"


@_check(
    "distributed.all-gather",
    "`all_gather` and `all_gather_into_tensor` return the tensors of all ranks in rank order.",
    reason=_REASON,
    requires=["distributed"],
)
def all_gather(bench: RankBench) -> str:
    """Gather into a list and into one tensor."""
    right = torch.cat([numbers(rank) for rank in range(bench.size)])
    parts = [torch.empty_like(own(bench)) for _ in range(bench.size)]
    distributed.all_gather(parts, own(bench))
    expect(bench, "a list", torch.cat(parts), right)
    gathered = torch.empty(right.numel(), device=bench.torch_device)
    distributed.all_gather_into_tensor(gathered, own(bench))
    expect(bench, "one tensor", gathered, right)
    return "both forms"


@_check(
    "distributed.reduce-scatter",
    "`reduce_scatter_tensor` leaves each rank the sum of its part, also in a view.",
    reason="Sharded data parallelism reduces gradients with it.",
    requires=["distributed", "reduce_scatter"],
)
def reduce_scatter(bench: RankBench) -> str:
    """Reduce and scatter few numbers, and as many as a gradient bucket has."""
    sizes = ((torch.float32, 500), (torch.bfloat16, 500), (torch.float32, LARGE[0]))
    for dtype, count in (*sizes, (torch.bfloat16, LARGE[0]), (torch.float32, LARGE[-1])):
        every = wide(bench.size, dtype, count * bench.size)
        part = torch.empty(count, dtype=dtype, device=bench.torch_device)
        distributed.reduce_scatter_tensor(part, every[bench.rank].to(bench.torch_device))
        right = torch.stack(every).sum(0).chunk(bench.size)[bench.rank]
        expect(bench, f"sum of {count:,} numbers each in {dtype}", part, right)
    for dtype, count in ODD:
        every = wide(bench.size, dtype, count * bench.size)
        part, around = new_view(bench, count, dtype)
        distributed.reduce_scatter_tensor(part, every[bench.rank].to(bench.torch_device))
        right = torch.stack(every).sum(0).chunk(bench.size)[bench.rank]
        expect_in_view(bench, f"{count} numbers each in {dtype}", part, around, right)
    return f"3 to {LARGE[-1]:,} numbers each"


@_check(
    "distributed.all-to-all",
    "`all_to_all_single` exchanges parts of equal and of unequal sizes; after `wait` the input can "
    "be overwritten.",
    reason="Expert and sequence parallelism exchange tokens with it.",
    requires=["distributed", "all_to_all"],
)
def all_to_all(bench: RankBench) -> str:
    """Exchange equal parts, then parts of sizes that differ."""
    size, rank = bench.size, bench.rank
    inputs = [numbers(peer, count=7 * size) for peer in range(size)]
    found = torch.empty(7 * size, device=bench.torch_device)
    distributed.all_to_all_single(found, inputs[rank].to(bench.torch_device))
    right = torch.cat([tensor.chunk(size)[rank] for tensor in inputs])
    expect(bench, "equal parts", found, right)
    sizes = [[3 * a + b + 1 for b in range(size)] for a in range(size)]
    given = [numbers(peer, count=sum(sizes[peer])) for peer in range(size)]
    takes = [sizes[peer][rank] for peer in range(size)]
    found = torch.empty(sum(takes), device=bench.torch_device)
    distributed.all_to_all_single(found, given[rank].to(bench.torch_device), takes, sizes[rank])
    wanted = [given[peer].split(sizes[peer])[rank] for peer in range(size)]
    instead = {"the parts of the ranks in reverse order": torch.cat(wanted[::-1])}
    expect(bench, "unequal parts", found, torch.cat(wanted), instead)
    count = LARGE[0] // size * size
    for dtype, parts in ((torch.float32, 3 * size), (torch.bfloat16, 3 * size), (None, count)):
        given = wide(size, dtype or torch.float32, parts)
        found, around = new_view(bench, parts, dtype or torch.float32)
        distributed.all_to_all_single(found, given[rank].to(bench.torch_device))
        right = torch.cat([tensor.chunk(size)[rank] for tensor in given])
        expect_in_view(bench, f"{parts:,} numbers in {found.dtype}", found, around, right)
    right = torch.cat([tensor.chunk(size)[rank] for tensor in inputs])
    for late in range(size):
        sent = inputs[rank].to(bench.torch_device, copy=True)
        found = torch.empty(7 * size, device=bench.torch_device)
        exchange = partial(distributed.all_to_all_single, found, sent, async_op=True)
        call_and_overwrite(bench, late, exchange, [sent])
        expect_sent(bench, f"equal parts, rank {late} late", found, right)
    return "equal and unequal parts"


@_check(
    "distributed.gather-scatter",
    "`gather`, `scatter` and `reduce` work with each rank as the root, also in a group and in "
    "views; after `wait` the input of `gather` and `scatter` can be overwritten.",
    reason="Checkpoints and metrics are collected with them.",
    requires=["distributed", "gather_scatter"],
)
def gather_scatter(bench: RankBench) -> str:
    """Do each at each rank, among all and in a group, of few numbers and of many."""
    group = bench.processes.new_group(range(bench.size))
    cases = [("", None, dtype, count) for dtype, count in (*ODD, (torch.float32, LARGE[0]))]
    for where, among, dtype, count in (*cases, (" in a group", group, torch.float32, 1001)):
        every = wide(bench.size, dtype, count)
        mine = every[bench.rank].to(bench.torch_device)
        for root in range(bench.size):
            label = f"{count:,} numbers in {dtype}{where}"
            is_root = bench.rank == root
            gathered, around = new_view(bench, count * bench.size, dtype)
            parts = list(gathered.chunk(bench.size)) if is_root else None
            distributed.gather(mine, parts, root, group=among)
            if is_root:
                right, reverse = torch.cat(every), torch.cat(every[::-1])
                instead = {"those of the ranks in reverse order": reverse}
                what = f"gather at {root}, {label}"
                expect_in_view(bench, what, gathered, around, right, instead)
            received, around = new_view(bench, count, dtype)
            rows = [row.to(bench.torch_device) for row in every] if is_root else None
            distributed.scatter(received, rows, root, group=among)
            what, instead = f"scatter from {root}, {label}", those_of(every)
            expect_in_view(bench, what, received, around, every[bench.rank], instead)
            total, around = new_view(bench, count, dtype)
            total.copy_(mine)
            distributed.reduce(total, root, group=among)
            if is_root:
                right, instead = torch.stack(every).sum(0), {"not reduced": every[root]}
                what = f"reduce at {root}, {label}"
                expect_in_view(bench, what, total, around, right, instead)
    _gather_and_scatter_late(bench)
    return "at each rank"


def _gather_and_scatter_late(bench: RankBench) -> None:
    """Have the root receive late, then the other ranks, while what they get is overwritten."""
    mine, found = own(bench), torch.empty_like(own(bench))
    is_root = bench.rank == 0
    parts = [torch.empty_like(mine) for _ in range(bench.size)] if is_root else None
    call_and_overwrite(
        *(bench, 0), lambda: distributed.gather(mine, parts, 0, async_op=True), [mine]
    )
    if parts is not None:
        right = torch.cat([numbers(rank) for rank in range(bench.size)])
        expect_sent(bench, "gather at 0, which is late", torch.cat(parts), right)
    rows = [numbers(peer).to(bench.torch_device) for peer in range(bench.size)] if is_root else None
    call_and_overwrite(
        *(bench, 1), lambda: distributed.scatter(found, rows, 0, async_op=True), rows or []
    )
    expect_sent(bench, "scatter from 0, rank 1 late", found, numbers(bench.rank))


@_check(
    "distributed.send-recv",
    "`send` and `recv` carry tensors in order, also both ways at once, in a group and into a view; "
    "after `wait` what was sent can be overwritten.",
    reason="Pipeline stages pass activations with them.",
    requires=["distributed", "send_recv"],
)
def send_recv(bench: RankBench) -> str:
    """Send one way, then exchange with `batch_isend_irecv`."""
    other = (bench.rank + 1) % bench.size
    group = bench.processes.new_group(range(bench.size))
    kinds = (*((torch.float32, 1001),) * 3, *ODD, (torch.float32, LARGE[0]))
    for number, (dtype, count) in enumerate(kinds):
        right = wide(8, dtype, count)[number]
        among = group if number == 1 else None
        if bench.rank == 0:
            distributed.send(right.to(bench.torch_device), 1, group=among)
        if bench.rank == 1:
            tensor, around = new_view(bench, count, dtype)
            distributed.recv(tensor, 0, group=among)
            label = f"message {number} of {count:,} numbers in {dtype}"
            expect_in_view(bench, label, tensor, around, right)
    found = torch.empty(1001, device=bench.torch_device)
    works = distributed.batch_isend_irecv(
        [
            distributed.P2POp(distributed.isend, own(bench), other),
            distributed.P2POp(distributed.irecv, found, (bench.rank - 1) % bench.size),
        ]
    )
    for work in works:
        work.wait()
    expect(bench, "both ways", found, numbers((bench.rank - 1) % bench.size))
    sent = own(bench)
    if bench.rank == 0:
        call_and_overwrite(bench, 1, lambda: distributed.isend(sent, 1), [sent])
    if bench.rank == 1:
        call_and_overwrite(bench, 1, lambda: distributed.irecv(found, 0), [])
        expect_sent(bench, "a message that is received late", found, numbers(0))
    return "one way and both ways"


@_check(
    "distributed.async",
    "Asynchronous collectives complete in order, with correct results, for the stream in which "
    "`wait` is called, whichever starts them.",
    reason="Gradients are reduced during the backward pass.",
    requires=["distributed"],
)
def asynchronous(bench: RankBench) -> str:
    """Start eight reductions, compute, then wait."""
    tensors = [own(bench) + number for number in range(8)]
    works = [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]
    square = torch.eye(128, device=bench.torch_device)
    for _ in range(20):
        square = square @ square
    for work in works:
        work.wait()
    every = torch.stack([numbers(rank) for rank in range(bench.size)]).sum(0)
    for number, tensor in enumerate(tensors):
        expect(bench, f"reduction {number}", tensor, every + number * bench.size)
    if bench.device.new_stream is None:
        return "eight at once"
    _wait_in_another_stream(bench, bench.device.new_stream(), bench.device.new_stream())
    return "eight at once; started in one stream, waited for in another"


def _wait_in_another_stream(bench: RankBench, starting: Any, waiting: Any) -> None:
    """Start each collective behind work of one stream, and read it in the stream that waits."""
    products = queued_products(bench)
    every = [numbers(rank) for rank in range(bench.size)]
    calls: dict[str, tuple[Callable[..., Any], Tensor]] = {
        "all_reduce": (distributed.all_reduce, torch.stack(every).sum(0)),
        "broadcast": (partial(distributed.broadcast, src=0), every[0]),
        "all_gather_into_tensor": (
            lambda gathered, **more: distributed.all_gather_into_tensor(
                gathered, own(bench), **more
            ),
            torch.cat(every),
        ),
    }
    for name, (call, right) in calls.items():
        tensor = (
            own(bench)
            if right.numel() == every[0].numel()
            else right.new_zeros(right.shape, device=bench.torch_device)
        )
        bench.device.synchronize()
        with starting:
            products.run()
            work = call(tensor, async_op=True)
        with waiting:
            work.wait()
            label = f"`{name}`, started in one stream and waited for in another"
            expect(bench, label, tensor, right)


@_check(
    "distributed.groups",
    "A collective in a group of some ranks involves only these ranks: it divides by their number, "
    "and begins at the rank that is named.",
    reason="Each axis of a parallel run has separate groups.",
    requires=["distributed"],
)
def groups(bench: RankBench) -> str:
    """Reduce, broadcast and average in a group of all, and in one of each rank."""
    everyone = bench.processes.new_group(range(bench.size))
    alone = [bench.processes.new_group([rank]) for rank in range(bench.size)]
    tensor = own(bench)
    distributed.all_reduce(tensor, group=alone[bench.rank])
    expect(bench, "a group of one", tensor, numbers(bench.rank))
    distributed.all_reduce(tensor, group=everyone)
    right = torch.stack([numbers(rank) for rank in range(bench.size)]).sum(0)
    expect(bench, "a group of all", tensor, right)
    every = wide(bench.size)
    for source in range(bench.size):
        tensor = every[bench.rank].to(bench.torch_device, copy=True)
        distributed.broadcast(tensor, source, group=everyone)
        label = f"`broadcast` in a group of all from rank {source}"
        expect(bench, label, tensor, every[source], those_of(every))
    distributed.broadcast(tensor, bench.rank, group=alone[bench.rank])
    expect(bench, "`broadcast` in a group of one", tensor, every[-1])
    if bench.processes.backend.supports_average:
        _average_in_groups(bench, alone[bench.rank], everyone)
    return f"{bench.size + 1} groups"


def _average_in_groups(bench: RankBench, alone: Any, everyone: Any) -> None:
    """Average by `all_reduce` and, where there is one, by `reduce_scatter_tensor`."""
    size, average = bench.size, distributed.ReduceOp.AVG
    words = f"divided by the {size} processes of the run, not by those of the group"
    for label, group, ranks in (
        ("one", alone, range(bench.rank, bench.rank + 1)),
        ("all", everyone, range(size)),
    ):
        every = [row for rank, row in enumerate(wide(size, count=1000 * size)) if rank in ranks]
        total = torch.stack(every).sum(0)
        right, instead = total / len(every), total / size
        tensor = wide(size, count=1000 * size)[bench.rank].to(bench.torch_device)
        part = torch.empty(tensor.numel() // len(every), device=bench.torch_device)
        if "reduce_scatter" not in bench.closed:
            distributed.reduce_scatter_tensor(part, tensor, average, group=group)
            place = bench.rank if group is everyone else 0
            own_part = [whole.chunk(len(every))[place] for whole in (right, instead)]
            what = f"average by `reduce_scatter_tensor` in a group of {label}"
            expect(bench, what, part, own_part[0], {words: own_part[1]})
        distributed.all_reduce(tensor, average, group=group)
        what = f"average by `all_reduce` in a group of {label}"
        expect(bench, what, tensor, right, {words: instead})


@_check(
    "distributed.leaves-alone",
    "A collective changes no other tensor, and does not change its input if the output is another"
    " tensor.",
    reason="Buffers that are reused too early are read by the next layer.",
    requires=["distributed"],
)
def leaves_alone(bench: RankBench) -> str:
    """Compare neighbours of outputs, and the input of a gather."""
    buffer = torch.full((3000,), 7.0, device=bench.torch_device)
    buffer[1000:2000] = own(bench, count=1000)
    distributed.all_reduce(buffer[1000:2000])
    right = torch.full((3000,), 7.0)
    right[1000:2000] = torch.stack([numbers(rank, count=1000) for rank in range(bench.size)]).sum(0)
    expect(bench, "the neighbours of a slice", buffer, right)
    given = own(bench)
    gathered = torch.empty(1001 * bench.size, device=bench.torch_device)
    distributed.all_gather_into_tensor(gathered, given)
    expect(bench, "the input of a gather", given, numbers(bench.rank))
    for dtype, count in ODD:
        _in_views(bench, dtype, count)
    return "a slice, a gather, views of 3 numbers"


def _in_views(bench: RankBench, dtype: torch.dtype, count: int) -> None:
    """Call each with outputs that end in the middle of a word."""
    every, label = wide(bench.size, dtype, count), f"of {count:,} numbers in {dtype}"
    mine = every[bench.rank].to(bench.torch_device)
    tensor, around = new_view(bench, count, dtype)
    tensor.copy_(mine)
    distributed.all_reduce(tensor)
    right = torch.stack(every).sum(0)
    expect_in_view(bench, f"`all_reduce` {label}", tensor, around, right)
    tensor, around = new_view(bench, count, dtype)
    tensor.copy_(mine)
    distributed.broadcast(tensor, bench.size - 1)
    expect_in_view(bench, f"`broadcast` {label}", tensor, around, every[-1])
    gathered, around = new_view(bench, count * bench.size, dtype)
    distributed.all_gather_into_tensor(gathered, mine)
    right = torch.cat(every)
    expect_in_view(bench, f"`all_gather_into_tensor` {label}", gathered, around, right)
    gathered, around = new_view(bench, count * bench.size, dtype)
    distributed.all_gather(list(gathered.chunk(bench.size)), mine)
    expect_in_view(bench, f"`all_gather` {label}", gathered, around, right)
