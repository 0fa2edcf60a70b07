"""Tests of saving: what is written, what a kill or a full disk leaves, what is kept."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import signal
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmcore.base.durable import process_token
from lmcore.base.errors import CheckpointError, RunError
from lmcore.checkpoint import (
    find_checkpoint,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    verify_checkpoint,
)
from lmcore.checkpoint import save as save_module
from lmcore.checkpoint import write_plan as share
from lmcore.checkpoint.dcp_writer import write_chunks
from lmcore.checkpoint.files import synced_file
from lmcore.checkpoint.manifest import TensorEntry

SHAPE = {"hidden_size": 8}
SMALL = {"weight": torch.arange(8.0)}


def save(directory: Path, iteration: int, value: float = 0.0, **options: int) -> Path:
    return save_checkpoint(
        directory, iteration, {"weight": torch.full((8,), value)}, {}, model_shape=SHAPE, **options
    )


def value_in(checkpoint: Path) -> float:
    target = {"weight": torch.empty(8)}
    load_checkpoint(checkpoint, target)
    return target["weight"][0].item()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_names_and_latest(tmp_path: Path):
    """A save makes `iter_XXXXXXX` and states its iteration in the text file, and nothing else."""
    path = save(tmp_path / "run" / "checkpoints", 1200)
    assert path == tmp_path / "run" / "checkpoints" / "iter_0001200"
    assert names(path.parent) == ["iter_0001200", "latest_checkpointed_iteration.txt"]
    assert (path.parent / "latest_checkpointed_iteration.txt").read_text() == "1200\n"
    assert names(path) == [".metadata", "__0_0.distcp", "manifest.json"]


def test_same_state_same_bytes(tmp_path: Path):
    """Two saves of one state are the same files, byte for byte."""
    first, second = save(tmp_path / "a", 5), save(tmp_path / "b", 5)
    for name in names(first):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


@pytest.mark.parametrize("num_threads", [1, 2])
def test_torch_computes_no_checksums(tmp_path: Path, num_threads: int):
    """The manifest has one of each file; saves of the user's own keep torch's."""
    tensors = [torch.arange(9.0), torch.ones(5)]
    write_chunks(tmp_path, tensors, rank=0, num_threads=num_threads)
    torch.save(tensors[0], tmp_path / "own.pt")

    def checksum(file: Path) -> int:
        with zipfile.ZipFile(file) as archive:
            (record,) = (one for one in archive.infolist() if one.filename.endswith("data/0"))
        return record.CRC

    content = tensors[0].numpy().tobytes()
    assert checksum(tmp_path / "own.pt") == zlib.crc32(content)
    assert checksum(tmp_path / "__0_0.distcp") == 0


def test_large_tensors_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tensors that are cut into pieces are saved whole by a process that shares with no other."""
    monkeypatch.setattr(share, "_LARGEST_BYTES", 4000)
    whole = torch.randn(101, 30)
    path = save_checkpoint(tmp_path, 1, {"w": whole, "step": torch.tensor(3)}, {}, model_shape={})
    target = {"w": torch.zeros(101, 30), "step": torch.tensor(0)}
    load_checkpoint(path, target)
    assert torch.equal(target["w"], whole)
    assert target["step"] == 3


def test_large_state_uses_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A state above the limit per thread is spread over files of similar size, losing nothing."""
    monkeypatch.setattr(save_module, "_BYTES_PER_THREAD", 4096)
    monkeypatch.setattr(save_module, "num_io_threads", lambda limit: min(limit, 3))
    state = {f"w{number}": torch.randn(40, 50) for number in range(9)}
    path = save_checkpoint(tmp_path, 1, state, {}, model_shape={})
    files = read_manifest(path).files
    sizes = [entry.size for name, entry in files.items() if name != ".metadata"]
    assert len(sizes) == 3
    assert max(sizes) < 1.1 * min(sizes)
    restored = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load_checkpoint(path, restored)
    assert all(torch.equal(restored[name], state[name]) for name in state)


def test_view_does_not_write_its_storage(tmp_path: Path):
    """A small view of a large tensor costs the view's bytes, not the storage's."""
    view = torch.zeros(1_000_000)[10:20]
    path = save_checkpoint(tmp_path, 1, {"view": view}, {}, model_shape={})
    assert sum(file.size for file in read_manifest(path).files.values()) < 10_000


def test_same_iteration_is_replaced(tmp_path: Path):
    """A run that comes past an iteration again replaces that checkpoint."""
    save(tmp_path, 10, 1.0)
    path = save(tmp_path, 10, 2.0)
    assert value_in(path) == 2.0
    assert names(tmp_path) == ["iter_0000010", "latest_checkpointed_iteration.txt"]


def test_foreign_directory_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A directory of that name that is not a checkpoint of ours is moved, not lost."""
    foreign = tmp_path / "iter_0000010"
    foreign.mkdir()
    (foreign / "precious").write_text("keep me")
    with caplog.at_level(logging.WARNING):
        path = save(tmp_path, 10, 3.0)
    assert value_in(path) == 3.0
    assert (tmp_path / "iter_0000010.aside-1" / "precious").read_text() == "keep me"
    assert "iter_0000010.aside-1" in caplog.text


def test_a_damaged_checkpoint_of_the_same_name_is_called_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """It keeps its place until its name is needed; then it is kept under another name."""
    damaged = save(tmp_path, 10)
    manifest = damaged / "manifest.json"
    manifest.write_text(manifest.read_text()[:100])
    save(tmp_path, 5)
    assert "aside" not in caplog.text
    assert manifest.exists()
    save(tmp_path, 10, value=3.0)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"`{manifest}` is damaged; `iter_0000010` is now `iter_0000010.aside-1`" in warning
    assert "not a checkpoint of lmcore" not in warning
    assert value_in(damaged) == 3.0
    assert len((tmp_path / "iter_0000010.aside-1/manifest.json").read_text()) == 100


def test_checkpoints_by_time_are_deleted_first(tmp_path: Path):
    """With `keep_last` they neither displace those by steps nor exceed the number."""

    def put(iteration: int, *, timed: bool) -> list[str]:
        save_checkpoint(
            tmp_path, iteration, SMALL, {"timed": timed}, model_shape=SHAPE, keep_last=3
        )
        return [name.lstrip("iter_0") for name in names(tmp_path) if name.startswith("iter_")]

    assert put(1, timed=True) == ["1"]
    assert put(2, timed=False) == ["1", "2"]
    assert put(3, timed=True) == ["1", "2", "3"]
    assert put(4, timed=False) == ["2", "3", "4"]
    assert put(5, timed=True) == ["2", "4", "5"]
    assert put(6, timed=False) == ["2", "4", "6"]
    assert put(7, timed=True) == ["4", "6", "7"]


@pytest.mark.parametrize("keep_last", [1, 2, None])
def test_the_best_and_multiples_are_kept_besides(tmp_path: Path, keep_last: int | None):
    """Neither counts: they stay until a better one, and for good."""

    def put(iteration: int, *, best: bool = False) -> set[int]:
        timed = iteration % 4 != 0
        meta = {"timed": timed} | ({"best": True} if best else {})
        save_checkpoint(
            tmp_path,
            iteration,
            SMALL,
            meta,
            model_shape=SHAPE,
            keep_last=keep_last,
            keep_every=8,
        )
        return {int(name[5:]) for name in names(tmp_path) if name.startswith("iter_")}

    put(2, best=True)
    put(3, best=True)
    for step in range(4, 17):
        found = put(step)
    by_steps = {1: {16}, 2: {12, 16}, None: {4, 12, 16, 15}}[keep_last]
    assert found == by_steps | {3, 8, 16}
    assert 3 not in put(17, best=True)
    assert put(18) >= {17, 8, 16}


def test_keep_last_deletes_the_oldest_saves(tmp_path: Path):
    """`keep_last` leaves the newest N checkpoints and everything that is not a checkpoint."""
    foreign = tmp_path / "iter_0000001"
    foreign.mkdir()
    (foreign / "model.pt").write_text("of another program")
    (tmp_path / "notes.txt").write_text("mine")
    for iteration in (2, 3, 4):
        save(tmp_path, iteration)
    save(tmp_path, 5, keep_last=2)
    assert names(tmp_path) == [
        "iter_0000001",
        "iter_0000004",
        "iter_0000005",
        "latest_checkpointed_iteration.txt",
        "notes.txt",
    ]
    assert names(foreign) == ["model.pt"]


def test_keep_last_goes_by_save_order(tmp_path: Path):
    """After a return to an older checkpoint the new save survives, whatever its number."""
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    path = save(tmp_path, 15, keep_last=1)
    assert names(tmp_path) == ["iter_0000015", "latest_checkpointed_iteration.txt"]
    assert find_checkpoint(tmp_path) == path


def save_by_time(directory: Path, iteration: int, **options: int) -> Path:
    meta = {save_module.TIMED: True}
    return save_checkpoint(directory, iteration, SMALL, meta, model_shape=SHAPE, **options)


def iterations(directory: Path) -> list[int]:
    return [int(name[5:]) for name in names(directory) if name.startswith("iter_")]


def test_checkpoints_by_time(tmp_path: Path):
    """Of those by time only one of the newest two saves stays; all others stay."""
    found = []
    for iteration in range(1, 8):
        (save if iteration in {3, 7} else save_by_time)(tmp_path, iteration)
        found.append(iterations(tmp_path))
    assert found == [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [3, 5, 6], [3, 6, 7]]


def test_obsolete_checkpoints_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """On a disk with room for two, the older of two is deleted first, never the newest intact."""
    room = 2
    usage = shutil.disk_usage(tmp_path)
    size = save_module._needed_bytes({"weight": TensorEntry("float32", (8,))})

    def disk_usage(path: Path) -> object:
        return usage._replace(free=(room - len(iterations(tmp_path))) * size)

    monkeypatch.setattr(save_module.shutil, "disk_usage", disk_usage)
    for iteration in (1, 2, 3):
        save_by_time(tmp_path, iteration)
    assert iterations(tmp_path) == [2, 3]
    assert f"deleted {tmp_path / 'iter_0000001'} before this save" in caplog.text
    save(tmp_path, 4, keep_last=1)
    assert iterations(tmp_path) == [4]
    room = 1
    with pytest.raises(CheckpointError, match="could not save"):
        save(tmp_path, 5, keep_last=1)
    assert iterations(tmp_path) == [4]
    room = 2
    save_by_time(tmp_path, 5)
    with pytest.raises(CheckpointError, match="could not save"):
        save(tmp_path, 6, keep_last=1, damaged=[tmp_path / "iter_0000005"])
    assert iterations(tmp_path) == [4, 5]


@pytest.mark.parametrize(
    "arguments",
    [
        {"iteration": -1},
        {"keep_last": 0},
        {"meta": {"loss": float("nan")}},
        {"meta": {"x": {1}}},
        {"meta": {"x": [{1: 2}]}},
    ],
)
def test_wrong_arguments_write_nothing(tmp_path: Path, arguments: dict[str, object]):
    """Arguments that cannot be saved are refused before the directory is touched."""
    full = {"iteration": 1, "meta": {}, "model_shape": {}, "tensors": SMALL, **arguments}
    with pytest.raises((ValueError, TypeError)):
        save_checkpoint(tmp_path / "checkpoints", **full)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("tensor", [torch.zeros(2, device="meta"), torch.eye(2).to_sparse()])
def test_tensor_without_plain_values_is_refused(tmp_path: Path, tensor: torch.Tensor):
    """A tensor without values, or of a sparse layout, is refused by name."""
    with pytest.raises(TypeError, match="odd"):
        save_checkpoint(tmp_path, 1, {"odd": tensor}, {}, model_shape={})


# Forks a child for every case, so that torch is imported once; each child saves, then is killed
# in the middle of its second save.  Prints the exit status of each child.
KILLED_SAVES = """
import json, os, signal, sys
from pathlib import Path
import torch
from lmcore.checkpoint import dcp_writer, save, save_checkpoint
from lmcore.checkpoint.files import synced_file

def die_at_call(module, name, number):
    original, calls = getattr(module, name), []
    def counted(*args, **kwargs):
        calls.append(name)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(module, name, counted)

POINTS = {
    "first_piece": (synced_file.SyncedFile, "_write_piece", 1),
    "middle": (synced_file.SyncedFile, "_write_piece", 4),
    "before_sync": (synced_file.SyncedFile, "close", 1),
    "before_manifest": (save, "encode_manifest", 2),
    "before_publish": (save, "_publish", 1),
    "before_rename": (Path, "rename", 1),
    "between_renames": (Path, "rename", 2),
    "before_latest": (save, "write_atomically", 1),
    "before_delete": (save, "_delete", 1),
    "while_deleting": (save.shutil, "rmtree", 2),
}

def save_state(directory, iteration, value, **options):
    weights = {name: torch.full((3000,), value) for name in ("a", "b", "c")}
    save_checkpoint(directory, iteration, weights, {}, model_shape={}, **options)

def child(directory, point, iteration):
    save_state(directory, 10, 1.0)
    die_at_call(*POINTS[point])
    save_state(directory, iteration, 2.0, keep_last=1)

statuses = {}
for case in json.loads(sys.argv[2]):
    process = os.fork()
    if not process:
        child(Path(sys.argv[1]) / case, *case.split("-")[:1], int(case.split("-")[1]))
        os._exit(0)
    statuses[case] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
print(json.dumps(statuses))
"""
ANYWHERE = ["first_piece", "middle", "before_sync", "before_manifest", "before_publish"]
RENAMING = ["before_rename", "before_latest", "before_delete"]
# Another iteration also deletes the older checkpoint; the same one is moved away, then replaced.
KILL_CASES = [f"{point}-20" for point in [*ANYWHERE, *RENAMING, "while_deleting"]] + [
    f"{point}-10" for point in [*ANYWHERE, *RENAMING, "between_renames"]
]
NEW_IS_COMPLETE = {"before_latest", "before_delete", "while_deleting"}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, run_python: Callable) -> Path:
    """The directories that saves left which were killed, one for each of `KILL_CASES`."""
    folder = tmp_path_factory.mktemp("killed")
    result = run_python(KILLED_SAVES, folder, json.dumps(KILL_CASES))
    assert result.returncode == 0, result.stderr
    statuses = json.loads(result.stdout)
    assert statuses == dict.fromkeys(KILL_CASES, -signal.SIGKILL), result.stderr
    return folder


@pytest.mark.parametrize("case", KILL_CASES)
def test_kill_leaves_old_or_new(killed: Path, tmp_path: Path, case: str):
    """A save killed at any point leaves the old or the new state, and the next save cleans up."""
    directory = tmp_path / "checkpoints"
    shutil.copytree(killed / case, directory)
    found = find_checkpoint(directory)
    assert verify_checkpoint(found) == []
    state = {name: torch.zeros(3000) for name in ("a", "b", "c")}
    load_checkpoint(found, state)
    expected = 2.0 if case.split("-", maxsplit=1)[0] in NEW_IS_COMPLETE else 1.0
    assert all((tensor == expected).all() for tensor in state.values())

    save(directory, 30, keep_last=1)
    assert names(directory) == ["iter_0000030", "latest_checkpointed_iteration.txt"]


def test_restored_when_replacement_was_killed(killed: Path, tmp_path: Path):
    """A checkpoint that a killed replacement had moved away gets its name back at the next save."""
    directory = tmp_path / "checkpoints"
    shutil.copytree(killed / "between_renames-10", directory)
    assert not (directory / "iter_0000010").exists()
    assert find_checkpoint(directory).name.startswith(".iter_0000010.replaced-")
    save(directory, 30)
    assert verify_checkpoint(directory / "iter_0000010") == []


def test_live_process_keeps_its_temporary(tmp_path: Path):
    """The temporary directory of a process that still runs is left alone."""
    place, _, random = process_token().split("-")
    other = tmp_path / f".iter_0000007.tmp-{place}-{os.getppid()}-{random}"
    other.mkdir()
    save(tmp_path, 8)
    assert other.is_dir()


@pytest.mark.parametrize("token", [f"00000000-{2**22 + 1}-12345678", f"{2**22 + 1}"])
def test_another_container_keeps_its_temporary(tmp_path: Path, token: str):
    """Process ids of another container say nothing here; after an hour its files are abandoned."""
    other = tmp_path / f".iter_0000007.tmp-{token}"
    note = tmp_path / f".latest_checkpointed_iteration.txt.tmp-{token}"
    other.mkdir()
    (other / "__0_0.distcp").write_bytes(b"x")
    note.touch()
    save(tmp_path, 8)
    assert other.is_dir()
    assert note.exists()
    for path in (other, note):
        os.utime(path, (0, 0))
    save(tmp_path, 9)
    assert other.is_dir(), "a file inside is new"
    assert not note.exists()
    os.utime(other / "__0_0.distcp", (0, 0))
    save(tmp_path, 10)
    assert not other.exists()


def test_links_in_the_place_of_checkpoints(tmp_path: Path):
    """A link goes with `keep_last`, and a hidden link that is left; the targets stay."""
    elsewhere = save(tmp_path / "elsewhere", 5)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "iter_0000005").symlink_to(elsewhere)
    place, _, random = process_token().split("-")
    dangling = folder / f".iter_0000004.deleted-{place}-{2**22 + 1}-{random}"
    dangling.symlink_to(tmp_path / "absent")
    save(folder, 6, keep_last=1)
    assert names(folder) == ["iter_0000006", "latest_checkpointed_iteration.txt"]
    assert verify_checkpoint(elsewhere) == []


LIMITED_SAVE = """
import resource, signal, sys
from pathlib import Path
import torch
from lmcore.checkpoint import save_checkpoint
from lmcore.base.errors import CheckpointError, RunError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
weights = {f"w{number}": torch.ones(50_000) for number in range(8)}
for limit in map(int, sys.argv[2:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save_checkpoint(Path(sys.argv[1]), 20, weights, {}, model_shape={})
    except CheckpointError as error:
        print(error.render())
"""


def test_write_limit_of_the_system(tmp_path: Path, run_python: Callable):
    """A write that the system refuses is reported, and the earlier checkpoint stays."""
    earlier = save(tmp_path, 10, 1.0)
    result = run_python(LIMITED_SAVE, tmp_path, 100, 50_000, 1_000_000)
    assert result.returncode == 0, result.stderr
    what = f"error: could not save the checkpoint of iteration 20 in `{tmp_path}`\n"
    assert result.stdout.count(what + "why: File too large: it needs 1,6") == 3
    assert result.stdout.count("hint: raise the limit (`ulimit -f`") == 3
    assert names(tmp_path) == ["iter_0000010", "latest_checkpointed_iteration.txt"]
    assert find_checkpoint(tmp_path) == earlier
    assert value_in(earlier) == 1.0


class FullDisk:
    """Replacement of the raw file that takes *room* bytes, then has no space left."""

    def __init__(self, room: int) -> None:
        self.room = room

    def take(self, piece: memoryview) -> None:
        self.room -= len(piece)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("room", [0, 1000, 30_000])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, num_threads: int):
    """No space in any thread of a save ends it with what is needed and what is free.

    As the test's disk has more free bytes than that, its inodes or a quota have to be used up.
    """
    earlier = save(tmp_path, 10, 1.0)
    disk = FullDisk(room)
    monkeypatch.setattr(
        synced_file.SyncedFile, "_write_piece", lambda _stream, piece: disk.take(piece)
    )
    monkeypatch.setattr(save_module, "_num_threads", lambda size, at_most: num_threads)
    state = {f"w{number}": torch.ones(3000) for number in range(6)}
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, 20, state, {}, model_shape={})
    assert "No space left on device: it needs " in caught.value.why
    assert "are free there; so its inodes or a quota are used up" in caught.value.why
    assert "df -i" in caught.value.hint
    assert names(tmp_path) == ["iter_0000010", "latest_checkpointed_iteration.txt"]
    assert value_in(earlier) == 1.0


def test_no_space_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A disk that is too small is refused with both numbers before a byte is written."""
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000)
    monkeypatch.setattr(save_module.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(save_module._Save, "write", pytest.fail)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, 1, {"w": torch.zeros(982_500)}, {}, model_shape={})
    why = str(caught.value.why)
    assert re.search(r"it needs 3,9[0-9]{2},[0-9]{3} bytes, 1,000 are free there$", why)
    assert "--keep-last" in str(caught.value.hint)


def test_failure_of_the_background_write_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A failure that only the thread of the blocks met fails the save."""

    def fail(_descriptor: int, _content: memoryview) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(synced_file.os, "write", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save_checkpoint(tmp_path, 1, {"w": torch.ones(1_100_000)}, {}, model_shape={})
    assert names(tmp_path) == []


def test_unwritable_directory(tmp_path: Path):
    """A path that cannot hold checkpoints is named, with the system's reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not save") as caught:
        save(tmp_path / "file" / "checkpoints", 1)
    assert "Not a directory" in caught.value.why


def test_interrupt_removes_the_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An interrupted save leaves nothing behind."""

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(save_module, "sync_directory", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    assert names(tmp_path) == []


def test_no_process_group(tmp_path: Path):
    """Saving and loading need no process group and leave none behind."""
    value_in(save(tmp_path, 1))
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("sent", ["../elsewhere", "/etc", "..", "a/b", ""])
def test_a_path_from_another_rank_is_not_used(tmp_path: Path, sent: str):
    """Rank 0 sends the name of the directory to write; a path that leads elsewhere is refused."""

    class Answered:
        rank, world_size = 1, 2

        def exchange(self, work, combine, about, *, undo):
            work()
            return sent

    (tmp_path / "elsewhere").mkdir()
    plan = share.WritePlan({"weight": ("weight", None)}, {}, [])
    with pytest.raises(RunError, match="another rank sent"):
        save_checkpoint(
            tmp_path / "checkpoints",
            1,
            dict(SMALL),
            {},
            model_shape=SHAPE,
            plan=plan,
            channel=Answered(),
        )
    assert not list((tmp_path / "elsewhere").iterdir())
