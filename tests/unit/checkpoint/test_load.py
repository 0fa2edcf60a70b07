"""Tests of loading: bitwise round trips, damage of every file, files from people not trusted."""

from __future__ import annotations

import io
import json
import pickle
import re
import subprocess
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

from lmcore.base.errors import CheckpointError
from lmcore.checkpoint import (
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    verify_checkpoint,
)
from lmcore.checkpoint.manifest import _checksum
from lmcore.parallel.tensor_layout import Chunk, TensorLayout


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def zeros_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}


def refused(checkpoint: Path, tensors: dict[str, torch.Tensor], **options: bool) -> CheckpointError:
    """Load into fresh tensors, expect a refusal, and make sure that none was touched."""
    targets = {
        name: torch.full(tensor.shape, 1, dtype=tensor.dtype) for name, tensor in tensors.items()
    }
    before = {name: as_bytes(target) for name, target in targets.items()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(checkpoint, targets, **options)
    assert before == {name: as_bytes(target) for name, target in targets.items()}
    return caught.value


def restate(checkpoint: Path, name: str, content: bytes) -> None:
    """Replace a file and make the manifest agree, as someone with bad intent would."""
    (checkpoint / name).write_bytes(content)
    path = checkpoint / "manifest.json"
    document = json.loads(path.read_text())
    del document["manifest_sha256"]
    document["files"][name] = {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    document["manifest_sha256"] = _checksum(document)
    path.write_text(json.dumps(document))


def test_round_trip_is_bitwise(saved: Path, tensors: dict[str, torch.Tensor]):
    """Every dtype, layout and size comes back bit for bit, and so does the JSON."""
    restored = zeros_of(tensors)
    manifest = load_checkpoint(saved, restored)
    for name, tensor in tensors.items():
        assert as_bytes(restored[name]) == as_bytes(tensor), name
    assert manifest.iteration == 100
    assert manifest.meta == {
        "consumed_samples": 96,
        "schedule": {"lr": 0.1 + 0.2, "names": ["a", "ß"]},
        "done": False,
    }
    assert verify_checkpoint(saved) == []


def test_fills_parameters_and_views_in_place(saved: Path, tensors: dict[str, torch.Tensor]):
    """Parameters that require gradients and non-contiguous targets are filled where they are."""
    parameter = torch.nn.Parameter(torch.zeros(64, 32))
    base = torch.zeros(30, 40)
    load_checkpoint(
        saved, {"model.layers.0.attention.qkv.weight": parameter, "model.nan": base.t()}
    )
    assert torch.equal(parameter, tensors["model.layers.0.attention.qkv.weight"])
    assert as_bytes(base.t()) == as_bytes(tensors["model.nan"])
    assert parameter.requires_grad


@pytest.mark.parametrize(
    "layout, in_place",
    [
        ((Chunk((0, 0), (3, 0), (40, 8)),), True),
        ((Chunk((0, 0), (3, 2), (40, 6)),), False),
        ((Chunk((0, 0), (0, 0), (3, 8)), Chunk((3, 0), (50, 0), (7, 8))), True),
    ],
    ids=["rows", "columns", "two blocks of rows"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_rows_are_read_in_place(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: tuple[Chunk, ...],
    in_place: bool,
    dtype: torch.dtype,
):
    """Whole rows go from the file into the tensor; torch's loader reads what is left."""
    whole = torch.arange(60 * 8).view(60, 8).to(dtype)
    saved = save_checkpoint(tmp_path, 1, {"w": whole}, {}, model_shape={})
    rows = max(chunk.start[0] + chunk.size[0] for chunk in layout)
    target = torch.full((rows, layout[0].size[1]), -1).to(dtype)
    calls = []
    load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *args, **named: calls.append(1) or load(*args, **named)
    )
    load_checkpoint(saved, {"w": target}, layouts={"w": TensorLayout((60, 8), layout)})
    for chunk in layout:
        low, end = chunk.start[0], chunk.start[0] + chunk.size[0]
        first, column = chunk.offset
        wanted = whole[first : first + chunk.size[0], column : column + chunk.size[1]]
        assert torch.equal(target[low:end], wanted)
    assert bool(calls) is not (in_place and dtype.is_floating_point)


def test_partial_load_reads_the_given_tensors(saved: Path):
    """Names that are not asked for are not needed."""
    target = {"optimizer.step": torch.tensor(0)}
    load_checkpoint(saved, target)
    assert target["optimizer.step"].item() == 17


def test_torch_reads_it(saved: Path, tensors: dict[str, torch.Tensor], tmp_path: Path):
    """Plain torch loads the directory, and its converter makes one file of it."""
    restored = zeros_of(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the single process
        dcp.load(restored, checkpoint_id=saved)
        dcp_to_torch_save(saved, tmp_path / "one.pt")
    converted = torch.load(tmp_path / "one.pt", weights_only=True)
    assert converted.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert as_bytes(restored[name]) == as_bytes(tensor) == as_bytes(converted[name]), name


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp"])
def test_truncated_file_is_named(saved: Path, tensors: dict[str, torch.Tensor], name: str):
    """A file that lost its end is named, with or without checksums, and nothing is touched."""
    path = saved / name
    path.write_bytes(path.read_bytes()[:-1] if name != "manifest.json" else b'{"format": ')
    for verify in (True, False):
        assert name in str(refused(saved, tensors, verify=verify))
    assert len(verify_checkpoint(saved)) == 1
    assert name in verify_checkpoint(saved)[0]


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("position", [0.01, 0.3, 0.62, 0.999])
def test_altered_byte_is_noticed(
    saved: Path, tensors: dict[str, torch.Tensor], name: str, position: float
):
    """One changed bit anywhere in any file is noticed, the file named, and nothing touched."""
    path = saved / name
    content = bytearray(path.read_bytes())
    content[int(position * (len(content) - 2))] ^= 1
    path.write_bytes(content)
    assert name in str(refused(saved, tensors))
    assert name in verify_checkpoint(saved)[0]


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp"])
def test_missing_file_is_named(saved: Path, tensors: dict[str, torch.Tensor], name: str):
    """A file that is gone is named, with or without checksums."""
    (saved / name).unlink()
    assert name in str(refused(saved, tensors, verify=False))
    assert name in verify_checkpoint(saved)[0]


def test_missing_names_are_listed(saved: Path, tensors: dict[str, torch.Tensor]):
    """All names that the checkpoint does not hold are listed, with the nearest one it has."""
    asked = {**tensors, "model.fp15": torch.zeros(33), "other": torch.zeros(1)}
    error = refused(saved, asked)
    assert "2 of the requested tensors" in error.what
    assert "`model.fp15`" in error.why
    assert "`other`" in error.why
    assert "did you mean `model.fp16`" in error.hint


def test_other_shapes_and_dtypes_are_listed(saved: Path):
    """All tensors of another shape or dtype are listed before any is read."""
    error = refused(
        saved,
        {"model.bf16": torch.zeros(5, 7, dtype=torch.bfloat16), "model.fp16": torch.zeros(33)},
    )
    assert "model.bf16: checkpoint bfloat16 [7, 5], wanted bfloat16 [5, 7]" in error.why
    assert "model.fp16: checkpoint float16 [33], wanted float32 [33]" in error.why
    assert error.hint == "give the model options that the checkpoint was trained with"
    assert "--precision" in refused(saved, {"model.fp16": torch.zeros(33)}).hint


class Bomb:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable, tuple[str, str]]:
        return open, (str(self.path), "w")


def index_of(checkpoint: Path) -> Metadata:
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def with_bomb(index: Metadata, outside: Path) -> object:
    return Bomb(outside)


def with_hidden_bomb(index: Metadata, outside: Path) -> object:
    index.planner_data["model.fp16"] = Bomb(outside)
    return index


def with_path_object(index: Metadata, outside: Path) -> object:
    index.storage_meta = StorageMeta(checkpoint_id=outside)
    return index


def with_bytes_entry(index: Metadata, outside: Path) -> object:
    index.state_dict_metadata["model.fp16"] = BytesStorageMetadata()
    return index


def place_of(index: Metadata, name: str) -> _StorageInfo:
    return next(place for key, place in index.storage_data.items() if key.fqn == name)


def with_absolute_path(index: Metadata, outside: Path) -> object:
    place_of(index, "model.fp16").relative_path = str(outside)
    return index


def with_parent_path(index: Metadata, outside: Path) -> object:
    place_of(index, "model.fp16").relative_path = "../outside"
    return index


def with_long_entry(index: Metadata, outside: Path) -> object:
    place_of(index, "model.fp16").length += 10_000_000
    return index


def with_negative_offset(index: Metadata, outside: Path) -> object:
    place_of(index, "model.fp16").offset = -8
    return index


def with_transformation(index: Metadata, outside: Path) -> object:
    place_of(index, "model.fp16").transform_descriptors = ["stream.zstd"]
    return index


def with_missing_tensor(index: Metadata, outside: Path) -> object:
    del index.state_dict_metadata["model.fp16"]
    return index


def with_other_dtype(index: Metadata, outside: Path) -> object:
    index.state_dict_metadata["model.fp16"].properties.dtype = torch.bfloat16
    return index


def with_other_shape(index: Metadata, outside: Path) -> object:
    index.state_dict_metadata["model.fp16"].size = torch.Size([34])
    return index


def with_part_outside(index: Metadata, outside: Path) -> object:
    index.state_dict_metadata["model.fp16"].chunks[0].offsets = torch.Size([1])
    return index


def with_part_missing(index: Metadata, outside: Path) -> object:
    index.state_dict_metadata["model.fp16"].chunks[0].sizes = torch.Size([12])
    return index


def with_nothing(index: Metadata, outside: Path) -> object:
    return {}


@pytest.mark.parametrize(
    "change, reason",
    [
        (with_bomb, "open"),
        (with_hidden_bomb, "open"),
        (with_path_object, "PosixPath"),
        (with_bytes_entry, "BytesStorageMetadata"),
        (with_absolute_path, "not a file of the manifest"),
        (with_parent_path, "not a file of the manifest"),
        (with_long_entry, "beyond the end"),
        (with_negative_offset, "not made of counts"),
        (with_transformation, "transformation"),
        (with_missing_tensor, "model.fp16"),
        (with_other_dtype, "dtype"),
        (with_other_shape, "shape"),
        (with_part_outside, "outside"),
        (with_part_missing, "do not make the whole"),
        (with_nothing, "in the place of `Metadata`"),
    ],
)
def test_malicious_index_is_refused(
    saved: Path,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    change: Callable[[Metadata, Path], object],
    reason: str,
):
    """An index with matching checksums that names anything else is refused and runs nothing."""
    outside = tmp_path / "checkpoints" / "outside"
    if change not in {with_bomb, with_hidden_bomb}:
        outside.write_bytes(bytes(100_000))
    restate(saved, ".metadata", pickle.dumps(change(index_of(saved), outside)))
    error = refused(saved, tensors)
    assert ".metadata" in error.what
    assert reason in error.why
    assert reason in verify_checkpoint(saved)[0]
    if change in {with_bomb, with_hidden_bomb}:
        assert not outside.exists()


class ByName(pickle.Pickler):
    """Pickles an enum's member as Python 3.11.0 to 3.11.3 does: by `getattr`."""

    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, Enum):
            return getattr, (type(obj), obj.name)
        return NotImplemented


class Reach:
    """Pickles as the attribute of something that an index does not hold."""

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (torch.Size, "__class__")


def test_index_of_an_older_python_is_read(saved: Path, tensors: dict[str, torch.Tensor]):
    """An index whose enum members are pickled by name loads like one with their values."""
    content = io.BytesIO()
    ByName(content).dump(index_of(saved))
    assert b"getattr" in content.getvalue()
    restate(saved, ".metadata", content.getvalue())
    restored = zeros_of(tensors)
    load_checkpoint(saved, restored)
    assert all(as_bytes(restored[name]) == as_bytes(tensors[name]) for name in tensors)


def test_attribute_of_anything_else_is_refused(saved: Path, tensors: dict[str, torch.Tensor]):
    """`getattr` reaches the members of that enum, and nothing besides."""
    restate(saved, ".metadata", pickle.dumps(Reach()))
    assert "attribute" in refused(saved, tensors).why


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04",
        b"(" * 1000,
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04}\x8c\x01a.",
        b"I1\n.",
    ],
)
def test_broken_pickle_is_refused(saved: Path, tensors: dict[str, torch.Tensor], content: bytes):
    """An index that is no index ends in an error for people, whatever the bytes are."""
    restate(saved, ".metadata", content)
    assert ".metadata" in refused(saved, tensors).what


def test_pickle_cannot_change_classes(saved: Path, tensors: dict[str, torch.Tensor]):
    """An index that sets attributes on a class of torch's changes nothing outside itself."""
    module = "torch.distributed.checkpoint.metadata"
    state = pickle.dumps((None, {"version": "changed"}), protocol=2)[2:-1]
    content = b"\x80\x02" + f"c{module}\nMetadata\n".encode() + state + b"b."
    restate(saved, ".metadata", content)
    refused(saved, tensors)
    assert getattr(Metadata, "version", None) is None


def data_file_with(replace: Callable[[Path], Any], saved: Path) -> None:
    """Put something else where tensor `model.fp16` is stored, the lengths made to agree."""
    import io

    index = index_of(saved)
    place = place_of(index, "model.fp16")
    content = (saved / "__0_0.distcp").read_bytes()
    stream = io.BytesIO()
    torch.save(replace(saved), stream)
    place.offset, place.length = len(content), len(stream.getvalue())
    restate(saved, "__0_0.distcp", content + stream.getvalue())
    restate(saved, ".metadata", pickle.dumps(index))


@pytest.mark.parametrize(
    "replace, reason",
    [
        (lambda saved: Bomb(saved.parent / "outside"), "UnpicklingError"),
        (lambda saved: [1, 2], "not a plain tensor"),
        (lambda saved: torch.zeros(33), "dtype"),
        (lambda saved: torch.zeros(32, dtype=torch.float16), "shape"),
        (lambda saved: torch.zeros(2, 33, dtype=torch.float16), "shape"),
        (lambda saved: torch.nn.Parameter(torch.zeros(33, dtype=torch.float16)), "plain tensor"),
    ],
)
def test_malicious_data_is_refused(
    saved: Path, replace: Callable[[Path], Any], reason: str, tmp_path: Path
):
    """Stored bytes with matching checksums that are not the promised tensor are refused."""
    data_file_with(replace, saved)
    error = refused(saved, {"model.fp16": torch.zeros(33, dtype=torch.float16)})
    assert "`model.fp16` is not stored as the checkpoint says" in error.what
    assert reason in error.why
    assert not (saved.parent / "outside").exists()


def test_compressed_data_is_refused(saved: Path):
    """Bytes that would unpack to many times their number are not unpacked."""
    stream = io.BytesIO()
    torch.save(torch.zeros(2**22, dtype=torch.float16), stream)
    packed = io.BytesIO()
    with zipfile.ZipFile(stream) as plain, zipfile.ZipFile(packed, "w") as archive:
        for one in plain.infolist():
            archive.writestr(one.filename, plain.read(one), zipfile.ZIP_DEFLATED)
    index = index_of(saved)
    place = place_of(index, "model.fp16")
    content = (saved / "__0_0.distcp").read_bytes()
    place.offset, place.length = len(content), len(packed.getvalue())
    restate(saved, "__0_0.distcp", content + packed.getvalue())
    restate(saved, ".metadata", pickle.dumps(index))
    error = refused(saved, {"model.fp16": torch.zeros(33, dtype=torch.float16)})
    assert re.search(r"it is compressed, \d+,\d+ bytes of 8,\d+,\d+, as no save does", error.why)


def test_linked_file_is_refused(saved: Path, tensors: dict[str, torch.Tensor], tmp_path: Path):
    """A data file that is a link to somewhere else is not followed."""
    elsewhere = tmp_path / "elsewhere"
    (saved / "__0_0.distcp").rename(elsewhere)
    (saved / "__0_0.distcp").symlink_to(elsewhere)
    assert "__0_0.distcp" in refused(saved, tensors).why


def test_import_loads_no_torch():
    """Importing the package loads no torch and warns of nothing."""
    code = "import sys, lmcore.checkpoint; print('torch' in sys.modules)"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr


def test_verify_reports_all_damage(saved: Path):
    """`verify_checkpoint` lists every damaged file, not only the first."""
    for name in read_manifest(saved).files:
        (saved / name).write_bytes(b"x")
    assert len(verify_checkpoint(saved)) == 2
