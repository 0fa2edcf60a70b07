"""Writing of a run directory of lmcore from any `ModelState`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.checkpoint import TensorEntry, save_streamed
from lmcore.checkpoint.layout import CHECKPOINTS_NAME
from lmcore.config.section import run_options
from lmcore.contract.dtype import dtype_name
from lmcore.conversion.native.continuing import shorter_length
from lmcore.conversion.native.manifest import (
    ADAM_NAME,
    ADAM_OPTIONS,
    STEP,
    UNKNOWN_ORDER,
    WITHOUT_OPTIMIZER,
    stored_tensors,
)
from lmcore.conversion.state import ModelState, Progress
from lmcore.data.tokenizer.saved import save_tokenizer
from lmcore.model.family import parameter_shapes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lmcore.data.tokenizer import Tokenizer

__all__ = ["run_meta", "write_lmcore"]


def write_lmcore(
    state: ModelState,
    directory: Path,
    tokenizer: Tokenizer | None,
    *,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Write a state as a run directory and return notes for the user.

    Weights are written in float32, in which lmcore trains.

    Args:
        state: State of any format.
        directory: Directory of the new run.
        tokenizer: Tokenizer of the model; None: none is saved.
        dtype: Without effect.

    Raises:
        CheckpointError, DataError: The disk is full or refuses, or *state* is damaged.
    """
    import torch

    del dtype
    progress = state.progress or Progress(0, 0)
    iteration = progress.iteration
    names = stored_tensors(state.shape, state.kinds)
    shapes = parameter_shapes(state.shape)
    float32 = dtype_name(torch.float32)
    entries = {
        stored: TensorEntry(float32, () if kind == STEP else shapes[name])
        for stored, (name, kind) in names.items()
    }

    def read(stored: str) -> Tensor:
        name, kind = names[stored]
        if kind == STEP:
            return torch.tensor(float(progress.optimizer_step or progress.iteration))
        return state.read(name, kind).float()

    directory.mkdir(parents=True, exist_ok=True)
    meta = run_meta(state, tokenizer)
    if tokenizer is not None:
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


def run_meta(state: ModelState, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the `meta` of the manifest of a run that continues a state.

    Args:
        state: State of any format.
        tokenizer: Tokenizer of the model; None: it is not known.
    """
    progress = state.progress
    meta: dict[str, Any] = {
        "converted_from": _origin(state, tokenizer),
        "config": {
            "config": _settings(state, tokenizer),
            "derived": {"vocab_size": _tokens(state, tokenizer)},
        },
    }
    if progress is not None:
        meta["counters"] = {
            "iteration": progress.iteration,
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
    return meta


def _origin(state: ModelState, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Return the origin of a state, with the tokenizer and optimizer that the run lacks."""
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
    return {"optimizer": ADAM_NAME} | {ADAM_OPTIONS[name]: value for name, value in adam.items()}
