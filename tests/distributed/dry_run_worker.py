"""Some ranks of large layouts, one after the other in one process; argument: cases as JSON.

The other ranks are torch's fake process group, whose collectives return shapes without numbers.
A line of JSON is printed for each case and rank.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmcore.config.load import load_config
from lmcore.config.plan import RunPlan
from lmcore.config.resolve import resolve
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate
from lmcore.parallel.parallel_model import ParallelModel, parallelize
from lmcore.parallel.random_states import seed_everything
from lmcore.plugin import comm_backends, discover, select
from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.process.group import Processes
from lmcore.runtime.runtime import Runtime, start_runtime
from lmcore.train.state import TrainState
from lmcore.train.token_mean import weighted

VOCABULARY = 1000
BASE = (
    "--hidden-size 32 --num-attention-heads 8 --seq-length 32 --precision fp32"
    " --make-vocab-size-divisible-by 8 --micro-batch-size 1 --train-iters 1 --init-method-std 0.1"
)
HOSTS_SIZE = 8


def receive(tensor: torch.Tensor, *_: Any, **__: Any) -> int:
    """Replace `distributed.recv`: torch's pipelines begin with a vote, in which all ranks say 1."""
    tensor.fill_(1)
    return 0


def place_of(rank: int, world_size: int) -> RankInfo:
    return RankInfo(rank, rank % HOSTS_SIZE, world_size, HOSTS_SIZE)


def step(parallel: ParallelModel, plan: RunPlan) -> int:
    """Run forward and backward of a step; return how many losses it had."""
    model, count = plan.config.model, plan.num_micro_batches
    tokens = torch.randint(VOCABULARY, (plan.config.training.micro_batch_size, model.seq_length))
    names = ("tokens_BS", "targets_BS", "loss_weight_BS")
    batch = dict(zip(names, (tokens, tokens, torch.ones(tokens.shape)), strict=True))
    batches = (weighted(batch, parallel.model.family, share=1.0 / count) for _ in range(count))
    parallel.zero_grad()
    losses = parallel.run(batches, count)
    parallel.gradients()
    return len(losses)


def rank_of(plan: RunPlan, runtime: Runtime) -> dict[str, Any]:
    """Build one rank's part of the model and take a step."""
    seed_everything(1, runtime, plan.layout)
    with runtime.ops.bind_all():
        parallel = parallelize(plan.shape, plan.layout, runtime)
        parallel.initialize(1)
        TrainState.create(parallel, plan, runtime)
    losses = step(parallel, plan)
    mesh = parallel.mesh
    return {
        "losses": losses,
        "axes": {
            name: list(getattr(mesh, name).ranks)
            for name in ("tensor", "context", "pipeline", "replicas", "shards", "shard_replicas")
        },
        "data_rank": mesh.data_rank,
        "parameters": [
            {
                "name": one.name,
                "shape": one.layout.shape,
                "pieces": [(piece.offset, piece.size) for piece in one.layout.chunks],
                "replica_count": one.replica_count,
                "gradient": one.tensor.grad is not None
                and one.tensor.grad.shape == one.tensor.shape,
            }
            for one in parallel.parameters
        ],
    }


def main(cases: dict[str, Any]) -> None:
    """Be the ranks, one after the other."""
    torch.set_num_threads(1)
    distributed.recv = receive
    plugins = discover(env={})
    selection = select(plugins, requested="cpu", env={})
    for name, case in cases.items():
        flags, world_size = case["flags"], case["world_size"]
        loaded = load_config(shlex.split(f"{BASE} {flags}"))
        plan = resolve(
            validate(loaded, world_size=world_size), tokenizer=TokenizerIdentity(VOCABULARY)
        )
        with start_runtime(plan.config, plugins, selection, RankInfo()) as runtime:
            backend = comm_backends(plugins, selection, runtime.device)[0]
            for rank in case["ranks"]:
                place = place_of(rank, world_size)
                distributed.init_process_group(
                    "fake", rank=rank, world_size=world_size, store=FakeStore()
                )
                processes = Processes(place, backend, rendezvous=None, timeout=60.0)
                one = dataclasses.replace(
                    runtime, rank=place, processes=processes, rng=runtime.device.rng_tracker()
                )
                print(json.dumps({"case": name, "rank": rank, **rank_of(plan, one)}), flush=True)
                distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
