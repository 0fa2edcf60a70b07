"""One process of a group over simccl; `python distributed_worker.py WHAT RANK SIZE PORT`."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmcore.contract.torch_versions import GLOO_AVERAGE
from lmcore.runtime.process.collective_trace import trace_collectives
from lmcore_sim import _C, torch_backend  # noqa: F401 - makes the device known to torch


def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device="sim")


def same(found: Tensor, expected: list[float]) -> None:
    assert found.device.type == "sim"
    assert found.flatten().tolist() == expected, (found, expected)


def reductions(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        tensor = full(rank + 1, 3, dtype=dtype)
        dist.all_reduce(tensor)
        same(tensor, [3] * 3)
    averages = (("AVG", 1.5),) if GLOO_AVERAGE else ()
    for op, expected in (*averages, ("MAX", 2), ("MIN", 1), ("PRODUCT", 2)):
        tensor = full(rank + 1, 2)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        same(tensor, [expected] * 2)
    tensor = full(rank + 1, 2)
    dist.reduce(tensor, 0)
    if rank == 0:
        same(tensor, [3, 3])
    out = full(0, 2)
    dist.reduce_scatter_tensor(out, torch.arange(4.0, device="sim"))
    same(out, [0, 2] if rank == 0 else [4, 6])
    if GLOO_AVERAGE:
        dist.reduce_scatter_tensor(out, torch.arange(4.0, device="sim"), op=dist.ReduceOp.AVG)
        same(out, [0, 1] if rank == 0 else [2, 3])
    dist.reduce_scatter(out, [full(1, 2), full(2, 2)])
    same(out, [2, 2] if rank == 0 else [4, 4])


def movements(rank: int, size: int) -> None:
    tensor = full(rank + 1, 2)
    dist.broadcast(tensor, 1)
    same(tensor, [2, 2])
    parts = [full(-1, 2) for _ in range(size)]
    dist.all_gather(parts, full(rank, 2))
    same(torch.cat(parts), [0, 0, 1, 1])
    out = full(-1, 4)
    dist.all_gather_into_tensor(out, full(rank, 2))
    same(out, [0, 0, 1, 1])
    dist.all_to_all_single(out, torch.arange(4.0, device="sim") + 10 * rank)
    same(out, [0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13])
    if GLOO_AVERAGE:  # gloo of older versions has no `all_to_all` of lists either
        dist.all_to_all(parts, [full(10 * rank + other, 2) for other in range(size)])
        same(torch.cat(parts), [0, 0, 10, 10] if rank == 0 else [1, 1, 11, 11])
    got = [full(-1, 2) for _ in range(size)] if rank == 0 else None
    dist.gather(full(rank, 2), got, 0)
    if got is not None:
        same(torch.cat(got), [0, 0, 1, 1])
    one = full(-1, 2)
    dist.scatter(one, [full(other, 2) for other in range(size)] if rank == 0 else None, 0)
    same(one, [rank, rank])
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]


def messages(rank: int, size: int) -> None:
    tensor = full(rank, 2)
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
        same(tensor, [0, 0])
    got = full(-1, 2)
    ops = [dist.P2POp(dist.isend, full(rank, 2), 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(got, [1 - rank] * 2)


def groups(rank: int, size: int) -> None:
    with dist._coalescing_manager(device=torch.device("sim", rank), async_ops=True) as manager:
        parts = [full(1, 2), full(rank, 3)]
        for part in parts:
            dist.all_reduce(part)
    manager.wait()
    same(torch.cat(parts), [2, 2, 1, 1, 1])
    work = dist.all_reduce(tensor := full(rank, 2), async_op=True)
    _C.set_missing_wait_raises(False)
    assert (tensor + 0).isnan().all()  # the stream has not waited for the work
    assert "simccl may still be writing" in _C.take_missing_waits()[0]
    future = work.get_future()
    future.wait()
    same(future.value()[0], [1, 1])
    same(tensor, [1, 1])
    same_group = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=same_group)
    same(tensor, [2, 2])
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    dist.all_reduce(tensor, group=alone)
    same(tensor, [2, 2])
    try:
        dist.all_reduce(torch.ones(2), group=same_group)
    except RuntimeError as error:
        assert "cpu" in str(error).lower()  # noqa: PT017 - no pytest in a worker
    else:
        raise AssertionError("a tensor of the CPU was carried")


def trace(rank: int, size: int) -> None:
    """Find the collectives by group in the flight recorder, which a message about a hang names."""
    group = dist.new_group([0, 1], group_desc="data")
    dist.all_reduce(full(1, 5))
    dist.all_gather_into_tensor(full(0, 4), full(1, 2), group=group)
    dist.all_reduce(full(1, 3), group=group)
    found = {trace["name"]: trace["ops"] for trace in trace_collectives().values()}
    last = list(found["world"].values())[-1]
    assert last == "all_reduce of float32 [5]", found
    ops = ["all_gather of float32 [2]", "all_reduce of float32 [3]"]
    assert [op.replace("_into_tensor", "") for op in found["data"].values()] == ops, found


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)]
    return nn.Sequential(*layers)


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    found = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def as_one_process(model: nn.Module, rank: int, size: int, tolerance: float = 1e-5) -> None:
    x, y = (sample.chunk(size)[rank].to("sim") for sample in samples())
    found = losses(model, x, y)
    dist.all_reduce(found, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(found.cpu(), losses(network(), *samples()), rtol=0, atol=tolerance)


def ddp(rank: int, size: int) -> None:
    model = nn.parallel.DistributedDataParallel(network().to("sim"), device_ids=[rank])
    as_one_process(model, rank, size)


def fsdp(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("sim", (size,))
    model = network().to("sim")
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    as_one_process(model, rank, size)
    assert model[0].weight.to_local().device == torch.device("sim", rank)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    half = fully_shard(network().to("sim"), mesh=mesh, mp_policy=mixed)
    as_one_process(half, rank, size, tolerance=2e-2)


def tensor_parallel(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("sim", (size,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(network().to("sim"), mesh, plan)
    found = losses(model, *(sample.to("sim") for sample in samples()))
    torch.testing.assert_close(found.cpu(), losses(network(), *samples()), rtol=0, atol=1e-5)
    torch.manual_seed(7)
    ones = distribute_tensor(torch.ones(256, device="sim"), mesh, [Shard(0)])
    kept = torch.nn.functional.dropout(ones, 0.5).full_tensor() > 0
    assert 80 < kept.sum().item() < 176
    assert not torch.equal(kept[:128], kept[128:])  # each shard drops others


def faulty(rank: int, size: int) -> None:
    seconds = timedelta(seconds=int(os.environ.get("SECONDS", "30")))
    dist.barrier()
    group = dist.new_group(timeout=seconds)
    tensor = full(1, 2)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=group)
    print(tensor.tolist())


def main() -> None:
    case, rank, size, port = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    torch.accelerator.set_device_index(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "simccl",
        init_method=address,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    globals()[case](rank, size)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
