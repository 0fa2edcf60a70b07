"""One rank that trains sharded layouts over a backend that averages, and over one that only sums.

A file of cases (JSON: name -> flags), and a folder, which gets the kinds of reductions that were
asked of torch, and the results of `layouts/worker.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from layouts import worker
from layouts.stored import store

from lmcore.parallel import data_parallel
from lmcore.plugin import Selection, discover
from lmcore.plugin.selection import HANDED_DOWN
from lmcore.runtime.launch.rank import rank_info
from lmcore.runtime.launch.worker_protocol import end_with_launcher
from lmcore.runtime.process.join import join_processes
from lmcore.runtime.runtime import Runtime, start_runtime

REDUCTIONS = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")
"""Functions by which versions of torch reduce sharded gradients."""


@contextmanager
def reductions() -> Iterator[set[str]]:
    """Return the kinds of the reductions that are asked of torch within the context."""
    asked: set[str] = set()
    real = {name: getattr(distributed, name) for name in REDUCTIONS if hasattr(distributed, name)}

    def watching(function: Any) -> Any:
        signature = inspect.signature(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            op = given.arguments["op"]
            kind = getattr(op, "op", op)  # of a `ReduceOp`, or its kind alone
            how = function.__name__.removesuffix("_tensor").removesuffix("_single")
            asked.add(f"{how} {str(kind).rpartition('.')[2]}")
            return function(*args, **kwargs)

        return call

    scatter = data_parallel.scatter_into  # on the host in the place of torch's own call
    for name, function in real.items():
        setattr(distributed, name, watching(function))
    data_parallel.scatter_into = watching(scatter)
    try:
        yield asked
    finally:
        for name, function in real.items():
            setattr(distributed, name, function)
        data_parallel.scatter_into = scatter


def only_sums(runtime: Runtime) -> Runtime:
    """Return the runtime with a backend that does not average."""
    assert runtime.processes is not None
    backend = dataclasses.replace(runtime.processes.backend, supports_average=False)
    processes = dataclasses.replace(runtime.processes, backend=backend)
    return dataclasses.replace(runtime, processes=processes)


def main(cases: dict[str, str], out: Path) -> None:
    """Train every case both ways."""
    place = rank_info(os.environ)
    plugins = discover()
    selection = Selection.from_json(os.environ[HANDED_DOWN])
    torch.set_num_threads(1)
    plans = {name: worker.plan_of(flags, place.world_size) for name, flags in cases.items()}
    first = next(iter(plans.values()))
    with (
        join_processes(place, timeout=60.0) as rendezvous,
        start_runtime(first.config, plugins, selection, place, rendezvous) as runtime,
    ):
        for name, plan in plans.items():
            usual = worker.of_case(runtime, plan, plugins)
            for way, own in (("average", usual), ("sum", only_sums(usual))):
                with reductions() as asked:
                    found = worker.run(plan, own)
                store({**found, "asked": sorted(asked)}, out / f"{name}-{way}.{place.rank}.found")


if __name__ == "__main__":
    end_with_launcher(os.environ)
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
