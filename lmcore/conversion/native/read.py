"""`LmcoreState`: one of lmcore's own checkpoints as a `ModelState`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import several
from lmcore.checkpoint import CheckpointReader, newest_verified, survey
from lmcore.conversion.native.manifest import (
    ADAM_NAME,
    ADAM_OPTIONS,
    OPTIMIZER_PREFIX,
    RANDOM_STATES,
    recorded_type,
    require_weights,
    stored_name,
)
from lmcore.conversion.state import (
    ADAM,
    KEPT_OPTIONS,
    WEIGHT,
    ModelState,
    Progress,
    known_settings,
)
from lmcore.families.saved_shape import is_number, read_shape
from lmcore.optim.schedule import wrong_fields

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["LmcoreState"]

logger = logging.getLogger(__name__)

_SCALE = ("value", "good_steps", "tolerance")
"""State of a `DynamicLossScale`."""


class LmcoreState(ModelState):
    """State in a checkpoint of lmcore, of any parallel layout; see `ModelState`.

    Attributes:
        checkpoint: Directory of the checkpoint, `iter_XXXXXXX`.
        manifest: Manifest of the checkpoint.
    """

    format = "lmcore"

    def __init__(self, path: Path, *, weights_only: bool = False, compare: bool = True) -> None:
        """Choose and verify the checkpoint; a warning names damaged ones that are skipped.

        Args:
            path: Run directory, its `checkpoints`, or one `iter_XXXXXXX`.
            weights_only: True to leave the state of Adam out.
            compare: Without effect: tensors are compared with their checksums as they are read.

        Raises:
            CheckpointError: There is no checkpoint, it is damaged, or its model is not known.
        """
        del compare
        found = newest_verified(survey(path))
        warning = found.warning()
        if warning is not None:
            logger.warning("%s", warning)
        self.path, self.checkpoint, self.manifest = path, found.path, found.manifest
        self.shape = read_shape(self.manifest.model_shape, self.checkpoint)
        self._reader = CheckpointReader(self.checkpoint, self.manifest)
        require_weights(self.shape, self.manifest, self.checkpoint)
        meta = self.manifest.meta
        derived = _mapping(_mapping(meta.get("config")).get("derived"))
        size = derived.get("vocab_size")
        known = isinstance(size, int) and 0 < size <= self.shape.padded_vocab_size
        self.vocab_size = size if known else None
        if not weights_only:
            self.kinds, self.without_adam = self._read_kinds()
            reasons = [self.without_adam] if self.without_adam is not None else []
            left_out = "the state of its optimizer is left out"
            self.training_notes = [f"{left_out}: {reason}" for reason in reasons]
        self.notes, state = self._unread()
        self.training_notes = [*self.training_notes, *([] if weights_only else state)]
        self.tokenizer_type = recorded_type(meta)
        self.progress = self._progress()
        sections = _mapping(_mapping(meta.get("config")).get("config")).values()
        saved = {name: value for section in sections for name, value in _mapping(section).items()}
        self.settings = known_settings(saved, KEPT_OPTIONS)
        given = (name for name in KEPT_OPTIONS if saved.get(name) not in (None, []))
        if unknown := [name for name in given if name not in self.settings]:
            note = f"not read: the settings {several(unknown)}, which have values of no option"
            self.training_notes = [*self.training_notes, note]

    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        """Return the dtype of a tensor; see `ModelState`."""
        from lmcore.checkpoint.dcp_metadata import dtype_of

        return dtype_of(self.manifest.tensors[stored_name(name, kind)].dtype)

    def read(self, name: str, kind: str = WEIGHT) -> Tensor:
        """Return a whole tensor; see `ModelState`."""
        return self._reader.read(stored_name(name, kind))

    def _read_kinds(self) -> tuple[tuple[str, ...], str | None]:
        """Return the kinds of tensors, and why the state of the optimizer is left out, if it is."""
        if not any(name.startswith(OPTIMIZER_PREFIX) for name in self.manifest.tensors):
            return (WEIGHT,), None
        reason = self._not_adam()
        return ((WEIGHT, *ADAM) if reason is None else (WEIGHT,)), reason

    def _unread(self) -> tuple[list[str], list[str]]:
        """Return notes that name tensors which are not read: others, and the optimizer's.

        Random states belong to a run, and no conversion takes them.
        """
        kinds = (*self.kinds, "step") if len(self.kinds) > 1 else self.kinds
        known = {stored_name(name, kind) for name in self.parameters for kind in kinds}
        held = (name for name in self.manifest.tensors if not name.startswith(RANDOM_STATES))
        names = [name for name in held if name not in known]
        state = [name for name in names if name.startswith(OPTIMIZER_PREFIX)]
        other = [name for name in names if not name.startswith(OPTIMIZER_PREFIX)]
        return (
            [f"not read: {several(other)}"] if other else [],
            [f"not read: {several(state)}"] if state and self.without_adam is None else [],
        )

    def _not_adam(self) -> str | None:
        """Return why the state of the optimizer is not Adam's; None if it is."""
        from lmcore.checkpoint.dcp_metadata import dtype_of

        held = self.manifest.tensors
        optimizer = _saved_section(self.manifest.meta, "optimizer").get("optimizer")
        # Other optimizers have state of the same names: quantized, or averages of something else.
        if optimizer is not None and optimizer != ADAM_NAME:
            return f"it is that of `{optimizer!s:.80}`, and only Adam's is converted"
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
        saved_schedule = _mapping(self.manifest.meta.get("schedule"))
        schedule = None if wrong_fields(saved_schedule) else saved_schedule
        adam, scale = None, None
        if len(self.kinds) > 1:
            adam = _adam(self.manifest.meta)
            saved = _mapping(self.manifest.meta.get("loss_scale"))
            valid = all(is_number(saved.get(name)) for name in _SCALE)  # a fixed one has no value
            scale = saved if valid else None
        position = counters.get("scheduled_samples")
        scheduled = position if type(position) is int and position >= 0 else None
        iteration, samples = (int(value or 0) for value in values)
        return Progress(iteration, samples, steps, schedule, adam, scheduled, scale)


def _adam(meta: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the settings of Adam of the run that wrote a checkpoint."""
    saved = _saved_section(meta, "optimizer")
    found = {name: saved.get(option) for name, option in ADAM_OPTIONS.items()}
    known = {name: float(value) for name, value in found.items() if is_number(value)}
    return known or None


def _saved_section(meta: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section of the settings of the run that wrote a checkpoint."""
    return _mapping(_mapping(_mapping(meta.get("config")).get("config")).get(name))


def _mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}
