"""Checkpoints of other programs in which one tensor at a time is changed, and what readers say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed_files
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from lmcore.base.errors import CheckpointError
from lmcore.conversion.formats import read_state
from lmcore.conversion.megatron.torch_dist.stored_tensors import StoredTensors

FEW = 6
"""Number of tensors of a checkpoint that the fast set changes."""
NO_WEIGHTS = ("rng_state", "random", "rerun", "step")
"""Beginnings of the names of random states and counters."""

Change = Callable[[torch.Tensor], torch.Tensor]


class Content:
    """All tensors in the files of a checkpoint, which can be changed one at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.distributed = next(root.glob("*/.metadata"), None)

    def places(self) -> list[tuple[Path, tuple[Any, ...]]]:
        """Return file and keys of every tensor but random states and counters."""
        if self.distributed is not None:
            directory = self.distributed.parent
            return [(directory, (name,)) for name in StoredTensors(directory).entries]
        found = []
        for path in sorted(self.root.rglob("*")):
            if path.suffix == ".safetensors":
                found += [(path, (name,)) for name in load_file(path)]
            elif path.suffix == ".pt" and path.name != "step.pt":
                found += [(path, keys) for keys in tensors_in(self.load(path), ())]
        return found

    def load(self, path: Path) -> Any:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.is_dir():
            stored = StoredTensors(path)
            return {name: stored.read(name).clone() for name in stored.entries}
        with deepspeed_files.importable():
            return torch.load(path, weights_only=False)

    def change(self, path: Path, keys: tuple[Any, ...], change: Change | None) -> None:
        """Replace one tensor; None: add another one beside it."""
        content = owner = self.load(path)
        for key in keys[:-1]:
            owner = owner[key]
        if change is None:
            owner["extra.weight"] = torch.ones(3)
        else:
            owner[keys[-1]] = change(owner[keys[-1]].clone())
        if path.suffix == ".safetensors":
            save_file(content, path)
        elif path.is_dir():
            for file in [*path.glob("*.distcp"), path / ".metadata"]:
                file.unlink()
            dcp.save(content, checkpoint_id=path, no_dist=True)
        else:
            with deepspeed_files.importable():
                torch.save(content, path)


def tensors_in(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of the tensors in nested mappings and lists."""
    if isinstance(value, torch.Tensor) and value.numel():
        yield keys
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in items:
            if not (isinstance(key, str) and key.startswith(NO_WEIGHTS)):
                yield from tensors_in(one, (*keys, key))


def observed(root: Path) -> tuple[dict[Any, torch.Tensor], list[str], object]:
    """Return everything that a reader says about a checkpoint."""
    state = read_state(root)
    # Copies: files are mapped, and written again in place.
    names = [(name, kind) for name in state.parameters for kind in state.kinds]
    tensors = {key: state.read(*key).float().clone() for key in names}
    return tensors, [*state.notes, *state.training_notes], state.progress


def is_noticed(root: Path, before: tuple[dict[Any, torch.Tensor], list[str], object]) -> bool:
    """Return True if a checkpoint is refused, or its reader says anything else than *before*."""
    try:
        tensors, notes, progress = observed(root)
    except CheckpointError:
        return True
    if (notes, progress) != before[1:] or tensors.keys() != before[0].keys():
        return True
    return not all(torch.equal(tensors[key], before[0][key]) for key in tensors)


def altered(tensor: torch.Tensor) -> torch.Tensor:
    """Return other values."""
    return tensor.logical_not() if tensor.dtype is torch.bool else 1 - tensor


def unnoticed(root: Path, *, every: bool) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the tensors of a checkpoint that nobody notices if their values are others.

    Args:
        root: Directory of the checkpoint.
        every: True to change each tensor; False for a few.
    """
    content = Content(root)
    before, places = observed(root), content.places()
    step = 1 if every else max(len(places) // FEW, 1)
    found = []
    for path, keys in places[::step]:
        files = [path] if path.is_file() else sorted(path.iterdir())
        saved = {file: file.read_bytes() for file in files}
        content.change(path, keys, altered)
        if not is_noticed(root, before):
            found.append((path.name, keys))
        for file, data in saved.items():
            file.write_bytes(data)
    return found
