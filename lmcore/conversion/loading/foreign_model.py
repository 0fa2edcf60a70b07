"""Model in a checkpoint of another program: shape and tokenizer, without torch.

`lmcore train` needs both before the processes of a run load torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import CheckpointArgumentError, CheckpointError, LmcoreError
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.conversion.checkpoint_step import foreign_checkpoint
from lmcore.conversion.huggingface.tokenizer_files import tokenizer_settings
from lmcore.families.saved_shape import read_shape
from lmcore.model.checkpoint_format import format_of, formats, of_absent_plugin
from lmcore.plugin import discover
from lmcore.plugin.isolation.subprocess_call import call_isolated
from lmcore.plugin.registrations import plugins_records

if TYPE_CHECKING:
    from lmcore.model.shape import ModelShape


__all__ = [
    "ForeignModel",
    "describe",
    "describe_by_plugins",
    "describe_foreign",
    "describe_isolated",
]

_SECONDS = 600.0


def describe_isolated(directory: Path, name: str) -> dict[str, Any]:
    """Return the values of `describe`, without loading torch here.

    Args:
        directory: Directory of the checkpoint.
        name: Name of its format.

    Raises:
        CheckpointError: It is damaged, or lmcore does not have the model.
        CheckpointArgumentError: It is not a checkpoint of that format.
    """
    if "torch" in sys.modules:
        found = describe(str(directory), name)
    else:
        function = "describe_by_plugins" if plugins_records() else "describe"
        target = f"{__name__}:{function}"
        outcome = call_isolated(target, str(directory), name, timeout=_SECONDS)
        if not outcome.complete:
            raise CheckpointError(f"`{directory}` cannot be read", why=outcome.fault)
        found = outcome.value
    if "error" in found:
        kind = CheckpointArgumentError if found["is_argument"] else CheckpointError
        raise kind(**found["error"])
    return found


def describe_by_plugins(directory: str, name: str) -> dict[str, Any]:
    """Return the values of `describe` where a plugin may bring the format or the family."""
    discover(probe=False)
    return describe(directory, name)


def describe(directory: str, name: str) -> dict[str, Any]:
    """Return the attributes of a `ForeignModel`, or the error, as JSON values.

    Checksums are compared when the tensors are loaded: here they would take as long as reading all
    files.

    Args:
        directory: Directory of the checkpoint.
        name: Name of its format.
    """
    from lmcore.conversion.huggingface.read import HuggingFaceState
    from lmcore.conversion.loading.weights import WeightReader
    from lmcore.conversion.native.write import run_meta

    try:
        state = WeightReader(Path(directory), name, compare=False).state
    except LmcoreError as error:
        parts = {"what": error.what, "why": error.why, "hint": error.hint}
        is_argument = error.exit_status == CheckpointArgumentError.exit_status
        return {"error": parts, "is_argument": is_argument}
    progress = state.progress
    continues = progress is not None and progress.iteration > 0 and len(state.kinds) > 1
    rows = state.shape.padded_vocab_size
    # Rows without a token are a part of the vocabulary in a model of transformers.
    tokens = rows if isinstance(state, HuggingFaceState) else state.vocab_size
    return {
        "shape": state.shape.to_dict(),
        "vocab_size": tokens,
        "tokenizer": None if state.tokenizer is None else state.tokenizer.describe(),
        "tokenizer_type": state.tokenizer_type,
        "precision": state.settings.get("precision"),
        "notes": list(state.notes),
        "step": progress.iteration if progress is not None else None,
        "meta": run_meta(state, None) if continues else None,
        "kinds": list(state.kinds),
        "training_notes": list(state.training_notes),
    }


@dataclass(frozen=True)
class ForeignModel:
    """Model in a checkpoint of another program.

    Attributes:
        path: Directory of the checkpoint.
        format: Name of the format.
        shape: Shape of the model.
        vocab_size: Number of tokens without padding rows; None if it is not known.
        tokenizer, tokenizer_type: See `ModelState`.
        precision: Precision of its run; None if it is not recorded.
        notes: Differences between the checkpoint and the model of lmcore, for the user.
        step: Number of steps of its run; None if it is not recorded.
        meta: Manifest's `meta` of a run that continues it; None if it has no state of an optimizer.
        kinds: Kinds of tensors that it has; see `ModelState`.
        training_notes: Differences in training that only a run that continues has.
    """

    path: Path
    format: str
    shape: ModelShape
    vocab_size: int | None
    tokenizer: TokenizerSettings | None = None
    tokenizer_type: str | None = None
    precision: str | None = None
    notes: tuple[str, ...] = ()
    step: int | None = None
    meta: Mapping[str, Any] | None = None
    kinds: tuple[str, ...] = ()
    training_notes: tuple[str, ...] = ()


def describe_foreign(directory: Path, step: str | None = None) -> ForeignModel | None:
    """Return the model in a checkpoint of another program; None if there is no such checkpoint.

    Args:
        directory: Directory that the program saved to, or one checkpoint in it.
        step: Step of the checkpoint, as in `--ckpt-step`; None: the newest.

    Raises:
        CheckpointError: It is damaged, of no such step, or lmcore does not have the model.
        ConfigError: The checkpoint has no steps.
    """
    if step is not None:
        directory = foreign_checkpoint(directory, step) or directory
    name = format_of(directory)
    if name is None and (problem := of_absent_plugin(directory)) is not None:
        raise problem
    if name is None or name == "lmcore":
        return None
    found = describe_isolated(directory, name)
    shape = read_shape(found["shape"], directory)
    described = found["tokenizer"]
    tokenizer = None if described is None else TokenizerSettings.described(described)
    if tokenizer is None:
        places = formats()[name].tokenizer_places(directory)
        tokenizer = next((one for one in map(tokenizer_settings, places) if one is not None), None)
    return ForeignModel(
        directory,
        name,
        shape,
        found["vocab_size"],
        tokenizer=tokenizer,
        tokenizer_type=found["tokenizer_type"],
        precision=found["precision"],
        notes=tuple(found["notes"]),
        step=found["step"],
        meta=found["meta"],
        kinds=tuple(found["kinds"]),
        training_notes=tuple(found["training_notes"]),
    )
