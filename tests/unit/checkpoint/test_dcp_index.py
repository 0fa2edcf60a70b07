"""The index of a checkpoint, written without torch's classes, beside torch's own."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lmcore.checkpoint.chunks import ChunkBounds
from lmcore.checkpoint.dcp_index import write_index
from lmcore.checkpoint.dcp_writer import ByteRange
from lmcore.checkpoint.manifest import TensorEntry

TENSORS = {
    "model.weight": TensorEntry("bfloat16", (4, 3)),
    "a name\nwith 'odd' letters: ä": TensorEntry("float32", ()),
    "empty": TensorEntry("int64", (0, 2)),
}
STORED = [
    ("model.weight", ChunkBounds((2, 0), (2, 3)), ByteRange("__1_0.distcp", 2**33, 900)),
    ("model.weight", ChunkBounds((0, 0), (2, 3)), ByteRange("__0_0.distcp", 0, 900)),
    ("a name\nwith 'odd' letters: ä", ChunkBounds((), ()), ByteRange("__0_0.distcp", 900, 70_000)),
    ("empty", ChunkBounds((0, 0), (0, 2)), ByteRange("__0_1.distcp", 0, 300)),
]


def expected() -> Metadata:
    """Return the same index made of torch's classes."""
    entries, storage = {}, {}
    for name, entry in TENSORS.items():
        parts = sorted(((c, found) for n, c, found in STORED if n == name), key=lambda p: p[0])
        chunks = [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.size)) for c, _ in parts]
        properties = TensorProperties(dtype=getattr(torch, entry.dtype))
        entries[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        for number, (bounds, found) in enumerate(parts):
            index = MetadataIndex(name, torch.Size(bounds.offset), number)
            storage[index] = _StorageInfo(found.file, found.offset, found.length)
    planner = {name: (name,) for name in TENSORS}
    metadata = Metadata(entries, planner, storage, StorageMeta())
    metadata.__dict__["version"] = "1.0.0"  # torch 2.8 has no such field, and keeps what it reads
    return metadata


def test_torch_reads_its_own_classes(tmp_path: Path) -> None:
    """The pickle gives torch's index: values, types of sizes, and hints of the chunks."""
    entry = write_index(tmp_path, TENSORS, STORED)
    assert entry.size == (tmp_path / ".metadata").stat().st_size
    found, wanted = FileSystemReader(tmp_path).read_metadata(), expected()
    assert found.storage_meta is not None
    found.storage_meta.load_id = None  # torch's reader sets it
    assert found == wanted
    assert found.state_dict_metadata.keys() == wanted.state_dict_metadata.keys()
    for name, tensor in found.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        assert isinstance(tensor.size, torch.Size)
        assert tensor.properties == TensorProperties(dtype=getattr(torch, TENSORS[name].dtype))
    assert {key.index for key in found.storage_data if key.fqn == "model.weight"} == {0, 1}


def test_the_states_are_those_of_torchs_pickle(tmp_path: Path) -> None:
    """Each object has exactly the state that torch pickles, no more and no less.

    Newer versions of torch add the strides of a tensor, and read states without them.
    """
    write_index(tmp_path, TENSORS, STORED)
    of_torch = _states(pickle.dumps(expected(), protocol=4))
    of_torch = [(kind, state.replace(", False, None)", ", False)")) for kind, state in of_torch]
    assert _states((tmp_path / ".metadata").read_bytes()) == of_torch


def _states(content: bytes) -> list[tuple[str, str]]:
    """Return kind and state of every object of an index, in the order of the pickle."""
    import io

    states: list[tuple[str, str]] = []

    class Recorder(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str, /) -> object:
            if not module_name.startswith("torch.distributed"):
                return super().find_class(module_name, global_name)
            if global_name.startswith("_MEM"):
                # Versions of Python pickle members of an enumeration by number or by name.
                members = super().find_class(module_name, global_name)
                numbers = {one.name: (global_name, (one.value,)) for one in members}
                call = staticmethod(lambda *arguments: (global_name, arguments))
                return type(global_name, (), {"__new__": call, **numbers})

            def set_state(_self: object, state: object) -> None:
                states.append((f"{module_name}.{global_name}", repr(state).partition("<")[0]))

            return type(global_name, (), {"__setstate__": set_state})

    Recorder(io.BytesIO(content)).load()
    return states


def test_a_save_and_a_load_import_little() -> None:
    """Neither needs `torch.distributed.checkpoint`, whose import takes most of a second."""
    program = """
import sys, tempfile, torch
from pathlib import Path
from lmcore.checkpoint import load_checkpoint, save_checkpoint
tensors = {"weight": torch.arange(6.0)}
path = save_checkpoint(Path(tempfile.mkdtemp()), 1, tensors, {}, model_shape={})
load_checkpoint(path, {"weight": torch.zeros(6)})
print([name for name in ("torch.distributed.checkpoint", "sympy") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
