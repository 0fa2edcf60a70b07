"""Level 4: torch's data parallelism on the device gives what one process gives.

The model is torch's own; lmcore's layouts are in `layouts.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lmcore_conformance.registry import Failure, check

if TYPE_CHECKING:
    from lmcore_conformance.process.ranks import RankBench

_check = partial(check, level="L4", group="distributed")
_STEPS = 4
_CLOSE = 1e-5


def _model() -> nn.Module:
    """Return a small model with the same weights everywhere, on the host."""
    blocks = nn.Sequential(
        nn.Linear(12, 33),
        nn.LayerNorm(33),
        nn.GELU(),
        nn.Linear(33, 33),
        nn.Tanh(),
        nn.Linear(33, 5),
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in blocks.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return blocks


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 12, generator=generator), torch.randn(6, 5, generator=generator)


def _train(model: nn.Module, device: torch.device, ranks: list[int]) -> list[float]:
    """Take steps on the batches of some ranks together; return their losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(_STEPS):
        pairs = [_batch(step, rank) for rank in ranks]
        x, y = (torch.cat(parts).to(device) for parts in zip(*pairs, strict=True))
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _compare(bench: RankBench, found: dict[str, Tensor], losses: list[float]) -> str:
    """Compare weights and losses with one process's on the whole batch, on the host."""
    single = _model()
    right = _train(single, torch.device("cpu"), list(range(bench.size)))
    gathered = bench.processes.gather(losses)
    mean = [sum(step) / bench.size for step in zip(*gathered, strict=True)]
    off = max(abs(a - b) for a, b in zip(mean, right, strict=True))
    if not off < _CLOSE * 10:
        raise Failure(f"losses are {mean}, and {right} in one process")
    worst = 0.0
    for name, tensor in single.state_dict().items():
        worst = max(worst, float((found[name].cpu() - tensor).abs().max()))
    if not worst < 1e-3:
        raise Failure(f"after {_STEPS} steps weights are off by {worst:.1e}")
    return f"losses off by {off:.1e}, weights by {worst:.1e}"


@_check(
    "distributed.ddp",
    "Steps with torch's `DistributedDataParallel` equal those of one process on the whole batch.",
    reason="It is the simplest form of data parallelism.",
    requires=["distributed", "ddp"],
    seconds=90,
)
def ddp(bench: RankBench) -> str:
    """Train on half a batch each."""
    from torch.nn.parallel import DistributedDataParallel

    model = _model().to(bench.torch_device)
    wrapped = DistributedDataParallel(
        model, device_ids=None if bench.is_host else [bench.torch_device]
    )
    losses = _train(wrapped, bench.torch_device, [bench.rank])
    return _compare(bench, model.state_dict(), losses)


def _sharded(bench: RankBench, inner: Any = None, outer: Any = None) -> nn.Module:
    """Return the model with each projection and the rest sharded, under precision policies."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(bench.device.type, (bench.size,))
    model = _model().to(bench.torch_device)
    for layer in model:  # type: ignore[attr-defined]  # a Sequential
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **({"mp_policy": inner} if inner else {}))
    fully_shard(model, mesh=mesh, **({"mp_policy": outer} if outer else {}))
    return model


@_check(
    "distributed.fsdp",
    "Steps with torch's `fully_shard` (FSDP2) equal those of one process, and weights are sharded.",
    reason="Models that do not fit on one device are trained with it.",
    requires=["distributed", "reduce_scatter", "fsdp"],
    seconds=120,
)
def fsdp(bench: RankBench) -> str:
    """Shard each projection and the rest, train, gather."""
    model = _sharded(bench)
    largest = max(model.parameters(), key=lambda parameter: parameter.numel())
    share: int = largest.to_local().numel()  # type: ignore[attr-defined]  # a DTensor
    if share > largest.numel() * 0.6:
        raise Failure(f"a rank keeps {share} of {largest.numel()} numbers of a weight")
    losses = _train(model, bench.torch_device, [bench.rank])
    full = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    return _compare(bench, full, losses)


@_check(
    "distributed.fsdp-mixed",
    "`fully_shard` computes in bfloat16 and reduces in float32, near float32's losses.",
    reason="Large models are trained this way.",
    requires=["distributed", "reduce_scatter", "fsdp", "bfloat16"],
    seconds=120,
)
def fsdp_mixed(bench: RankBench) -> str:
    """Train with a mixed-precision policy and compare losses loosely."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    inner = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    outer = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    model = _sharded(bench, inner, outer)
    losses = _train(model, bench.torch_device, [bench.rank])
    gathered = bench.processes.gather(losses)
    mean = [sum(step) / bench.size for step in zip(*gathered, strict=True)]
    right = _train(_model(), torch.device("cpu"), list(range(bench.size)))
    off = max(abs(a / b - 1) for a, b in zip(mean, right, strict=True))
    if not 0 < off < 0.05:
        raise Failure(f"losses are off by {off:.1%} of float32's: {mean}, {right}")
    return f"losses off by {off:.1e}"
