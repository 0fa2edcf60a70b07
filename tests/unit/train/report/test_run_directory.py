"""The run directory: whose it is, and files that are whole or absent."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.base.errors import ConfigError, RunError
from lmcore.config.load import load_config
from lmcore.train.report.run_directory import RunDirectory


def test_default_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `--save` it is `runs/<date>-<name>`, and a second one gets a number."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda text: "20260102-030405")
    runs = [RunDirectory.create(None, "tiny", load=None) for _ in range(3)]
    made = [run.path for run in runs]
    stem = "runs/20260102-030405-tiny"
    assert [str(path) for path in made] == [stem, f"{stem}-2", f"{stem}-3"]
    assert all((path / "checkpoints").is_dir() for path in made)
    for run in runs:
        run.release()
    assert not any(path.exists() for path in made)


@pytest.mark.parametrize(
    "line, name",
    [
        ("", "gpt"),
        ("--model-family bert", "bert"),
        ("--model-family BERT --task classification", "bert"),
        ("--normalization RMSNorm --swiglu --position-embedding-type rope", "llama"),
        ("--model-family bert --name mine", "mine"),
    ],
)
def test_the_name_is_the_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, name: str
) -> None:
    """Without `--name` the directory has the name of the model's family."""
    monkeypatch.chdir(tmp_path)
    plan: Any = SimpleNamespace(config=load_config(line.split()).config)
    runtime: Any = SimpleNamespace(rank=SimpleNamespace(rank=0), processes=None)
    with contextlib.ExitStack() as at_end:
        run = RunDirectory.of_run(plan, runtime, at_end)
        assert run.path.name.split("-")[2:] == [name]


def occupied(path: Path) -> Path:
    (path / "checkpoints/iter_0000005").mkdir(parents=True)
    return path


def test_another_runs_directory(tmp_path: Path) -> None:
    """A directory with checkpoints belongs to its run: the message says how to continue it."""
    path = occupied(tmp_path / "run")
    with pytest.raises(ConfigError, match="already contains another run") as caught:
        RunDirectory.create(str(path), "x", load=None)
    assert f"`lmcore train --continue {path}`" in str(caught.value.hint)
    other = occupied(tmp_path / "other")
    with pytest.raises(ConfigError):
        RunDirectory.create(str(path), "x", load=str(other))


def test_fine_tuning_into_the_runs_own_directory(tmp_path: Path) -> None:
    """The hint does not send the user back to the flags that were refused."""
    path = occupied(tmp_path / "run")
    with pytest.raises(ConfigError, match="already contains another run") as caught:
        RunDirectory.create(str(path), "x", load=None, finetune=True)
    assert "`--load" not in str(caught.value.hint)
    assert "new directory with `--save`" in str(caught.value.hint)


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("directory", "Is a directory"),
        ("named pipe", "named pipe"),
        ("link to nothing", "link to nothing"),
        ("link to itself", "Too many levels"),
        ("link to a device", "device"),
        ("without read permission", "Permission denied"),
    ],
)
def test_something_else_in_place_of_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, reason: str
) -> None:
    """It is refused at once with its path and the reason, and nothing is changed."""
    path = tmp_path / "run/run.lock"
    path.parent.mkdir()
    if kind == "directory":
        path.mkdir()
    elif kind == "named pipe":
        os.mkfifo(path)
    elif kind.startswith("link"):
        target = {"nothing": "absent", "itself": "run.lock", "a device": "/dev/zero"}
        path.symlink_to(target[kind.removeprefix("link to ")])
    else:
        path.write_text("x")
        real = os.open

        def refuse(name: object, *arguments: int) -> int:
            if str(name) == str(path):
                raise PermissionError(13, "Permission denied", name)
            return real(name, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", refuse)
    before = path.lstat()
    with pytest.raises(ConfigError, match="cannot be locked") as caught:
        RunDirectory.create(str(path.parent), "x", load=None)
    assert f"`{path}`" in str(caught.value.why)
    assert reason in str(caught.value.why)
    assert "remove `run.lock`" in str(caught.value.hint)
    after = path.lstat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert sorted(each.name for each in path.parent.iterdir()) == ["checkpoints", "run.lock"]


@pytest.mark.parametrize("text", ["", "garbage", '{"pid": 1}', '{"pid": Infinity}', "[" * 4096])
def test_a_lock_without_a_readable_owner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """It counts while it is fresh; afterwards it is taken over with a note, a link by itself."""
    monkeypatch.setattr("lmcore.base.lock._BEAT_SECONDS", 0.01)
    outside = tmp_path / "outside"
    outside.write_text(text)
    path = tmp_path / "run/run.lock"
    path.parent.mkdir()
    path.symlink_to(outside)
    with pytest.raises(ConfigError, match="another run writes to") as caught:
        RunDirectory.create(str(path.parent), "x", load=None)
    assert "free after 60 s" in str(caught.value.hint)
    os.utime(outside, (1e9, 1e9))
    run = RunDirectory.create(str(path.parent), "x", load=None)
    assert "silent" in caplog.text
    assert not path.is_symlink()
    run.release()
    assert outside.read_text() == text
    assert outside.stat().st_mtime == 1e9


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/iter_0000005"])
def test_going_on_in_place(tmp_path: Path, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may continue in its own directory, however `--load` names it."""
    path = occupied(tmp_path / "run")
    RunDirectory.create(str(path), "x", load=str(path / inside)).release()
    monkeypatch.chdir(tmp_path)
    RunDirectory.create("run/../run/", "x", load=str(Path("run") / inside)).release()


def test_empty_directory_is_taken(tmp_path: Path) -> None:
    """A directory without checkpoints is fine, whatever else is in it."""
    (tmp_path / "note.txt").write_text("mine")
    run = RunDirectory.create(str(tmp_path), "x", load=None)
    run.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "note.txt"]


def test_removed_if_empty(tmp_path: Path) -> None:
    """A run that never began leaves no directory; one that wrote anything keeps it."""
    run = RunDirectory.create(str(tmp_path / "a/b"), "x", load=None)
    run.release()
    assert not run.path.exists()
    run = RunDirectory.create(str(tmp_path / "a/b"), "x", load=None)
    run.write_text("config.yaml", "x")
    run.release()
    assert run.checkpoints.is_dir()


def test_removed_with_prepared_text(tmp_path: Path) -> None:
    """Text that a run prepared goes with its directory; text of an earlier run stays."""
    path = tmp_path / "run"
    first = RunDirectory.create(str(path), "x", load=None)
    first.data.mkdir()
    (first.data / "text.bin").write_bytes(b"x")
    assert first.lock
    first.lock.release()
    second = RunDirectory.create(str(path), "x", load=None)
    second.release()
    assert (path / "data/text.bin").exists()
    first.release()
    assert not path.exists()


def test_file_in_the_way(tmp_path: Path) -> None:
    """A path that cannot be a directory is named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be made") as caught:
        RunDirectory.create(str(tmp_path / "file/run"), "x", load=None)
    assert "Not a directory" in str(caught.value.why)
    assert "--save" in str(caught.value.hint)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").write_text("")
    with pytest.raises(RunError, match="cannot be written to"):
        RunDirectory.create(str(tmp_path / "run"), "x", load=None)


def test_write_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves the file from before, and no temporary one."""
    run = RunDirectory.create(str(tmp_path / "run"), "x", load=None)
    run.write_json("summary.json", {"status": "completed"})

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(RunError, match="cannot be written"):
            run.write_json("summary.json", {"status": "other"})
    assert json.loads((run.path / "summary.json").read_text()) == {"status": "completed"}
    run.release()
    assert {one.name for one in run.path.iterdir()} == {"checkpoints", "summary.json"}


def test_json_is_strict(tmp_path: Path) -> None:
    """NaN is no JSON and is never written."""
    run = RunDirectory.create(str(tmp_path / "run"), "x", load=None)
    with pytest.raises(ValueError, match="JSON"):
        run.write_json("summary.json", {"loss": float("nan")})
    assert not (run.path / "summary.json").exists()
    run.release()


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """A directory that a live run writes to is refused, its process named; then it is free."""
    first = RunDirectory.create(str(tmp_path / "run"), "x", load=None)
    for load in (None, str(tmp_path / "run")):
        with pytest.raises(ConfigError, match="another run writes to") as caught:
            RunDirectory.create(str(tmp_path / "run"), "x", load=load)
        assert f"process {os.getpid()} on " in str(caught.value.why)
        assert "`--save`" in str(caught.value.hint)
        assert "free after" not in str(caught.value.hint), "the process is on this machine"
    assert first.lock
    first.lock.path.write_text('{"machine": "m", "host": "node7", "pid": 12, "started": 1.0}')
    with pytest.raises(ConfigError) as caught:
        RunDirectory.create(str(tmp_path / "run"), "x", load=None)
    assert "process 12 on node7" in str(caught.value.why)
    assert "free after 60 s" in str(caught.value.hint)
    first.lock.path.unlink()
    first.release()
    RunDirectory.create(str(tmp_path / "run"), "x", load=None).release()
