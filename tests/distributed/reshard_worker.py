"""One rank that trains, saves and loads in several layouts: a file of orders (JSON), and a folder.

An order has a name, flags, the number of the step to save at (or none), the folder of checkpoints
and the last step.  What the process holds afterwards goes into the folder as `NAME.RANK.found`.
The variable FAULT, `full` or `kill`, is what happens to this process in its last save; ORDERS takes
the place of the file.  In the last order the process waits TIMEOUT seconds for others.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from layouts.stored import store
from layouts.worker import Samples, of_case, plan_of

from lmcore.base.errors import LmcoreError
from lmcore.checkpoint import WritePlanner
from lmcore.checkpoint.files import synced_file
from lmcore.config.plan import RunPlan
from lmcore.contract.transfer import staging_buffers as host_copies
from lmcore.data.loading.loader import BatchLoader
from lmcore.parallel.random_states import named_random_states, seed_everything
from lmcore.parallel.tensor_layout import box
from lmcore.parallel.tensor_parallel import STREAM
from lmcore.plugin import Selection, discover
from lmcore.plugin.selection import HANDED_DOWN
from lmcore.runtime.launch.rank import rank_info
from lmcore.runtime.process.join import join_processes
from lmcore.runtime.runtime import Runtime, start_runtime
from lmcore.train.engine import build_engine
from lmcore.train.resume.point import find_resume_point, verify_resume_point
from lmcore.train.resume.restore import restore
from lmcore.train.resume.save import Saver, Snapshot, take_snapshot
from lmcore.train.state import TrainState

JOIN_SECONDS = 60.0


class Tokens:
    """Stand-in for the tokenizer that a checkpoint describes."""

    def describe(self) -> dict[str, Any]:
        """Return something."""
        return {"type": "none"}

    def fingerprint(self) -> str:
        """Return something."""
        return "0"


def parts_of(state: TrainState) -> list[Any]:
    """Return (name, whole shape, offset, values) of every piece that this process has."""
    with state.evaluation_weights():
        tensors = state.tensors()
        layouts = state.layouts(tensors)
        return [
            (name, layouts[name].shape, piece.offset, box(tensor, piece.start, piece.size).clone())
            for name, tensor in tensors.items()
            for piece in layouts[name].chunks
        ]


def drawn(runtime: Runtime) -> dict[str, torch.Tensor]:
    """Return the process's next random numbers, from its own stream and its parts' stream."""
    found = {}
    with runtime.rng.preserved():
        found["own"] = torch.rand(8)
        if STREAM in runtime.rng.names:
            with runtime.rng.fork(STREAM):
                found["parts"] = torch.rand(8)
    return found


def fail(kind: str) -> None:
    """Let the next write meet a full disk, or the end of the process."""

    def write(*_arguments: Any) -> None:
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    synced_file.SyncedFile._append = write  # type: ignore[method-assign]


class LateSaver(Saver):
    """A saver whose thread writes when training has gone on, and has changed what is no copy.

    Of these small tensors, too, the save copies none: the next update does before it begins.
    """

    def __init__(self, take: Callable[[], Snapshot], *, background: bool) -> None:
        """Write what *take* returns; in the background once `trained` is set."""
        host_copies._SMALLEST_BYTES = 0
        super().__init__(take, background=background)
        self.trained = threading.Event()

    def _write(self, snapshot: Snapshot) -> None:
        self.trained.wait(JOIN_SECONDS)
        super()._write(snapshot)


def impatient(runtime: Runtime) -> Runtime:
    """Return the runtime with the time that the environment has for other processes, if any."""
    if "TIMEOUT" not in os.environ:
        return runtime
    processes = runtime.processes
    rendezvous = dataclasses.replace(processes.rendezvous, timeout=float(os.environ["TIMEOUT"]))
    return dataclasses.replace(
        runtime, processes=dataclasses.replace(processes, rendezvous=rendezvous)
    )


def run(order: dict[str, Any], plan: RunPlan, runtime: Runtime) -> dict[str, Any]:
    """Train, save and load as *order* says."""
    seed_everything(plan.config.training.seed, runtime, plan.layout)
    rendezvous = runtime.processes.rendezvous if runtime.processes else None
    planner = WritePlanner(rendezvous)
    # An earlier order may have written the checkpoint.
    plan = dataclasses.replace(plan, resume=find_resume_point(plan.config.checkpoint))
    plan = dataclasses.replace(plan, resume=verify_resume_point(plan, rendezvous))
    with build_engine(plan, runtime) as engine:
        state = engine.state
        loaded = restore(state, plan, runtime, order="the order", planner=planner)
        engine.begin()
        found: dict[str, Any] = {
            "loaded": parts_of(state),
            "drawn": drawn(runtime),
            "random": named_random_states(runtime),
            "checkpoint": str(loaded),
        }
        state.model.train()
        samples = Samples(plan.train_iters * plan.global_batch_size, plan.config.model.seq_length)
        losses = []

        def take() -> Snapshot:
            tokens: Any = Tokens()
            return take_snapshot(
                state,
                plan,
                runtime,
                tokens,
                directory=Path(order["folder"]),
                order="the order",
                planner=planner,
            )

        with (
            LateSaver(take, background=plan.config.checkpoint.async_save) as saver,
            BatchLoader(
                samples,
                micro_batch_size=plan.config.training.micro_batch_size,
                consumed_samples=state.consumed_samples,
                data_parallel_rank=state.parallel.mesh.data_rank,
                data_parallel_size=plan.layout.data,
            ) as batches,
        ):
            while state.iteration < order["last"]:
                losses.append(engine.step(batches).result().loss)
                if state.iteration == order["save"]:
                    with state.evaluation_weights():
                        saver.save()
                    found["saved"] = parts_of(state)
                    found["random"] = named_random_states(runtime)
            saver.trained.set()
        return found | {"losses": losses, "last": parts_of(state)}


def main(orders: list[dict[str, Any]], out: Path) -> int:
    """Follow all orders in one set of processes."""
    place = rank_info(os.environ)
    plugins = discover()
    selection = Selection.from_json(os.environ[HANDED_DOWN])
    torch.set_num_threads(1)
    plans = [plan_of(order["flags"], place.world_size) for order in orders]

    def follow(rendezvous: Any) -> None:
        with start_runtime(plans[0].config, plugins, selection, place, rendezvous) as runtime:
            for order, plan in zip(orders, plans, strict=True):
                own = of_case(runtime, plan, plugins)
                if order is orders[-1]:
                    own = impatient(own)
                    if "FAULT" in os.environ:
                        fail(os.environ["FAULT"])
                found = run(order, plan, own)
                store(found, out / f"{order['name']}.{place.rank}.found")

    try:
        if place.world_size == 1:
            follow(None)
        else:
            with join_processes(place, timeout=JOIN_SECONDS) as rendezvous:
                follow(rendezvous)
    except LmcoreError as error:
        sys.stderr.write(error.render() + "\n")
        return error.exit_status
    return 0


if __name__ == "__main__":
    LISTED = os.environ.get("ORDERS") or Path(sys.argv[1]).read_text("utf-8")
    raise SystemExit(main(json.loads(LISTED), Path(sys.argv[2])))
