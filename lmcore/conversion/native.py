"""lmcore's own checkpoints as a `ModelState`, and a run directory written from any `ModelState`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.accelerator.dtype import dtype_name
from lmcore.checkpoint import (
    CheckpointReader,
    Manifest,
    TensorEntry,
    newest_verified,
    save_streamed,
    survey,
)
from lmcore.checkpoint.layout import CHECKPOINTS_NAME
from lmcore.config.section import run_options
from lmcore.conversion.continuing import shorter_length
from lmcore.conversion.state import ADAM, KEPT_OPTIONS, WEIGHT, ModelState, Progress
from lmcore.data.tokenizer.saved import save_tokenizer
from lmcore.errors import CheckpointError
from lmcore.model.parameters import has_known_parameters, parameter_shapes
from lmcore.model.saved_shape import read_shape
from lmcore.model.shape import ModelShape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lmcore.data.tokenizer import Tokenizer

__all__ = [
    "UNKNOWN_ORDER",
    "WEIGHT_PREFIX",
    "WITHOUT_OPTIMIZER",
    "LmcoreState",
    "recorded_type",
    "require_weights",
    "stored_name",
    "write_lmcore",
]

logger = logging.getLogger(__name__)

UNKNOWN_ORDER = ""
"""Value of `data_order` in a manifest that does not record the order of the training samples."""
WITHOUT_OPTIMIZER = "without_optimizer"
"""Key in `converted_from` of a manifest without an optimizer's state: why it is not read.

The reason is empty if the converted checkpoint had none.
"""
WEIGHT_PREFIX = "model."
"""Prefix of the names of weights in a checkpoint."""
_OPTIMIZER = "optimizer."
_ADAM_NAME = "adam"
_ADAM_OPTIONS = {
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_eps",
    "weight_decay": "weight_decay",
}
"""Options of the settings in `Progress.adam`."""


class LmcoreState(ModelState):
    """State in a checkpoint of lmcore, of any parallel layout; see `ModelState`.

    Attributes:
        checkpoint: Directory of the checkpoint, `iter_XXXXXXX`.
        manifest: Manifest of the checkpoint.
    """

    format = "lmcore"

    def __init__(self, path: Path, *, weights_only: bool = False) -> None:
        """Choose and verify the checkpoint; a warning names damaged ones that are passed over.

        Args:
            path: Run directory, its `checkpoints`, or one `iter_XXXXXXX`.
            weights_only: True to leave the state of Adam out.

        Raises:
            CheckpointError: There is no checkpoint, it is damaged, or its model is not known.
        """
        found = newest_verified(survey(path))
        warning = found.warning()
        if warning is not None:
            logger.warning("%s", warning)
        self.path, self.checkpoint, self.manifest = path, found.path, found.manifest
        self.shape = read_shape(self.manifest.model_shape, self.checkpoint)
        self._reader = CheckpointReader(self.checkpoint, self.manifest)
        if has_known_parameters(self.shape):
            require_weights(self.shape, self.manifest, self.checkpoint)
        meta = self.manifest.meta
        derived = _mapping(_mapping(meta.get("config")).get("derived"))
        size = derived.get("vocab_size")
        known = isinstance(size, int) and 0 < size <= self.shape.padded_vocab_size
        self.vocab_size = size if known else None
        if has_known_parameters(self.shape) and not weights_only:
            self.kinds, self.without_adam = self._read_kinds()
            reasons = [self.without_adam] if self.without_adam is not None else []
            left_out = "the state of its optimizer is left out"
            self.training_notes = [f"{left_out}: {reason}" for reason in reasons]
        self.tokenizer_type = recorded_type(meta)
        self.progress = self._progress()
        sections = _mapping(_mapping(meta.get("config")).get("config")).values()
        saved = {name: value for section in sections for name, value in _mapping(section).items()}
        self.settings = {name: saved[name] for name in KEPT_OPTIONS if saved.get(name) is not None}

    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        """Return the dtype of a tensor; see `ModelState`."""
        from lmcore.checkpoint.dcp_metadata import dtype_of

        return dtype_of(self.manifest.tensors[stored_name(name, kind)].dtype)

    def read(self, name: str, kind: str = WEIGHT) -> Tensor:
        """Return a whole tensor; see `ModelState`."""
        return self._reader.read(stored_name(name, kind))

    def _read_kinds(self) -> tuple[tuple[str, ...], str | None]:
        """Return the kinds of tensors, and why the state of the optimizer is left out, if it is."""
        if not any(name.startswith(_OPTIMIZER) for name in self.manifest.tensors):
            return (WEIGHT,), None
        reason = self._not_adam()
        return ((WEIGHT, *ADAM) if reason is None else (WEIGHT,)), reason

    def _not_adam(self) -> str | None:
        """Return why the state of the optimizer is not Adam's; None if it is."""
        from lmcore.checkpoint.dcp_metadata import dtype_of

        held = self.manifest.tensors
        optimizer = _saved_section(self.manifest.meta, "optimizer").get("optimizer")
        # Other optimizers have state of the same names: quantized, or averages of something else.
        if optimizer not in {None, _ADAM_NAME}:
            return f"it is that of `{optimizer}`, and only Adam's is converted"
        for name, size in self.parameters.items():
            for stored in (stored_name(name, kind) for kind in ADAM):
                entry = held.get(stored)
                if entry is None:
                    return f"it lacks `{stored}`"
                if entry.shape != size or not dtype_of(entry.dtype).is_floating_point:
                    found = f"{entry.dtype} {list(entry.shape)}"
                    return f"`{stored}` is {found}, and its parameter {list(size)}"
        return None

    def _progress(self) -> Progress | None:
        counters = _mapping(self.manifest.meta.get("counters"))
        values = [counters.get(name) for name in ("iteration", "consumed_samples")]
        if not all(type(value) is int and value >= 0 for value in values):
            return None
        steps = None
        if len(self.kinds) > 1:
            first = next(iter(self.parameters))
            if f"optimizer.step.{first}" in self.manifest.tensors:
                steps = int(self._reader.read(f"optimizer.step.{first}"))
        schedule = _mapping(self.manifest.meta.get("schedule")) or None
        adam, scale = None, None
        if len(self.kinds) > 1:
            adam = _adam(self.manifest.meta)
            saved = _mapping(self.manifest.meta.get("loss_scale"))
            scale = saved if "value" in saved else None  # a fixed one has no value
        position = counters.get("scheduled_samples")
        scheduled = position if type(position) is int and position >= 0 else None
        iteration, samples = (int(value or 0) for value in values)
        return Progress(iteration, samples, steps, schedule, adam, scheduled, scale)


def _adam(meta: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the settings of Adam of the run that wrote a checkpoint."""
    saved = _saved_section(meta, "optimizer")
    found = {name: saved.get(option) for name, option in _ADAM_OPTIONS.items()}
    known = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    return known or None


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


def write_lmcore(state: ModelState, directory: Path, tokenizer: Tokenizer | None) -> list[str]:
    """Write a state as a run directory and return what the user should know.

    Weights are written in float32, in which lmcore trains.

    Args:
        state: State of any format.
        directory: Directory of the new run.
        tokenizer: Tokenizer of the model; None: none is saved.

    Raises:
        CheckpointError, DataError: The disk is full or refuses, or *state* is damaged.
    """
    import torch

    progress = state.progress or Progress(0, 0)
    iteration = progress.iteration
    names = {
        stored_name(name, kind): (name, kind) for name in state.parameters for kind in state.kinds
    }
    shapes = parameter_shapes(state.shape)
    float32 = dtype_name(torch.float32)
    entries = {stored: TensorEntry(float32, shapes[name]) for stored, (name, _) in names.items()}
    steps: dict[str, str] = {}
    if len(state.kinds) > 1:
        steps = {f"optimizer.step.{name}": name for name in shapes}
        entries |= {stored: TensorEntry(float32, ()) for stored in steps}

    def read(stored: str) -> Tensor:
        if stored in steps:
            return torch.tensor(float(progress.optimizer_step or progress.iteration))
        return state.read(*names[stored]).float()

    directory.mkdir(parents=True, exist_ok=True)
    meta: dict[str, Any] = {
        "converted_from": _origin(state, tokenizer),
        "config": {
            "config": _settings(state, tokenizer),
            "derived": {"vocab_size": _tokens(state, tokenizer)},
        },
    }
    if state.progress is not None:
        meta["counters"] = {
            "iteration": iteration,
            "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.consumed_samples
            * state.settings.get("seq_length", state.shape.max_position_embeddings),
            "scheduled_samples": progress.position,
            "skipped_iterations": 0,
        }
        meta["data_order"] = UNKNOWN_ORDER
        if progress.schedule is not None:
            meta["schedule"] = dict(progress.schedule)
        if progress.loss_scale is not None:
            meta["loss_scale"] = dict(progress.loss_scale)
    if tokenizer is not None:
        described, fingerprint = tokenizer.describe(), tokenizer.fingerprint()
        meta["tokenizer"] = {"describe": described, "fingerprint": fingerprint}
        save_tokenizer(tokenizer, directory / "tokenizer")
    save_streamed(
        directory / CHECKPOINTS_NAME,
        iteration,
        entries,
        read,
        meta,
        model_shape=state.shape.to_dict(),
    )
    if tokenizer is None:
        return ["the run has no tokenizer: `lmcore generate` needs its options"]
    return []


def _origin(state: ModelState, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Return where a state comes from, and what is not in the run: tokenizer and optimizer."""
    origin = {"format": state.format, "name": state.path.absolute().name}
    if tokenizer is None and state.tokenizer_type is not None:
        origin["tokenizer_type"] = state.tokenizer_type
    if len(state.kinds) == 1:
        origin[WITHOUT_OPTIMIZER] = state.without_adam or ""
    return origin


def _tokens(state: ModelState, tokenizer: Tokenizer | None) -> int | None:
    """Return the number of tokens without rows of padding; None if it is not known."""
    return state.vocab_size or (tokenizer.vocab_size if tokenizer else None)


def _settings(state: ModelState, tokenizer: Tokenizer | None) -> dict[str, dict[str, Any]]:
    """Return the settings of a run that continues a state, by section and option."""
    tokens = _tokens(state, tokenizer)
    values: dict[str, Any] = state.shape.settings(tokens) | _adam_settings(state)
    values |= dict(state.settings)
    if (length := shorter_length(state)) is not None:
        values["seq_length"] = length
    if tokens is not None and (tokenizer is None or tokens > tokenizer.vocab_size):
        values["vocab_size"] = tokens
    if tokenizer is not None:
        described: dict[str, Any] = dict(tokenizer.describe())
        values |= {"tokenizer_type": described.pop("type")} | described
    options = run_options()
    values |= {name: options[name].default for name in ("split_rule", "blend_rule")}
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        found.setdefault(options[name].section, {})[name] = value
    return found


def _adam_settings(state: ModelState) -> dict[str, Any]:
    """Return the optimizer's settings, which a checkpoint may have without arguments of its run."""
    if len(state.kinds) == 1:
        return {}
    adam = (state.progress.adam if state.progress else None) or {}
    return {"optimizer": _ADAM_NAME} | {_ADAM_OPTIONS[name]: value for name, value in adam.items()}


def stored_name(name: str, kind: str) -> str:
    """Return the name of a tensor in a checkpoint of lmcore.

    Args:
        name: Name of the parameter.
        kind: Kind of tensor; see `ModelState`.
    """
    return f"{WEIGHT_PREFIX}{name}" if kind == WEIGHT else f"optimizer.{kind}.{name}"


def _saved_section(meta: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section of the settings of the run that wrote a checkpoint."""
    return _mapping(_mapping(_mapping(meta.get("config")).get("config")).get(name))


def _mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}
