"""Times a save and a load: lmcore beside torch.save + fsync and torch's own distributed save.

    python benchmarks/checkpoint.py --megabytes 1000 --repeats 5 --directory /some/disk

All variants run in turn inside each repeat, so that a slow moment of the disk hits all of them;
printed are medians, the processor time of all threads, and the ratio to torch's distributed save
(load).  Loads read from the page cache, which a save has just filled, but for those named `cold`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, parse

if TYPE_CHECKING:
    import torch

Action = Callable[[], object]


def model_like(megabytes: int) -> dict[str, torch.Tensor]:
    """Return fp32 tensors of a transformer's mix: one large table, many matrices and vectors."""
    import torch

    hidden = 1024
    tensors = {"embedding": torch.randn(max(1, megabytes * 1_000_000 // 5 // (hidden * 4)), hidden)}
    layer = 0
    while sum(tensor.nbytes for tensor in tensors.values()) < megabytes * 1_000_000:
        tensors[f"layers.{layer}.mlp"] = torch.randn(4 * hidden, hidden)
        tensors[f"layers.{layer}.bias"] = torch.randn(4 * hidden)
        layer += 1
    return tensors


def torch_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Save everything into one file and sync it."""
    import torch

    path.mkdir()
    with (path / "state.pt").open("wb") as stream:
        torch.save(tensors, stream)
        stream.flush()
        os.fsync(stream.fileno())


def save_distributed(tensors: dict[str, torch.Tensor], path: Path, num_threads: int) -> None:
    """Save with torch's distributed writer, synced."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    writer = FileSystemWriter(path, thread_count=num_threads, sync_files=True)
    dcp_save(dict(tensors), storage_writer=writer, no_dist=True)


Timing = tuple[float, float]
"""Seconds by the clock, and of processor time."""


def seconds(action: Action) -> Timing:
    """Return how long *action* took."""
    start, used = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - start, time.process_time() - used


def drop_cache(folder: Path) -> None:
    """Ask the system to forget the content of the files in *folder*."""
    os.sync()
    for path in folder.iterdir():
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(
    folder: Path, tensors: dict[str, torch.Tensor], repeats: int
) -> dict[str, list[Timing]]:
    """Return the times of every variant, one pair a repeat."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    from lmcore.checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint

    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    ours, theirs, plain = folder / "ours", folder / "dcp2", folder / "plain"
    checkpoint = ours / "iter_0000001"
    saves: dict[str, tuple[Path, Action]] = {
        "save: torch.save + fsync": (plain, lambda: torch_save(tensors, plain)),
        "save: dcp.save, 1 thread": (
            folder / "dcp1",
            lambda: save_distributed(tensors, folder / "dcp1", 1),
        ),
        "save: dcp.save, 2 threads": (theirs, lambda: save_distributed(tensors, theirs, 2)),
        "save: lmcore": (ours, lambda: save_checkpoint(ours, 1, tensors, {}, model_shape={})),
    }
    loads: dict[str, Action] = {
        "load: torch.load": lambda: torch.load(plain / "state.pt", weights_only=True),
        "load: dcp.load": lambda: dcp_load(targets, checkpoint_id=theirs, no_dist=True),
        "load: lmcore, unverified": lambda: load_checkpoint(checkpoint, targets, verify=False),
        "load: lmcore": lambda: load_checkpoint(checkpoint, targets),
        "verify: lmcore": lambda: verify_checkpoint(checkpoint),
        "verify: lmcore, cold": lambda: verify_checkpoint(checkpoint),
        "load: lmcore, unverified, cold": lambda: load_checkpoint(
            checkpoint, targets, verify=False
        ),
    }
    timings: dict[str, list[Timing]] = {name: [] for name in [*saves, *loads]}
    for repeat in range(repeats + 1):
        for name in rotated(list(saves), repeat):
            path, save = saves[name]
            shutil.rmtree(path, ignore_errors=True)
            os.sync()
            timings[name].append(seconds(save))
        for name in rotated(list(loads), repeat):
            if name.endswith("cold"):
                drop_cache(checkpoint)
            timings[name].append(seconds(loads[name]))
    # The first round loads modules and warms the disk.
    return {name: taken[1:] for name, taken in timings.items()}


def rotated(names: list[str], by: int) -> list[str]:
    """Return *names* begun at another one each time: what runs first finds the disk idle."""
    start = by % len(names)
    return names[start:] + names[:start]


def report(timings: dict[str, list[Timing]], megabytes: float) -> None:
    """Print medians, spread, processor time and ratios."""
    print(f"{'':32}{'MB/s':>7}{'min':>7}{'max':>7}{'CPU s/GB':>10}  ratio")
    walls = {name: [wall for wall, _ in pairs] for name, pairs in timings.items()}
    for name, taken in walls.items():
        kind = name.split(":", maxsplit=1)[0]
        base = "save: dcp.save, 2 threads" if kind == "save" else "load: dcp.load"
        middle = statistics.median(taken)
        used = statistics.median(used for _, used in timings[name]) / megabytes * 1000
        print(
            f"{name:32}{megabytes / middle:7.0f}{megabytes / max(taken):7.0f}"
            f"{megabytes / min(taken):7.0f}{used:10.2f}  "
            f"{statistics.median(walls[base]) / middle:.2f}x"
        )


def main() -> None:
    """Run the comparison that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="bytes of tensors, in 10^6")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary one")
    arguments = parse(parser, megabytes=1, repeats=1)
    check(arguments)
    import torch

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    tensors = model_like(arguments.megabytes)
    megabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    print(f"{len(tensors)} tensors, {megabytes:.0f} MB, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        report(measure(Path(folder), tensors, arguments.repeats), megabytes)


if __name__ == "__main__":
    main()
