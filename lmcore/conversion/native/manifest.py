"""Manifest of a checkpoint of lmcore: tensor names, and the records of a conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import CheckpointError
from lmcore.conversion.state import WEIGHT
from lmcore.model.family import parameter_shapes

if TYPE_CHECKING:
    from lmcore.checkpoint import Manifest
    from lmcore.model.shape import ModelShape

__all__ = [
    "ADAM_NAME",
    "ADAM_OPTIONS",
    "OPTIMIZER_PREFIX",
    "RANDOM_STATES",
    "STEP",
    "UNKNOWN_ORDER",
    "WEIGHT_PREFIX",
    "WITHOUT_OPTIMIZER",
    "recorded_type",
    "require_weights",
    "stored_name",
    "stored_tensors",
]

UNKNOWN_ORDER = ""
"""Value of `data_order` in a manifest that does not record the order of the training samples."""
WITHOUT_OPTIMIZER = "without_optimizer"
"""Key in `converted_from` of a manifest without an optimizer's state, for the reason.

The reason is empty if the converted checkpoint had none.
"""
WEIGHT_PREFIX = "model."
"""Prefix of the names of weights in a checkpoint."""
RANDOM_STATES = "rng."
"""Prefix of the names of random states."""
OPTIMIZER_PREFIX = "optimizer."
"""Prefix of the names of the optimizer's tensors."""
STEP = "step"
"""Kind of tensor: the number of updates of a parameter by the optimizer, without a dim."""
ADAM_NAME = "adam"
"""Value of the option `optimizer` for Adam."""
ADAM_OPTIONS = {
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_eps",
    "weight_decay": "weight_decay",
}
"""Options of the settings in `Progress.adam`."""


def stored_name(name: str, kind: str) -> str:
    """Return the name of a tensor in a checkpoint of lmcore.

    Args:
        name: Name of the parameter.
        kind: Kind of tensor; see `ModelState`.
    """
    return f"{WEIGHT_PREFIX}{name}" if kind == WEIGHT else f"{OPTIMIZER_PREFIX}{kind}.{name}"


def stored_tensors(shape: ModelShape, kinds: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return parameter and kind of each tensor of a run by its name in a checkpoint of lmcore.

    Args:
        shape: Shape of the model.
        kinds: Kinds of tensors that a state has; beside the optimizer's there is `STEP`.
    """
    every = [*kinds, STEP] if len(kinds) > 1 else kinds
    return {
        stored_name(name, kind): (name, kind) for kind in every for name in parameter_shapes(shape)
    }


def recorded_type(meta: Mapping[str, Any]) -> str | None:
    """Return the type of the tokenizer if a converted checkpoint has only its name.

    Args:
        meta: The `meta` of its manifest.
    """
    converted = meta.get("converted_from")
    named = converted.get("tokenizer_type") if isinstance(converted, Mapping) else None
    return named if isinstance(named, str) and "tokenizer" not in meta else None


def require_weights(shape: ModelShape, manifest: Manifest, checkpoint: Path) -> None:
    """Raise an error unless a checkpoint has exactly the weights of its shape; read none.

    Args:
        shape: Shape of the model.
        manifest: Manifest of the checkpoint.
        checkpoint: Directory of the checkpoint, for error messages.

    Raises:
        CheckpointError: A weight is missing, surplus, or has another shape.
    """
    names = {WEIGHT_PREFIX + name: size for name, size in parameter_shapes(shape).items()}
    for name, size in names.items():
        entry = manifest.tensors.get(name)
        if entry is None or entry.shape != size:
            found = "lacks it" if entry is None else f"has {list(entry.shape)}"
            raise CheckpointError(
                f"the weights of checkpoint `{checkpoint}` do not fit its shape",
                why=f"`{name}` should have shape {list(size)}; the checkpoint {found}",
            )
    unknown = [
        name for name in manifest.tensors if name.startswith(WEIGHT_PREFIX) and name not in names
    ]
    if unknown:
        raise CheckpointError(
            f"the weights of checkpoint `{checkpoint}` do not fit its shape",
            why=f"`{unknown[0]}` does not belong to a model of that shape",
        )
