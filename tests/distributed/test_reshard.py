"""A checkpoint of any layout is read in any other, and in its own the run continues bit for bit.

Each set of processes follows many orders; the tests look at what every rank had.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from layouts.cases import least, marked
from layouts.results import common_folder, once
from layouts.stored import load
from suite.selection import selected
from suite.warm import WarmPopen
from torch import Tensor

from lmcore.checkpoint import find_checkpoint, load_checkpoint, read_manifest, verify_checkpoint
from lmcore.plugin import discover, select
from lmcore.plugin.selection import HANDED_DOWN
from lmcore.runtime.launch.rank import RankInfo

WORKER = Path(__file__).with_name("reshard_worker.py")
LIMIT_SECONDS = 240
SAVE, LAST = 2, 3

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(400),  # the first test waits for all processes
]

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1 --train-iters 3 --global-batch-size 4"
TP = "--tensor-model-parallel-size 2"
PP = "--pipeline-model-parallel-size 2"
LLAMA = (
    "--normalization RMSNorm --swiglu --position-embedding-type rope --group-query-attention "
    "--num-query-groups 2 --no-add-bias-linear --untie-embeddings-and-output-weights"
)
LAYOUTS = {
    1: {"one": "", "llama-one": LLAMA},
    2: {
        "dp": "",
        "tp": TP,
        "tp-sp": f"{TP} --sequence-parallel --async-save",
        "cp": "--context-parallel-size 2",
        "pp": f"{PP} --async-save",
        "interleaved": f"{PP} --num-layers-per-virtual-pipeline-stage 1 --async-save",
        "zero1": "--zero-stage 1 --async-save",
        "zero2": "--use-distributed-optimizer --zero-stage 2 --async-save",
        "zero3": "--zero-stage 3 --async-save",
        "lamb": f"{TP} --optimizer lamb",
        "llama": f"{TP} {LLAMA}",
    },
    4: {
        "tp-zero2": f"{TP} --zero-stage 2",
        "tp-pp": f"{TP} {PP} --sequence-parallel",
        "hybrid": "--zero-stage 3 --data-parallel-replicas 2 --micro-batch-size 1",
        "pp-zero1": f"{PP} --zero-stage 1 --micro-batch-size 1",
    },
}
SIZES = {name: size for size, layouts in LAYOUTS.items() for name in layouts}
SOURCES = [name for name in SIZES if name not in {"lamb", "llama", "llama-one"}]
"""Layouts whose checkpoints any other may read: their optimizer is Adam, and their model GPT-2."""

PAIRS = [(source, layout) for source in SOURCES for layout in SOURCES if source != layout] + [
    ("llama", "llama-one"),
    ("llama-one", "llama"),
]
"""Writer and reader of a checkpoint: all pairs of layouts."""

ANEW = [("tp-sp", "dp"), ("zero3", "tp"), ("one", "tp"), ("zero3", "cp")]
"""Pairs (writer, reader) whose reader draws other random numbers than the checkpoint's."""
AS_BEFORE = [("dp", "zero3"), ("zero3", "zero1")]
"""Pairs whose reader continues with the checkpoint's random numbers, in another sharding."""
ALIKE = ["dp", "cp", "pp", "zero3", "tp-sp", "tp", "tp-zero2", "tp-pp"]
"""Ranks whose random numbers are compared."""

FAST = least(
    {pair: {("writes", pair[0]), ("reads", pair[1]), (SIZES[pair[0]], SIZES[pair[1]])}
     for pair in PAIRS},
    price=lambda pair: SIZES[pair[1]],
    chosen=ANEW + AS_BEFORE,
)  # fmt: skip
"""Pairs of the fast set.  Each layout writes in one, and reads in one; and each number of processes
reads from each.  A checkpoint has whole tensors: how they were cut is nothing to who reads them."""

CONTINUED = ["one", "tp", "tp-sp", "cp", "interleaved", "zero2", "zero3", "lamb", "tp-pp", "hybrid"]
"""Layouts that continue in the fast set, one of each axis at least, saving in both ways."""


def parameters(pairs: list[tuple[str, str]]) -> Any:
    """Return the mark that parametrizes a test by pairs; some are in the full set only."""
    return pytest.mark.parametrize("pair", marked(pairs, FAST), ids=map("-".join, pairs))


@dataclass(frozen=True)
class Ended:
    """End of a rank."""

    status: int
    errors: str


def start(
    orders: list[dict[str, Any]],
    size: int,
    out: Path,
    *,
    env: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> list[Ended]:
    """Run one set of processes to its end."""
    selection = select(discover(env={}), requested="cpu", env={})
    listed = out / "orders.json"
    listed.write_text(json.dumps(orders), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [
        WarmPopen(
            [sys.executable, str(WORKER), str(listed), str(out)],
            env={
                **{name: value for name, value in os.environ.items() if "LMCORE" not in name},
                **RankInfo(rank, rank, size, size).to_env(),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                HANDED_DOWN: selection.to_json(),
                "OMP_NUM_THREADS": "1",
                **env(rank),
            },
            stderr=PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        errors = [process.communicate(timeout=LIMIT_SECONDS)[1] for process in processes]
        return [
            Ended(process.returncode, text) for process, text in zip(processes, errors, strict=True)
        ]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


class Runs:
    """Results of all runs, by the names of their orders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def directory(self, layout: str) -> Path:
        """Return where a layout saves."""
        return self.folder / f"run-{layout}"

    def train(self, layout: str) -> dict[str, Any]:
        """Return the order to train in a layout and save on the way."""
        size = SIZES[layout]
        flags = f"{DROPOUT} {LAYOUTS[size][layout]}"
        folder = str(self.directory(layout) / "checkpoints")
        return {"name": layout, "flags": flags, "save": SAVE, "folder": folder, "last": LAST}

    def load(self, source: str, layout: str, last: int = SAVE, more: str = "") -> dict[str, Any]:
        """Return the order to read another layout's checkpoint."""
        order = self.train(layout)
        order["flags"] += f" --load {self.directory(source)} {more}"
        return order | {"name": f"{source}-in-{layout}{last}", "save": None, "last": last}

    def follow(self, orders: list[dict[str, Any]], size: int) -> None:
        """Run a set of processes, which must succeed, if there is anything for it to do."""
        if not orders:
            return
        for rank, ended in enumerate(start(orders, size, self.folder)):
            assert ended.status == 0, f"rank {rank}: {ended.errors}"

    def ranks(self, name: str) -> list[dict[str, Any]]:
        """Return what each rank had."""
        files = sorted(self.folder.glob(f"{name}.?.found"))
        assert files
        return [load(file) for file in files]

    def whole(self, name: str, key: str) -> dict[str, Tensor]:
        """Return whole tensors from the ranks' parts; replicas are equal bit for bit."""
        found: dict[str, Tensor] = {}
        there: dict[str, Tensor] = {}
        for part in self.ranks(name):
            for tensor, shape, offset, values in part[key]:
                if tensor not in found:
                    found[tensor] = torch.zeros(shape, dtype=values.dtype)
                    there[tensor] = torch.zeros(shape, dtype=torch.bool)
                box = tuple(slice(at, at + n) for at, n in zip(offset, values.shape, strict=True))
                known = there[tensor][box]
                assert torch.equal(found[tensor][box][known], values[known]), tensor
                found[tensor][box], there[tensor][box] = values, torch.tensor(data=True)
        assert all(bool(known.all()) for known in there.values())
        return found


def selected_pairs(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """Return who reads whose checkpoint in selected tests."""
    return list(dict.fromkeys([*map(tuple, selected(request, "pair")), *AS_BEFORE]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    """Runs, with checkpoints, of all layouts that selected tests need."""
    runs = Runs(common_folder(tmp_path_factory, "reshard"))
    needed = {*itertools.chain(*selected_pairs(request)), *ALIKE}
    needed |= {str(one) for name in ("saved", "continued") for one in selected(request, name)}
    with once(runs.folder) as missing:
        if missing:
            for size, layouts in LAYOUTS.items():
                runs.follow([runs.train(name) for name in layouts if name in needed], size)
    return runs


@pytest.fixture(scope="module")
def read(runs: Runs, request: pytest.FixtureRequest) -> Runs:
    """Runs with checkpoints, and runs resumed from a checkpoint of the same or another layout."""
    again = list(map(str, selected(request, "continued")))
    with once(runs.folder / "read") as missing:
        if missing:
            for size, layouts in LAYOUTS.items():
                orders = [runs.load(name, name, LAST) for name in again if name in layouts]
                pairs = [pair for pair in selected_pairs(request) if pair[1] in layouts]
                runs.follow(orders + [runs.load(*pair) for pair in pairs], size)
    return runs


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Compare bit for bit."""
    assert found.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not different


@pytest.mark.parametrize("saved", list(SIZES))
def test_what_is_saved(runs: Runs, saved: str) -> None:
    """The files hold whole tensors, each piece once, and the random states of every rank."""
    checkpoint = find_checkpoint(runs.directory(saved))
    assert checkpoint.name == f"iter_{SAVE:07d}"
    assert verify_checkpoint(checkpoint) == []
    manifest = read_manifest(checkpoint)
    tensors = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for name, entry in manifest.tensors.items()
    }
    load_checkpoint(checkpoint, tensors)
    states = {name: tensors.pop(name) for name in list(tensors) if name.startswith("rng.")}
    assert_same(tensors, runs.whole(saved, "saved"))
    wanted = {name: one for part in runs.ranks(saved) for name, one in part["random"].items()}
    assert_same(states, wanted)
    held = sum(one.nbytes for one in {**tensors, **states}.values())
    stored = sum(entry.size for name, entry in manifest.files.items() if name != ".metadata")
    pieces = 1300 * SIZES[saved] * len(manifest.tensors)
    assert held < stored < held + 2 * pieces
    writers = {name[2] for name in manifest.files if name.endswith(".distcp")}
    assert len(writers) == SIZES[saved]


@pytest.mark.parametrize("continued", marked(SIZES, CONTINUED))
def test_the_same_layout_goes_on(read: Runs, continued: str) -> None:
    """With dropout, losses, weights and optimizer state match an uninterrupted run."""
    whole, again = read.ranks(continued), read.ranks(f"{continued}-in-{continued}{LAST}")
    assert [part["losses"] for part in again] == [part["losses"][SAVE:] for part in whole]
    name = f"{continued}-in-{continued}{LAST}"
    assert_same(read.whole(name, "last"), read.whole(continued, "last"))
    for one, other in zip(again, whole, strict=True):
        assert_same(one["random"], other["random"])


@parameters(PAIRS)
def test_any_layout_reads_any_other(read: Runs, pair: tuple[str, str]) -> None:
    """Weights and optimizer state come back bit for bit, wherever they lie now."""
    source, layout = pair
    name = f"{source}-in-{layout}{SAVE}"
    assert_same(read.whole(name, "loaded"), read.whole(source, "saved"))


def drawn(runs: Runs, name: str, kind: str = "own") -> list[Tensor]:
    return [part["drawn"][kind] for part in runs.ranks(name) if kind in part["drawn"]]


def equal(draws: list[Tensor]) -> list[list[bool]]:
    return [[torch.equal(one, other) for other in draws] for one in draws]


def test_who_draws_alike(runs: Runs) -> None:
    """Only processes that hold the same activations do; parts of a layer have their own stream."""
    apart = [[True, False], [False, True]]
    for name in ("dp", "cp", "pp", "zero3", "tp-sp"):
        assert equal(drawn(runs, name)) == apart
        assert not drawn(runs, name, "parts")
    assert equal(drawn(runs, "tp")) == [[True, True], [True, True]]
    assert equal(drawn(runs, "tp", "parts")) == apart
    pairs = equal(drawn(runs, "tp-zero2"))
    assert pairs == [[one // 2 == other // 2 for other in range(4)] for one in range(4)]
    every = [*drawn(runs, "tp-zero2", "parts"), *drawn(runs, "tp-zero2")[::2]]
    each = [[one == other for other in range(6)] for one in range(6)]
    assert equal(every) == each
    assert equal(drawn(runs, "tp-pp")) == [row[:4] for row in each[:4]]


@parameters(ANEW)
def test_another_layout_draws_other_numbers(read: Runs, pair: tuple[str, str]) -> None:
    """Random numbers are neither the checkpoint's nor the first step's; they differ by rank."""
    source, layout = pair
    name = f"{source}-in-{layout}{SAVE}"
    now, first = drawn(read, name), drawn(read, layout)
    assert equal(now) == equal(first)
    for one in now:
        assert not any(torch.equal(one, other) for other in [*first, *drawn(read, source)])


def test_sharding_does_not_matter_to_random_numbers(read: Runs) -> None:
    """Processes that see the same samples continue with theirs, however state is sharded."""
    for source, layout in AS_BEFORE:
        assert equal(drawn(read, f"{source}-in-{layout}{SAVE}")) == [[True, False], [False, True]]
        both = zip(read.ranks(f"{source}-in-{layout}{SAVE}"), read.ranks(source), strict=True)
        for now, then in both:
            assert_same(now["random"], then["random"])


@pytest.fixture
def faulty(tmp_path: Path) -> Callable[..., tuple[list[Ended], Path]]:
    """Saves twice; the second time something happens to one rank."""

    def go(kind: str, rank: int, flags: str, **more: str) -> tuple[list[Ended], Path]:
        folder = tmp_path / "run/checkpoints"
        common = {"flags": f"{DROPOUT} {flags}", "folder": str(folder)}
        orders = [
            {"name": "first", "save": 1, "last": 1, **common},
            {"name": "second", "save": 2, "last": 3, **common},
        ]
        fault = {"FAULT": kind}
        ended = start(orders, 2, tmp_path, env=lambda one: more | (fault if one == rank else {}))
        return ended, folder

    return go


@pytest.mark.parametrize("rank, more", [(0, "--async-save"), (1, "")])
def test_a_full_disk(faulty: Any, rank: int, more: str) -> None:
    """One rank has no space left: all say so, nothing half is left, the earlier one stays."""
    ended, folder = faulty("full", rank, f"{TP} {more}")
    assert [one.status for one in ended] == [1, 1]
    what = f"could not save the checkpoint of iteration 2 in `{folder}`"
    assert f"error: {what}\nwhy: No space left on device" in ended[rank].errors
    other = ended[1 - rank].errors
    assert f"rank {rank}" in other
    assert what in other
    assert "No space left on device" in other
    assert sorted(path.name for path in folder.iterdir()) == [
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    ]
    assert verify_checkpoint(folder / "iter_0000001") == []


def test_a_rank_killed_in_a_save(faulty: Any) -> None:
    """The other ranks end after their timeout, name the lost rank, and keep the checkpoint."""
    ended, folder = faulty("kill", 1, TP, TIMEOUT="2")
    assert [one.status for one in ended] == [1, -signal.SIGKILL]
    assert "rank 1 did not answer within 2 s" in ended[0].errors
    assert "waited for the checkpoint of iteration 2" in ended[0].errors
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["iter_0000001"]
    assert verify_checkpoint(folder / "iter_0000001") == []


def test_rank_0_killed_in_a_save(faulty: Any) -> None:
    """The other ranks learn that it has gone; its partial directory is hidden, no checkpoint."""
    ended, folder = faulty("kill", 0, "--zero-stage 1")
    assert [one.status for one in ended] == [-signal.SIGKILL, 1]
    assert "the connection to rank 0 is lost" in ended[1].errors
    assert find_checkpoint(folder) == folder / "iter_0000001"
    (left,) = (path.name for path in folder.iterdir() if path.is_dir() and path.name[0] == ".")
    assert left.startswith(".iter_0000002.tmp-")


def test_processes_that_see_different_checkpoints(tmp_path: Path) -> None:
    """`--load` on directories that are not the same ends all ranks, which say what they see."""
    orders = []
    for name, seed in (("a", 1), ("b", 2)):
        folder, flags = str(tmp_path / name / "checkpoints"), f"{DROPOUT} --seed {seed}"
        orders.append({"name": name, "flags": flags, "save": 1, "last": 1, "folder": folder})
    for ended in start(orders, 1, tmp_path):
        assert ended.status == 0, ended.errors
    load = {"name": "load", "save": None, "last": 1, "folder": ""}
    seen = [load | {"flags": f"{DROPOUT} --load {tmp_path / name}"} for name in ("a", "b")]
    ended = start([], 2, tmp_path, env=lambda rank: {"ORDERS": json.dumps([seen[rank]])})
    for one in ended:
        assert one.status == 1
        assert "the processes of this run differ in the checkpoint that they load" in one.errors
        assert "rank 0: `iter_0000001`, save number 1" in one.errors
        assert "rank 1: `iter_0000001`, save number 1" in one.errors
