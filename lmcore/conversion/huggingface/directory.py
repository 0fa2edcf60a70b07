"""Files of a Hugging Face directory: their names, which of them are read, and which are not."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lmcore.errors import several

__all__ = [
    "CONFIG_NAME",
    "INDEX_NAME",
    "SINGLE_NAME",
    "WEIGHT_FILES",
    "is_huggingface",
    "unread_notes",
]

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
WEIGHT_FILES = (
    (SINGLE_NAME, INDEX_NAME),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Names of the weight files in the order of transformers: a single file, the index of several."""
_OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")
"""Names of the optimizer's state in a directory of transformers' `Trainer` or of accelerate."""
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
_DEEPSPEED_FILES = "global_step*/*_states.pt"


def is_huggingface(directory: Path) -> bool:
    """Return True if *directory* has the files of a Hugging Face model."""
    weights = any((directory / name).is_file() for names in WEIGHT_FILES for name in names)
    return weights and (directory / CONFIG_NAME).is_file()


def unread_notes(directory: Path, read: Collection[Path]) -> tuple[str, ...]:
    """Return notes that name files of *directory* which a user may expect to be read.

    Trainers save the optimizer's state beside the model; further weights may be of another model.

    Args:
        directory: Directory of a model.
        read: Weight files that are read.
    """
    notes = []
    held = {path for pattern in _WEIGHTS for path in directory.glob(pattern)}
    if others := sorted(path.name for path in held - set(read)):
        names = (name for pair in WEIGHT_FILES for name in pair)
        first = next(name for name in names if (directory / name).is_file())
        are = "is" if len(others) == 1 else "are"
        notes.append(f"`{first}` is read, as by transformers; {several(others)} {are} not")
    if any(directory.glob(_DEEPSPEED_FILES)):
        notes.append(
            "the state of its optimizer, in DeepSpeed's files, is not read; `lmcore checkpoint "
            "convert` reads it with `--source-format megatron-deepspeed`"
        )
    elif any((directory / name).is_file() for name in _OPTIMIZER_FILES):
        notes.append("the state of its optimizer is not read")
    return tuple(notes)
