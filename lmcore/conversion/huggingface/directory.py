"""Files of a Hugging Face directory: their names, which of them are read, and which are not."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lmcore.base.errors import CheckpointArgumentError, several
from lmcore.model.checkpoint_format import formats, of_absent_plugin

__all__ = [
    "CONFIG_NAME",
    "INDEX_NAME",
    "SINGLE_NAME",
    "WEIGHT_FILES",
    "incomplete_huggingface",
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
_MODEL_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_WEIGHTS = (*_MODEL_WEIGHTS, "adapter_model.bin")
_OTHER_FORMS = (
    (
        "adapter_config.json",
        "it is an adapter, without the weights of its base model",
        "merge both (`merge_and_unload` of peft), and give the directory of the merged model",
    ),
    (
        "consolidated.safetensors",
        "its weights have the names of their author's own program",
        f"give the directory with transformers' `{CONFIG_NAME}` and `{WEIGHT_FILES[0][0]}`",
    ),
)
"""Files that show another form of a model, with the form and a hint."""


def is_huggingface(directory: Path) -> bool:
    """Return True if *directory* has the files of a Hugging Face model."""
    weights = any((directory / name).is_file() for names in WEIGHT_FILES for name in names)
    return weights and (directory / CONFIG_NAME).is_file()


def incomplete_huggingface(directory: Path) -> CheckpointArgumentError | None:
    """Return the error for an incomplete model, or another form of one; None if there is none."""
    parts = _parts(directory)
    if parts is None:
        return None
    why, hint = parts
    return CheckpointArgumentError(f"no checkpoint in `{directory}`", why=why, hint=hint)


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
    beside = [one for one in formats().values() if one.optimizer and one.matches(directory)]
    if beside:
        notes.append(
            f"the state of its optimizer, in {beside[0].described}, is not read; `lmcore "
            f"checkpoint convert` reads it with `--source-format {beside[0].name}`"
        )
    elif (absent := of_absent_plugin(directory)) is not None:
        notes.append(f"the state of its optimizer is not read: {absent.why}")
    elif any((directory / name).is_file() for name in _OPTIMIZER_FILES):
        notes.append("the state of its optimizer is not read")
    return tuple(notes)


def _parts(directory: Path) -> tuple[str, str] | None:
    """Return what an incomplete model in *directory* lacks, and a hint; None if there is none."""
    for name, why, hint in _OTHER_FORMS:
        if (directory / name).is_file():
            return f"{why} (`{name}`)", hint
    files = [path for pattern in _MODEL_WEIGHTS for path in sorted(directory.glob(pattern))]
    if (directory / CONFIG_NAME).is_file():
        names = ", ".join(f"`{name}`" for pair in WEIGHT_FILES for name in pair)
        other = f"; `{files[0].name}` is none of these" if files else ""
        why = f"it has a `{CONFIG_NAME}`, but no weights: looked for {names}{other}"
        return why, "download or copy the missing files"
    if files:
        why = f"it has weights, such as `{files[0].name}`, but no `{CONFIG_NAME}`"
        return why, f"copy the model's `{CONFIG_NAME}` there"
    if any(directory.glob("*.gguf")):
        return "GGUF files are not read", "give the model from which the GGUF file was made"
    return None
