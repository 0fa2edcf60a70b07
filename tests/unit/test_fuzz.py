"""Arbitrary bytes in place of files whose headers announce sizes, with bounds on time and memory.

A reader gives a result or an `LmcoreError`.  What a header announces is compared with the size of
the file before memory is allocated for it: the cases run in a child process that may allocate
little more than it has.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import signal
import struct
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import TO_A_FILE, time_limit
from indexed_files import write
from safetensors.torch import save_file

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import LmcoreError
from lmcore.checkpoint import manifest as manifests
from lmcore.checkpoint.manifest import MANIFEST_NAME, read_manifest
from lmcore.checkpoint.verify import verify_checkpoint
from lmcore.conversion.huggingface.weights import WeightFiles
from lmcore.data import native
from lmcore.data.dataset.gpt import GPTDataset
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.idx_reader import (
    CACHED_HEADER,
    CACHED_MAGIC,
    HEADER,
    MAGIC,
    read_index,
)
from lmcore.data.tools.inspect import inspect

MORE_BYTES = 512 << 20
CASES = [40, pytest.param(1000, marks=pytest.mark.full)]
NUMBERS = [0, 1, -1, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**53 + 1, 2**63 - 1, 2**63]
NUMBERS += [2**64 - 1, 2**64, 10**300]
VALUES = [
    *(None, True, False, "", "x", "\ud800", "\0", "../x", "a" * 5000, "é" * 300, 1.5, 1e308),
    *(
        float("nan"),
        [],
        [1],
        [[]],
        [2**62, 2**62],
        {},
        {"a": 1},
        {"\ud800": 1},
        "F32",
        "BF16",
        *NUMBERS,
    ),
]


def in_a_small_process(work: Callable[[], None]) -> None:
    """Run *work* in a child process whose memory is limited; fail with what it raises."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(receive)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + MORE_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            work()
            status = 0
        except BaseException:  # noqa: BLE001  # of any kind: the parent shows it
            os.write(send, traceback.format_exc()[-60_000:].encode(errors="replace"))
        finally:
            os._exit(status)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        pytest.fail(f"the reader died of {signal.Signals(os.WTERMSIG(status)).name}")
    assert status == 0, said


def outcomes(damaged: Iterator[tuple[Path, bytes]], read: Callable[[Path], None]) -> Counter[str]:
    """Write each content, read it, and count what came of it."""
    found: Counter[str] = Counter()
    for number, (path, content) in enumerate(damaged):
        path.write_bytes(content)
        try:
            with time_limit():
                read(path)
            found["read"] += 1
        except LmcoreError as error:
            error.render()
            found["refused"] += 1
        except BaseException as error:
            error.add_note(f"case {number}: {content[:300]!r}")
            raise
    return found


def bytes_changed(path: Path, content: bytes, draw: random.Random) -> bytes:
    """Return the content with damage that any file can have."""
    path.write_bytes(content)
    kinds = [
        kind for kind in TO_A_FILE if kind.__name__ not in {"remove", "other_kind", "exchanged"}
    ]
    draw.choice(kinds)(path, draw)
    return path.read_bytes()


def value_changed(document: Any, draw: random.Random) -> Any:
    """Return a copy of a JSON value in which some values, keys or items are others."""
    changed = copy.deepcopy(document)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        holders = [changed]
        for holder in holders:  # grows
            inner = holder.values() if isinstance(holder, dict) else holder
            holders += [value for value in inner if isinstance(value, dict | list)]
        holder = draw.choice([one for one in holders if one] or [changed])
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            continue
        key, how = draw.choice(keys), draw.random()
        if how < 0.1:
            del holder[key]
        elif how < 0.2 and isinstance(holder, dict):
            holder[draw.choice(["", "x", "\ud800", "a/b", "..", "é" * 200])] = holder.pop(key)
        else:
            holder[key] = copy.deepcopy(draw.choice(VALUES))
    return changed


@pytest.mark.parametrize("count", CASES)
def test_manifest(tmp_path: Path, count: int) -> None:
    """Any manifest, even with a right checksum, is read or refused, and so is its checkpoint."""
    document = {
        "format": manifests.FORMAT,
        "format_version": manifests.FORMAT_VERSION,
        "lmcore_version": "1",
        "torch_version": "2",
        "iteration": 3,
        "sequence": 1,
        "model_shape": {"family": "GPT", "hidden_size": 8, "dropout": 0.5},
        "meta": {"counters": {"iteration": 3, "consumed_samples": 12}, "settings": {"a": [1, "b"]}},
        "tensors": {"w": {"dtype": "float32", "shape": [2, 3]}},
        "files": {"data": {"size": 24, "crc32": "00000000"}},
    }
    draw = random.Random(count)
    checkpoint = tmp_path / "iter_0000003"
    checkpoint.mkdir()
    (checkpoint / "data").write_bytes(bytes(24))
    path = checkpoint / MANIFEST_NAME

    def cases() -> Iterator[tuple[Path, bytes]]:
        for number in range(count):
            changed = value_changed(document, draw)
            if isinstance(changed, dict):
                try:
                    changed["manifest_sha256"] = manifests._checksum(changed)
                except ValueError:  # not a number in JSON
                    changed["manifest_sha256"] = ""
            content = json.dumps(changed).encode()
            yield path, bytes_changed(path, content, draw) if number % 3 == 0 else content

    def read(path: Path) -> None:
        read_manifest(path.parent)
        verify_checkpoint(path.parent)

    in_a_small_process(lambda: require_both(outcomes(cases(), read)))


def require_both(found: Counter[str]) -> None:
    """Require that cases were read and refused: else they test little."""
    assert found["refused"] > found.total() // 4, found


@pytest.mark.parametrize("count", CASES)
def test_safetensors_header(tmp_path: Path, count: int) -> None:
    """Any length, JSON, dtype, shape and offsets in a header give tensors or an error."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, path)
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    draw = random.Random(count)

    def cases() -> Iterator[tuple[Path, bytes]]:
        for number in range(count):
            text = json.dumps(value_changed(header, draw), ensure_ascii=draw.random() < 0.5)
            raw = text.encode(errors="surrogatepass")
            stated = draw.choice(NUMBERS) % 2**64 if draw.random() < 0.1 else len(raw)
            content = struct.pack("<Q", stated) + raw + data[: draw.choice([len(data), 9])]
            yield path, bytes_changed(path, whole, draw) if number % 3 == 0 else content

    def read(path: Path) -> None:
        weights = WeightFiles(path.parent)
        for name, stored in weights.tensors.items():
            assert tuple(weights.read(name).shape) == stored.shape

    in_a_small_process(lambda: require_both(outcomes(cases(), read)))


def numbers_changed(content: bytes, head: struct.Struct, at: int, draw: random.Random) -> bytes:
    """Return an index with other numbers in its header, or behind it."""
    fields = list(head.unpack_from(content, at))
    place = draw.randrange(len(fields))
    fields[place] = draw.choice([*NUMBERS[:-1], fields[place] + 1, max(0, fields[place] - 1)])
    limits = [1 << 8 if head is HEADER and i == 1 else 1 << 64 for i in range(len(fields))]
    stated = [value % limit for value, limit in zip(fields, limits, strict=True)]
    changed = bytearray(content)
    if draw.random() < 0.5:
        head.pack_into(changed, at, *stated)
    else:
        width, form = draw.choice([(4, "<I"), (8, "<Q")])
        start = at + head.size + draw.randrange(0, len(content) - at - head.size - width)
        struct.pack_into(form, changed, start, draw.choice(NUMBERS[:-2]) % (1 << 8 * width))
    return bytes(changed)


@pytest.mark.parametrize("engine", ["native", "Python"])
@pytest.mark.parametrize("format_", ["mmap", "cached"])
@pytest.mark.parametrize("count", CASES)
def test_idx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: Any, engine: str, count: int
) -> None:
    """Any index gives documents and samples, by C++ and by Python, or an error."""
    if engine == "native":
        assert native.builders is not None
    else:
        monkeypatch.setattr(native, "builders", None)
    prefix = tmp_path / "data"
    write(prefix, [[[1, 2, 3]], [[4], [5, 6]], [[]], [list(range(40))]], dataset_impl=format_)
    path = tmp_path / "data.idx"
    whole = path.read_bytes()
    head, at = (HEADER, len(MAGIC)) if format_ == "mmap" else (CACHED_HEADER, len(CACHED_MAGIC))
    draw = random.Random(count)

    def cases() -> Iterator[tuple[Path, bytes]]:
        for number in range(count):
            if number % 3 == 0:
                yield path, bytes_changed(path, whole, draw)
            else:
                yield path, numbers_changed(whole, head, at, draw)

    def read(path: Path) -> None:
        assert read_index(path, verify=False).tokens >= 0
        dataset = IndexedDataset(prefix)
        tokens = sum(len(dataset.document(i)) for i in range(dataset.document_count))
        assert tokens == dataset.tokens
        assert sum(len(dataset.get(i)) for i in range(len(dataset))) == tokens
        inspect(prefix)
        samples = GPTDataset(
            dataset,
            document_range=(0, dataset.document_count),
            num_samples=9,
            name="train",
            sequence_length=8,
            seed=1,
            cache_dir=tmp_path / "cache",
            final_epoch_threshold=0.8,
        )
        assert {len(samples[i]) for i in range(9)} == {9}
        assert int(np.max(samples[0])) < 1 << 16

    in_a_small_process(lambda: require_both(outcomes(cases(), read)))


def test_the_limit_is_effective(tmp_path: Path) -> None:
    """A reader that allocates what a header announces, or does not end, fails these tests."""
    with pytest.raises(AssertionError, match="MemoryError"):
        # More than what earlier tests may have left free in the heap, which costs no address space.
        in_a_small_process(lambda: bytearray(16 * MORE_BYTES) and None)
    with pytest.raises(AssertionError, match="KeyError"):
        in_a_small_process(lambda: {}["x"])
    in_a_small_process(lambda: None)
    (tmp_path / "x").write_bytes(b"abc")
    assert read_bounded_file(tmp_path / "x", 3) == b"abc"
