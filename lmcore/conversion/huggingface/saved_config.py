"""Reading of the `config.json` of Hugging Face as a shape of lmcore, by a family's architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import CheckpointArgumentError, CheckpointError
from lmcore.conversion.huggingface.directory import CONFIG_NAME
from lmcore.families.saved_shape import read_shape
from lmcore.model.architecture import Architecture, ConfigReader, architectures
from lmcore.model.shape import ModelShape

__all__ = ["HFConfig", "read_config"]

_MAX_BYTES = 16 * 1024 * 1024
_COPY = "download or copy the file again"
_HINT = "convert it with the program that it belongs to, or use a supported model"


@dataclass(frozen=True)
class HFConfig:
    """Model described by a `config.json`.

    Attributes:
        architecture: Architecture of transformers.
        shape: Shape of the model.
        notes: Differences between the model and lmcore's, for the user.
        zeros: Pattern of the names of parameters that are 0; see `ConfigReader`.
    """

    architecture: Architecture
    shape: ModelShape
    notes: tuple[str, ...] = ()
    zeros: str = ""


def read_config(directory: Path) -> HFConfig:
    """Read the `config.json` of *directory*.

    Raises:
        CheckpointError: It is missing or damaged, or lmcore does not have the architecture.
    """
    path = directory / CONFIG_NAME
    try:
        config = json.loads(read_bounded_file(path, _MAX_BYTES))
    except OSError as error:
        raise CheckpointArgumentError(
            f"cannot read `{path}`",
            why=error.strerror or str(error),
            hint=f"give the directory that has the model's `{CONFIG_NAME}`",
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"`{path}` is not JSON", why=str(error), hint=_COPY) from None
    if not isinstance(config, dict):
        why = "it is no object"
        raise CheckpointError(f"`{path}` is not a model configuration", why=why, hint=_COPY)
    name, known = config.get("model_type"), architectures()
    if not isinstance(name, str) or name not in known:
        listed = ", ".join(f"`{one}`" for one in sorted(known))
        raise CheckpointError(
            f"lmcore has no model of type `{name!s:.80}`",
            why=f"`{path}` names it; supported are {listed}",
            hint=_HINT,
        )
    reader, kind = ConfigReader(path, config), known[name]
    _require_plain(reader, kind)
    values = kind.read(reader)
    return HFConfig(kind, _shape(path, values), tuple(reader.notes), reader.zeros)


def _require_plain(reader: ConfigReader, kind: Architecture) -> None:
    """Refuse quantized weights, and a model for another task."""
    settings = reader.config.get("quantization_config")
    if settings is not None:
        method = settings.get("quant_method") if isinstance(settings, Mapping) else None
        raise CheckpointError(
            f"the weights of `{reader.path.parent}` are quantized",
            why=f"`{reader.path.name}` has `quantization_config` (`{method}`)",
            hint="load the model that was quantized",
        )
    named = reader.config.get("architectures")
    for name in named if isinstance(named, list) else ():
        if isinstance(name, str) and kind.other_classes.fullmatch(name):
            raise reader.unsupported(f"it is a `{name}`, not {kind.purpose}")


def _shape(path: Path, values: Mapping[str, object]) -> ModelShape:
    try:
        return read_shape(values, path.parent)
    except CheckpointError as error:
        error.what, error.hint = f"`{path}` describes no model", _COPY
        raise
