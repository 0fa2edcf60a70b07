"""Tests of reading small files whose author is not known, and of what reads them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lmcore.base.bounded_file import UnreadableFileError, read_bounded_file
from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.base.lock import LockOwner
from lmcore.checkpoint import read_manifest
from lmcore.config.file.yaml_file import read_file
from lmcore.config.foreign.engine_file import read_engine_file
from lmcore.data.blend.file_list import read_small_text
from lmcore.data.indexed.idx_reader import read_index
from lmcore.data.indexed.metadata import read_metadata
from lmcore.data.prepare.lazy_text import LazyText
from lmcore.data.tokenizer.file_tokenizer import read_bounded
from lmcore.data.tokenizer.saved import load_tokenizer
from lmcore.runtime.launch.worker_protocol import complete_summary
from lmcore.train.report.metrics import MetricsFile
from lmcore.train.resume.ended import finished_summary
from lmcore.train.resume.validation_history import ValidationHistory


def read_yaml(path: Path) -> None:
    """Read a file of settings, and raise its problems."""
    problems: list[LmcoreError] = []
    read_file(str(path), problems)
    if problems:
        raise ConfigError.collect(problems)


READERS: dict[str, Callable[[Path], object]] = {
    "manifest.json": lambda path: read_manifest(path.parent),
    "run.yaml": read_yaml,
    "ds.json": lambda path: read_engine_file(str(path)),
    "files.txt": read_small_text,
    "text.idx": read_index,
    "text.meta.json": lambda path: read_metadata(path.with_name("text")),
    "vocab.json": lambda path: read_bounded(str(path), 1000, flag="--vocab-file"),
    "tokenizer.json": lambda path: load_tokenizer(path.parent),
}
"""Readers by the name of the file that each reads."""


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_an_error(tmp_path: Path, name: str, kind: str):
    """Without waiting for a writer, and without an endless read."""
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(str(path))
    with pytest.raises(LmcoreError) as caught:
        READERS[name](path)
    expected = {
        "pipe": "it is a named pipe",
        "device": "it is a device",
        "socket": "No such device",
    }
    assert expected[kind] in caught.value.render()


DEEP = {name: reader for name, reader in READERS.items() if name.endswith(".json")} | {
    "text.text.json": lambda path: LazyText(path.with_name("text"))
}


@pytest.mark.parametrize("name", DEEP)
def test_deeply_nested_json(tmp_path: Path, name: str):
    """An error that names the file, in place of a recursion error."""
    (tmp_path / name).write_text("[" * 50_000)
    with pytest.raises(LmcoreError) as caught:
        DEEP[name](tmp_path / name)
    assert name in caught.value.render()


def test_deeply_nested_records(tmp_path: Path):
    """A damaged record that lmcore wrote for itself is treated as missing."""
    deep = "[" * 50_000
    assert LockOwner.parse(deep[:4096].encode()) is None
    (tmp_path / "summary.json").write_text(deep)
    plan: Any = SimpleNamespace(train_iters=1)
    assert finished_summary(plan, tmp_path, 1, ValidationHistory()) is None
    (tmp_path / "summary").write_text(str(tmp_path / "summary.json"))
    complete_summary(tmp_path, "failed: memory", replace=True)
    assert (tmp_path / "summary.json").read_text() == deep
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + deep + "\n")
    with MetricsFile(tmp_path / "metrics.jsonl", after_step=3) as metrics:
        assert metrics.last_row == {"step": 1}


def test_limit(tmp_path: Path):
    """A file of the largest size is read, a longer one is refused."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    assert read_bounded_file(path, 10) == b"x" * 10
    with pytest.raises(UnreadableFileError, match="larger than 9 bytes"):
        read_bounded_file(path, 9)
    with pytest.raises(IsADirectoryError):
        read_bounded_file(tmp_path, 9)


@pytest.mark.parametrize("content", ["[" * 50_000, "{a: " * 50_000])
def test_deeply_nested_yaml(tmp_path: Path, content: str):
    """A clear error in place of a recursion error."""
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"nested too deeply|not YAML"):
        read_yaml(tmp_path / "run.yaml")


def test_large_yaml(tmp_path: Path):
    """200 MB are not parsed."""
    with (tmp_path / "run.yaml").open("wb") as stream:
        stream.truncate(200_000_000)
    with pytest.raises(ConfigError, match="larger than 262,144 bytes"):
        read_yaml(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    "content",
    ["a: [" + "1," * 100_000 + "1]\n", "a:\n" * 60_000, "a: {" + "a: 1," * 40_000 + "}"],
)
def test_the_largest_yaml_is_read_in_seconds(tmp_path: Path, content: str):
    """A file just below the limit, which was read for 24 s."""
    (tmp_path / "run.yaml").write_text(content)
    before = time.process_time()
    read_file(str(tmp_path / "run.yaml"), [])
    assert time.process_time() - before < 5


def test_yaml_without_libyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """PyYAML's own reader is far slower, and so the limit is lower."""
    monkeypatch.setattr(yaml, "__with_libyaml__", False)
    path = tmp_path / "run.yaml"
    path.write_text("a: [" + "1," * 40_000 + "1]\n")
    with pytest.raises(ConfigError, match="larger than 65,536 bytes"):
        read_yaml(path)
    path.write_text("[" * 1000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_yaml(path)
    path.write_text("a:\n  b: 1\n")
    assert [entry.line for entry in read_file(str(path), []).entries] == [1, 2]
