"""One rank of a run, as `conftest.py` starts it: SCENARIO, then the timeout in seconds."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from lmcore.base.errors import DataError, LmcoreError
from lmcore.config.load import load_config
from lmcore.contract.op.records import OpContext, parse_preferences
from lmcore.plugin import Selection, build_op_table, create_device, discover
from lmcore.plugin.registrations import plugin_sections
from lmcore.plugin.selection import HANDED_DOWN
from lmcore.runtime.launch.rank import rank_info
from lmcore.runtime.process.consistency import (
    check_device,
    check_equal,
    check_kernels,
    check_versions,
)
from lmcore.runtime.process.group import Processes, start_processes
from lmcore.runtime.process.join import join_processes

JOIN_SECONDS = 40.0  # a busy machine may be slow to start


def main(scenario: str, timeout: float) -> int:
    """Join the run, compare notes, create the process group and play the scenario."""
    place = rank_info(os.environ)
    plugins = discover()
    selection = Selection.from_json(os.environ[HANDED_DOWN])
    with join_processes(place, timeout=JOIN_SECONDS) as rendezvous:
        check_device(rendezvous, selection, plugins)
        check_versions(rendezvous, selection, plugins)
        defaults = load_config([], plugins=plugin_sections(plugins)).config
        device = create_device(plugins, selection, defaults)
        wanted = parse_preferences(os.environ.get("KERNELS", "").split())
        table = build_op_table(plugins, selection, device, preferences=wanted)
        table.bind("attention", OpContext(device.type, "float32", {"head_dim": 8, "dropout": 0.0}))
        check_kernels(rendezvous, table)
        with start_processes(plugins, selection, device, rendezvous, timeout=timeout) as processes:
            quick = dataclasses.replace(rendezvous, timeout=timeout)
            SCENARIOS[scenario](dataclasses.replace(processes, rendezvous=quick))
    from torch import distributed

    show({"destroyed": not distributed.is_initialized()})
    return 0


def show(value: Any) -> None:
    """Print a JSON line for the test to read."""
    print(json.dumps(value), flush=True)


def work(processes: Processes) -> None:
    """Sum a tensor over all ranks and over a group of one, and gather values."""
    import torch
    from torch import distributed

    tensor = torch.full((3,), float(processes.rank.rank + 1))
    distributed.all_reduce(tensor)
    show({"backend": processes.backend.name, "sum": tensor.tolist()})
    alone = processes.new_group([0])
    show({"member": alone is not None})
    show(processes.gather(f"from {processes.rank.rank}"))


def settle(processes: Processes) -> None:
    """Disagree."""
    check_equal(processes.rendezvous, "colour", ["red", "blue"][processes.rank.rank])


def refuse(processes: Processes) -> None:
    """Raise an lmcore error on rank 1."""
    if processes.rank.rank == 1:
        raise DataError("the corpus is cut off")
    processes.barrier("the corpus")


def die(processes: Processes) -> None:
    """Let one rank be killed before the others wait for it."""
    if processes.rank.rank == int(os.environ["VICTIM"]):
        os.kill(os.getpid(), signal.SIGKILL)
    processes.barrier("the first step")


def lag(processes: Processes) -> None:
    """Let rank 1 miss a reduction, over the default group and over one made later."""
    import torch
    from torch import distributed

    group = processes.new_group([0, 1])
    for one in (None, group) if processes.rank.rank == 0 else ():
        begin = time.monotonic()
        try:
            distributed.all_reduce(torch.ones(1), group=one)
        except RuntimeError:
            show({"waited": time.monotonic() - begin})
    check_equal(dataclasses.replace(processes.rendezvous, timeout=JOIN_SECONDS), "end", "the end")


class Drawn:
    """Dataset whose samples have a random number of the process that reads them."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        import torch

        return index, torch.rand(()).item()


def batches_of(processes: Processes, loader: Any, *, shard: bool = True) -> Any:
    """Return the sharded loader of the user's *loader*, on the host."""
    import torch

    from lmcore.library.loader import shard_loader

    device: Any = SimpleNamespace(torch_device=torch.device("cpu"), new_stream=None)
    runtime: Any = SimpleNamespace(device=device, rank=processes.rank, processes=processes)
    return shard_loader(loader, runtime, seed=5, shard=shard)


def share(processes: Processes) -> None:
    """Read the batches of a shuffled loader with a worker process, and of a custom sampler."""
    import random

    from torch.utils.data import DataLoader

    class Own:
        def __iter__(self) -> Any:
            return iter(random.sample(range(9), 9))  # each process has other numbers

        def __len__(self) -> int:
            return 9

    dataset: Any = Drawn()
    for options in ({"shuffle": True}, {"sampler": Own()}):
        loader = DataLoader(dataset, 2, num_workers=1, persistent_workers=True, **options)
        batches = batches_of(processes, loader)
        for _ in range(2):
            show([(indices.tolist(), drawn.tolist()) for indices, drawn in batches])


def streams(processes: Processes) -> None:
    """Read streams of different lengths, with a collective for each batch."""
    import torch
    from torch import distributed

    lengths = [4, 6]
    stream = iter(range(lengths[processes.rank.rank]))
    for _ in batches_of(processes, stream, shard=False):
        distributed.all_reduce(torch.ones(1))


SCENARIOS: dict[str, Callable[[Processes], None]] = {
    one.__name__: one for one in (work, settle, refuse, die, lag, share, streams)
}

if __name__ == "__main__":
    try:
        STATUS = main(sys.argv[1], float(sys.argv[2]))
    except LmcoreError as error:
        sys.stderr.write(error.render() + "\n")
        STATUS = error.exit_status
    raise SystemExit(STATUS)
