"""Writing of Megatron's rank files, for any number of tensor, pipeline and virtual stages.

`torch.save` needs the whole content of a file in memory, so memory is bounded by the largest file,
one rank's share of the model and of its optimizer, and one tensor.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.base.durable import write_atomically
from lmcore.conversion.cast import cast
from lmcore.conversion.megatron.directory import (
    TRACKER_NAME,
    directory_name,
    rank_name,
    tracked_name,
)
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.parameters.names import STYLES, require_names
from lmcore.conversion.megatron.parameters.packing import Packing
from lmcore.conversion.megatron.parameters.vocabulary import padded_parts, padded_shape
from lmcore.conversion.megatron.rank_files.optimizer import moments_content
from lmcore.conversion.megatron.run.schedule import schedule_content
from lmcore.conversion.megatron.run.written_arguments import VERSION, run_arguments, start_notes
from lmcore.conversion.state import WEIGHT
from lmcore.conversion.torch_file import save_file, separate
from lmcore.model.megatron_names import names_for

if TYPE_CHECKING:
    from lmcore.conversion.state import ModelState
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.model.shape import ModelShape

__all__ = ["nested", "write_megatron"]

_WHOLE = Layout()
_JOINED = re.compile(r"(?:\w+_model\.)?language_model\.(?:encoder|decoder|pooler)|lm_head")
"""Modules whose names inside stay joined in the files before megatron-core."""
_FLAGS = {"core": "", "core-local": " --transformer-impl local", "legacy": " --use-legacy-models"}


def write_megatron(
    state: ModelState,
    directory: Path,
    tokenizer: Tokenizer | None,
    *,
    layout: Layout = _WHOLE,
    style: str = STYLES[0],
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Write a model into *directory* as Megatron's rank files; return notes for the user.

    Args:
        state: Model to write.
        directory: Empty directory.
        tokenizer: Tokenizer of the model, whose name is recorded; None: it is not known.
        layout: Parallel layout.
        style: Set of names, one of `STYLES`.
        dtype: Dtype of the weights: float32, float16 or bfloat16.

    Raises:
        CheckpointError: The layout cannot divide the model, or *state* is damaged.
        OSError: The file system refuses.
    """
    require_names(state, "Megatron-LM", names_for(state.shape), style)
    layout.check(state.shape)
    shape = padded_shape(state, layout.tensor)
    progress = state.progress
    arguments = run_arguments(state, shape, tokenizer, layout, dtype)
    for stage in range(layout.pipeline):
        for rank in range(layout.tensor):
            writer = _Rank(state, shape, layout, style, dtype, rank, stage)
            path = (
                directory
                / directory_name(state)
                / rank_name(rank, stage, pipeline=layout.pipeline > 1)
            )
            path.mkdir(parents=True, exist_ok=True)
            content = {"args": arguments, "checkpoint_version": VERSION}
            content |= {"iteration": progress.iteration if progress else 0, **writer.content()}
            content |= schedule_content(progress)
            save_file(content, path / "model_optim_rng.pt")
    write_atomically(directory / TRACKER_NAME, tracked_name(state))
    flags = "--ckpt-format torch" + _FLAGS[style]
    notes = start_notes(state, layout, flags, optimizer=len(state.kinds) > 1)
    return [*_precision_notes(state, dtype), *notes]


def _precision_notes(state: ModelState, dtype: torch.dtype) -> list[str]:
    """Return a note if the state of the optimizer is not written for the run's own precision."""
    precision = state.settings.get("precision")
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(precision))
    if len(state.kinds) == 1 or wanted is None or wanted == dtype:
        return []
    given, other = (str(one).removeprefix("torch.") for one in (dtype, wanted))
    note = (
        f"the run's precision is {precision}, and the state of its optimizer is written for a "
        f"Megatron run in {given}: `--dtype {other}` writes it for `--{precision}`"
    )
    return [note]


class _Rank:
    """Content of one rank's file."""

    def __init__(
        self,
        state: ModelState,
        shape: ModelShape,
        layout: Layout,
        style: str,
        dtype: torch.dtype,
        rank: int,
        stage: int,
    ) -> None:
        self._state, self._shape, self._layout, self._style = state, shape, layout, style
        self._dtype, self._rank, self._stage = dtype, rank, stage
        self._packing = Packing(shape, layout.tensor)
        names = names_for(shape)
        assert names is not None
        self._names = names

    def content(self) -> dict[str, Any]:
        """Return the model by part, and the state of Adam if there is any."""
        found: dict[str, Any] = {}
        shares = []
        for part in range(self._layout.virtual):
            flat = {}
            for foreign, name in self._layout.parameters(
                self._shape, self._stage, part, self._style
            ):
                share = {kind: self._share(name, kind) for kind in self._state.kinds}
                flat[foreign] = cast(name, share[WEIGHT], self._dtype)
                if (second := self._names.second_name(foreign)) is not None:
                    flat[second] = flat[foreign]
                shares.append(share)
            key = "model" if self._layout.virtual == 1 else f"model{part}"
            found[key] = nested(flat) if self._style == "legacy" else flat
        if len(self._state.kinds) > 1:
            found["optimizer"] = moments_content(
                shares,
                self._dtype,
                self._state.progress,
                step_of_parameters=self._style != "core",
            )
        return found

    def _share(self, name: str, kind: str) -> Tensor:
        """Return the rank's part of a tensor in float32, with separate memory."""
        tensor = self._state.read(name, kind).float()
        return separate(padded_parts(self._packing, name, tensor)[self._rank])


def nested(flat: dict[str, Tensor]) -> dict[str, Any]:
    """Return the nested mappings of the models before megatron-core.

    The names in the stack of layers, the pooler and the head stay joined by dots.

    Args:
        flat: Tensors by name.
    """
    found: dict[str, Any] = {}
    for name, tensor in flat.items():
        joined = _JOINED.match(name)
        owner = joined[0] if joined else name.rpartition(".")[0]
        place = found
        for key in owner.split("."):
            place = place.setdefault(key, {})
        place[name.removeprefix(f"{owner}.")] = tensor
    return found
