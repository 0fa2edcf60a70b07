"""Description of a checkpoint whose files need torch, made in a separate process.

`lmcore train` knows the shape of its model before it loads torch, as plugins set the environment
that torch reads first.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lmcore.base.errors import CheckpointArgumentError, CheckpointError, LmcoreError
from lmcore.plugin import discover
from lmcore.plugin.isolation.subprocess_call import call_isolated
from lmcore.plugin.registrations import plugins_records

__all__ = ["describe", "describe_by_plugins", "describe_isolated"]

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

    try:
        state = WeightReader(Path(directory), name, compare=False).state
    except LmcoreError as error:
        parts = {"what": error.what, "why": error.why, "hint": error.hint}
        is_argument = error.exit_status == CheckpointArgumentError.exit_status
        return {"error": parts, "is_argument": is_argument}
    progress = state.progress if len(state.kinds) > 1 else None
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
        "iteration": progress.iteration if progress else None,
    }
