"""Times saves, loads and conversions beside torch's and beside the disk itself.

    python benchmarks/checkpoint.py --megabytes 1000 --repeats 5 --directory /some/disk

All variants run in turn inside each repeat, so that a slow moment of the disk hits all of them;
printed are medians, the processor time of all threads, the ratio to torch's distributed save
(load), and the ratio to writing (reading) the same bytes as one file, with fsync.  Loads read from
the page cache, but for those named `cold`.  Conversions are of a model of as many bytes, from and
to a Hugging Face directory that is not in the page cache: they are also compared with reading and
then writing as many bytes, since a disk may do both at the same time no faster.  Memory is the
growth of the peak of a separate process, beside the size of the largest tensor; a save's peak has
no state in it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
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


def write_raw(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write the bytes of all tensors to one file and sync it."""
    path.mkdir()
    with (path / "raw").open("wb", buffering=0) as stream:
        for tensor in tensors.values():
            content = memoryview(tensor.view(-1).numpy()).cast("B")
            for start in range(0, len(content), 2**20):
                stream.write(content[start : start + 2**20])
        os.fsync(stream.fileno())


def read_raw(path: Path) -> None:
    """Read a file to its end."""
    piece = memoryview(bytearray(2**20))
    with path.open("rb", buffering=0) as stream:
        while stream.readinto(piece):
            pass


def written_model(folder: Path, megabytes: int) -> Path:
    """Write a Llama of about as many bytes as a run directory and return it."""
    import torch

    from lmcore.conversion.native.write import write_lmcore
    from lmcore.conversion.state import ModelState
    from lmcore.model.shape import ModelShape

    hidden = 1024 if megabytes >= 100 else 64
    width = 11 * hidden // 4
    per_layer = 4 * (4 * hidden * hidden + 3 * hidden * width)
    layers = max(1, int(megabytes * 0.8e6) // per_layer)
    rows = max(128, int(megabytes * 0.1e6) // (4 * hidden))

    class Random(ModelState):
        format, path = "random", folder

        def dtype(self, _name: str, _kind: str = "weight") -> torch.dtype:
            return torch.float32

        def read(self, name: str, _kind: str = "weight") -> torch.Tensor:
            return torch.randn(self.parameters[name])

    state = Random()
    state.shape = ModelShape(
        *(layers, hidden, 16, width, 2048, rows),
        normalization="RMSNorm",
        swiglu=True,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        add_bias_linear=False,
    )
    write_lmcore(state, folder / "run", None)
    return folder / "run"


PEAK = """
import re, sys
from pathlib import Path
import torch
# Not the peak of `getrusage`, which a process inherits.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
"""

SAVE = """
sys.path.insert(0, sys.argv[3])
from checkpoint import model_like
from lmcore.checkpoint import load_checkpoint, save_checkpoint
save_checkpoint(Path(sys.argv[1]) / "small", 1, {"a": torch.ones(9)}, {}, model_shape={})
tensors = model_like(int(sys.argv[2]))
before = peak()
saved = save_checkpoint(Path(sys.argv[1]), 1, tensors, {}, model_shape={})
load_checkpoint(saved, tensors)
print(peak() - before, max(tensor.nbytes for tensor in tensors.values()))
"""

CONVERT = """
from lmcore.conversion.convert import convert
from lmcore.conversion.formats import read_state
torch.ones(1000, 1000).bfloat16()
before = peak()
state = read_state(Path(sys.argv[1]))
largest = max(torch.Size(shape).numel() * 4 for shape in state.parameters.values())
convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
print(peak() - before, largest)
"""


def memory(program: str, *arguments: object) -> str:
    """Run a program in a separate process; return the growth of its memory."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK + program, *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
    )
    grown, largest = map(int, done.stdout.split())
    return f"{grown / 1e6:.0f} MB beside a largest tensor of {largest / 1e6:.0f} MB"


def convert_all(
    folder: Path, megabytes: int, repeats: int
) -> tuple[dict[str, list[Timing]], float]:
    """Return the times of conversions, one a repeat, and the megabytes of the model."""
    from lmcore.conversion.convert import convert

    run = written_model(folder, megabytes)
    size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file()) / 1e6
    names = ("convert: lmcore to huggingface", "convert: huggingface to lmcore")
    timings: dict[str, list[Timing]] = {name: [] for name in names}
    for _ in range(repeats + 1):
        for path in (folder / "hf", folder / "back"):
            shutil.rmtree(path, ignore_errors=True)
        os.sync()
        drop_cache(run)
        timings[names[0]].append(seconds(lambda: convert(run, folder / "hf", "huggingface")))
        os.sync()
        drop_cache(folder / "hf")
        timings[names[1]].append(seconds(lambda: convert(folder / "hf", folder / "back", "lmcore")))
    for path in (folder / "hf", folder / "back"):
        shutil.rmtree(path, ignore_errors=True)
    if megabytes < 100:
        return {name: taken[1:] for name, taken in timings.items()}, size
    print(f"memory of {names[0]}: {memory(CONVERT, run, folder / 'hf', 'huggingface')}")
    print(f"memory of {names[1]}: {memory(CONVERT, folder / 'hf', folder / 'back', 'lmcore')}")
    here = Path(__file__).parent
    print(f"memory of a save and a load: {memory(SAVE, folder / 'saved', megabytes, here)}")
    shutil.rmtree(folder / "saved")
    return {name: taken[1:] for name, taken in timings.items()}, size


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
    for path in folder.rglob("*"):
        if path.is_dir():
            continue
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_cache(folder: Path) -> None:
    """Read the files in *folder*: a save may have passed the system's page cache."""
    for path in folder.iterdir():
        read_raw(path)


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
        "save: raw write + fsync": (folder / "raw", lambda: write_raw(tensors, folder / "raw")),
        "save: lmcore": (ours, lambda: save_checkpoint(ours, 1, tensors, {}, model_shape={})),
    }
    loads: dict[str, Action] = {
        "load: torch.load": lambda: torch.load(plain / "state.pt", weights_only=True),
        "load: dcp.load": lambda: dcp_load(targets, checkpoint_id=theirs, no_dist=True),
        "load: lmcore, unverified": lambda: load_checkpoint(checkpoint, targets, verify=False),
        "load: lmcore": lambda: load_checkpoint(checkpoint, targets),
        "verify: lmcore": lambda: verify_checkpoint(checkpoint),
        "load: raw read": lambda: read_raw(folder / "raw/raw"),
        "load: raw read, cold": lambda: read_raw(folder / "raw/raw"),
        "verify: lmcore, cold": lambda: verify_checkpoint(checkpoint),
        "load: lmcore, unverified, cold": lambda: load_checkpoint(
            checkpoint, targets, verify=False
        ),
        "load: lmcore, cold": lambda: load_checkpoint(checkpoint, targets),
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
                drop_cache(folder / "raw" if "raw" in name else checkpoint)
            else:
                for path in (theirs, plain, checkpoint, folder / "raw"):
                    fill_cache(path)
            timings[name].append(seconds(loads[name]))
    # The first round loads modules and warms the disk.
    return {name: taken[1:] for name, taken in timings.items()}


def rotated(names: list[str], by: int) -> list[str]:
    """Return *names* begun at another one each time: what runs first finds the disk idle."""
    start = by % len(names)
    return names[start:] + names[:start]


def report(timings: dict[str, list[Timing]], megabytes: float) -> None:
    """Print medians, spread, processor time and ratios."""
    print(f"{'':32}{'MB/s':>7}{'min':>7}{'max':>7}{'CPU s/GB':>10}  {'torch':>6} {'disk':>6}")
    walls = {name: [wall for wall, _ in pairs] for name, pairs in timings.items()}
    for name, taken in walls.items():
        saves = name.startswith("save")
        base = "save: dcp.save, 2 threads" if saves else "load: dcp.load"
        cold = ", cold" if name.endswith("cold") else ""
        disk = "save: raw write + fsync" if saves else f"load: raw read{cold}"
        middle = statistics.median(taken)
        used = statistics.median(used for _, used in timings[name]) / megabytes * 1000
        print(
            f"{name:32}{megabytes / middle:7.0f}{megabytes / max(taken):7.0f}"
            f"{megabytes / min(taken):7.0f}{used:10.2f}  "
            f"{statistics.median(walls[base]) / middle:5.2f}x "
            f"{statistics.median(walls[disk]) / middle:5.2f}x"
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
    from async_saves import report_saves

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    tensors = model_like(arguments.megabytes)
    megabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    print(f"{len(tensors)} tensors, {megabytes:.0f} MB, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        timings = measure(Path(folder), tensors, arguments.repeats)
        report(timings, megabytes)
        for path in Path(folder).iterdir():
            shutil.rmtree(path)
        threads = torch.get_num_threads()
        for num_threads in sorted({threads, max(1, threads - 1)}, reverse=True):
            report_saves(Path(folder, "run"), arguments.megabytes, arguments.repeats, num_threads)
        disk, read = (
            statistics.median(wall for wall, _ in timings[name])
            for name in ("save: raw write + fsync", "load: raw read, cold")
        )
        converted, size = convert_all(Path(folder), arguments.megabytes, arguments.repeats)
        for name, pairs in converted.items():
            middle = statistics.median(wall for wall, _ in pairs)
            ratio, both = ((one / megabytes * size / middle) for one in (disk, disk + read))
            print(
                f"{name:32}{size / middle:7.0f} MB/s, {ratio:.2f}x of the raw write, {both:.2f}x "
                "of a raw read and a raw write"
            )


if __name__ == "__main__":
    main()
