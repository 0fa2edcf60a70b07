"""Recognition of a checkpoint's format by its files, without torch.

`format_of` names the format of a directory; `unrecognized` explains what a directory lacks if it
has only a part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from lmcore.checkpoint.layout import CHECKPOINTS_NAME
from lmcore.checkpoint.manifest import MANIFEST_NAME
from lmcore.conversion.deepspeed.directory import is_deepspeed
from lmcore.conversion.huggingface.directory import CONFIG_NAME, WEIGHT_FILES, is_huggingface
from lmcore.conversion.megatron.directory import (
    TRACKER_NAME,
    incomplete_distributed,
    is_megatron,
    is_megatron_dist,
    require_checkpoint,
)
from lmcore.errors import CheckpointArgumentError, CheckpointError

__all__ = ["MATCHES", "format_of", "unrecognized"]

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_MAX_ENTRIES = 1000
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


def _is_lmcore(directory: Path) -> bool:
    inside = directory / CHECKPOINTS_NAME
    folders = (directory, *directory.glob("iter_*"), *inside.glob("iter_*"))
    return any((folder / MANIFEST_NAME).is_file() for folder in folders)


MATCHES: Mapping[str, Callable[[Path], bool]] = MappingProxyType(
    {
        "lmcore": _is_lmcore,
        "huggingface": is_huggingface,
        "megatron": is_megatron,
        "megatron-dist": is_megatron_dist,
        "megatron-deepspeed": is_deepspeed,
    }
)
"""Functions that recognize a format, by the format's name."""


def format_of(directory: Path) -> str | None:
    """Return the name of the format of the checkpoint in *directory*; None if none matches."""
    return next((name for name, matches in MATCHES.items() if matches(directory)), None)


def unrecognized(directory: Path) -> CheckpointError | None:
    """Return the error that says what *directory* lacks; None if it has no part of a checkpoint.

    Args:
        directory: Directory in which no format was recognized.
    """
    if not directory.is_dir() or format_of(directory) is not None:
        return None
    if (problem := incomplete_distributed(directory)) is not None:
        return problem
    if (directory / TRACKER_NAME).is_file():
        try:
            require_checkpoint(directory)
        except CheckpointError as error:
            return error
    snapshots = directory / "snapshots"
    for inside in (snapshots, directory):  # of the cache of huggingface_hub; of a trainer
        found = _checkpoints_in(inside)
        if found:
            return CheckpointArgumentError(
                f"no checkpoint in `{directory}`",
                why=f"its {'snapshots' if inside == snapshots else 'subdirectories'} have some",
                hint=f"did you mean `{found[-1]}`?",
            )
    parts = _parts(directory)
    if parts is None:
        return None
    why, hint = parts
    return CheckpointArgumentError(f"no checkpoint in `{directory}`", why=why, hint=hint)


def _parts(directory: Path) -> tuple[str, str] | None:
    """Return what an incomplete model in *directory* lacks, and a hint; None if there is none."""
    for name, why, hint in _OTHER_FORMS:
        if (directory / name).is_file():
            return f"{why} (`{name}`)", hint
    files = [path for pattern in _WEIGHTS for path in sorted(directory.glob(pattern))]
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


def _checkpoints_in(directory: Path) -> list[Path]:
    """Return the subdirectories with a checkpoint, the oldest first."""
    try:
        entries = [path for path in directory.iterdir() if path.is_dir()][:_MAX_ENTRIES]
        found = [path for path in entries if format_of(path) is not None]
        return sorted(found, key=lambda path: path.stat().st_mtime)
    except OSError:
        return []
