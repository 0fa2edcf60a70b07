"""`TransformersDeepSpeedState`: a model of transformers in a checkpoint of DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmcore.base.errors import CheckpointError, counted
from lmcore.conversion.huggingface.directory import CONFIG_NAME
from lmcore.conversion.huggingface.read import HuggingFaceState
from lmcore.conversion.megatron.optimizer.moments import require_rounded
from lmcore.conversion.megatron.run.saved_arguments import saved_layout
from lmcore.conversion.state import WEIGHT
from lmcore_deepspeed.checkpoint.directory import UNIVERSAL_PART, DeepSpeedDirectory
from lmcore_deepspeed.checkpoint.missing_files import require_files, universal_file
from lmcore_deepspeed.checkpoint.opened import OpenedCheckpoint
from lmcore_deepspeed.checkpoint.rank_tensors import RankTensors, open_ranks, universal_tensors
from lmcore_deepspeed.checkpoint.saved_run import (
    read_kinds,
    recorded_precision,
    run_progress,
    saved_precision,
)

__all__ = ["TransformersDeepSpeedState"]


class TransformersDeepSpeedState(HuggingFaceState):
    """Model of transformers that DeepSpeed trained, and the state of Adam; see `ModelState`.

    Attributes:
        checkpoint: Directory of the checkpoint, such as `global_step100`.
    """

    format = "DeepSpeed"

    def __init__(self, opened: OpenedCheckpoint) -> None:
        """Open the files of all ranks and compare their tensors with the `config.json` beside.

        Args:
            opened: Checkpoint.

        Raises:
            CheckpointError: There is no `config.json`, a file is missing or damaged, or the
                tensors do not fit the configuration.
        """
        files, content, weights_only = opened.files, opened.content, opened.weights_only
        self.checkpoint, self._universal = files.path, files.universal
        places = dict.fromkeys((opened.path, files.path, files.path.parent))
        described = next((one for one in places if (one / CONFIG_NAME).is_file()), None)
        if described is None:
            raise CheckpointError(
                f"`{files.path}` does not say which model it has",
                why="it lacks the arguments that Megatron-DeepSpeed saves (`args`), and there is "
                f"no `{CONFIG_NAME}` of transformers in `{files.path.parent}`",
                hint=f"copy the model's `{CONFIG_NAME}` and its tokenizer files there",
            )
        self._own: RankTensors | None = None
        if files.universal is not None:
            rank = universal_tensors(files, files.universal, content, weights_only=weights_only)
            self.part = UNIVERSAL_PART
        else:
            _require_no_tensor_parallelism(files, content)
            [rank] = open_ranks(files, content, 1, 1, weights_only=weights_only)
        self._rank = rank
        super().__init__(described, weights=rank)
        self.path = opened.path
        self.settings = saved_precision(content)
        self.precision = recorded_precision(content)
        sizes = {"tensor": "mp_world_size", "data": "dp_world_size"}
        self.layout = saved_layout({}, **{axis: content.get(name) for axis, name in sizes.items()})
        dtypes = {rank.tensors[one].dtype for one in self._names.values()}
        self.notes = [*self.notes, *opened.notes(dtypes)]
        if not weights_only:
            names = list(self._names.values())
            self.kinds, self.without_adam = read_kinds(files, content, [rank], [names])
            if self.without_adam is not None:
                self.notes = [*self.notes, f"the state of Adam is not read: {self.without_adam}"]
        if files.universal is not None and files.models and not weights_only:
            bare = files.without_optimizer()
            [self._own] = open_ranks(bare, content, 1, 1, weights_only=True)
        self.progress = run_progress(content, {}, rank, adam=len(self.kinds) > 1)

    def _matched(self) -> dict[str, str]:
        """Return the name in the files of each tensor; a universal checkpoint has files of each."""
        if self._universal is not None:
            held = self._rank.tensors
            needed = [source for recipe in self._recipes.values() for source in recipe.sources]
            lacking = [name for name in needed if not {name, name.partition(".")[2]} & held.keys()]
            files = [universal_file(self._universal, name) for name in lacking]
            hint = f"copy all of its files again, or the `{CONFIG_NAME}` of this model"
            require_files(self.checkpoint, files, hint=hint)
        return super()._matched()

    @property
    def files(self) -> Path:
        """Directory of the files that are read: one checkpoint, or its universal part."""
        return self._universal or self.checkpoint

    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        """Return the dtype of a tensor; see `ModelState`."""
        if kind == WEIGHT:
            return super().dtype(name)
        sources = [self._names[source] for source in self._recipes[name].sources]
        return self._rank.dtype(sources[0], kind) if sources else torch.float32

    def read(self, name: str, kind: str = WEIGHT) -> Tensor:
        """Return a whole tensor; see `ModelState`."""
        recipe = self._recipes[name]
        names = [self._names[one] for one in recipe.sources]
        parts = [self._rank.read(one, kind) for one in names]
        for one, part in zip(names, parts, strict=True):
            if kind == WEIGHT and self._own is not None and one in self._own.tensors:
                require_rounded(self.checkpoint, one, part, self._own.read(one))
        return recipe.join([part.to(self.dtype(name, kind)) for part in parts]).contiguous()


def _require_no_tensor_parallelism(files: DeepSpeedDirectory, content: Mapping[str, Any]) -> None:
    """Raise a `CheckpointError` if a model of transformers is divided, as AutoTP does."""
    ranks = set(files.models) | {rank for _, rank in files.partitions}
    size = content.get("mp_world_size", 1)
    if size == 1 and not ranks - {0}:
        return
    count = max(len(ranks), size if type(size) is int else 1)
    source, target = files.path, files.path.with_name(f"{files.path.name}_universal")
    raise CheckpointError(
        f"`{files.path}` cannot be read",
        why=f"its model is divided over {counted(count, 'rank')} of tensor parallelism by "
        "DeepSpeed's AutoTP, whose rules lmcore does not have",
        hint="convert it to a universal checkpoint with DeepSpeed: `python -m "
        f"deepspeed.checkpoint.ds_to_universal --input_folder {source} --output_folder {target}`",
    )
