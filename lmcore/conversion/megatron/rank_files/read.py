"""`MegatronState`: a model in rank files of Megatron, under lmcore's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lmcore.base.errors import CheckpointError, counted
from lmcore.conversion.cast import FLOAT_DTYPES
from lmcore.conversion.megatron.checkpoint_state import MegatronCheckpointState
from lmcore.conversion.megatron.directory import rank_count, rank_files, require_ranks
from lmcore.conversion.megatron.optimizer.loss_scale import unknown_scale_notes
from lmcore.conversion.megatron.optimizer.moments import Moments, UnreadOptimizer, require_rounded
from lmcore.conversion.megatron.parameters.names import EMBEDDING, TIED
from lmcore.conversion.megatron.parameters.packing import Packing, require_order
from lmcore.conversion.megatron.rank_files.optimizer import read_moments
from lmcore.conversion.megatron.rank_files.rank_file import Part, RankFile
from lmcore.conversion.megatron.run.saved_arguments import read_model, require_known
from lmcore.conversion.megatron.run.schedule import SavedSchedule, read_schedule
from lmcore.conversion.state import (
    ADAM,
    WEIGHT,
    OptimizerStateError,
    Progress,
    require_no_problems,
)
from lmcore.conversion.unread import different_copy, require_computed, same_values
from lmcore.model.family import parameter_shapes
from lmcore.model.megatron_names import names_of_tensors

__all__ = ["MegatronState"]


class MegatronState(MegatronCheckpointState):
    """Model, and the state of Adam if it is there, in rank files; see `ModelState`."""

    format = "Megatron-LM"

    def _open(self, *, weights_only: bool, compare: bool) -> None:
        checkpoint = self.checkpoint
        files = rank_files(checkpoint)
        self._files = [
            [
                RankFile(files.ranks[rank, stage], compare=compare)
                for rank in range(files.tensor_size)
            ]
            for stage in range(files.pipeline_size)
            if all((rank, stage) in files.ranks for rank in range(files.tensor_size))
        ]
        args = self._files[0][0].args if self._files else {}
        # Ranks of experts have the names of stages, or further numbers.
        require_known(args, checkpoint)
        tensor = args.get("tensor_model_parallel_size", args.get("model_parallel_size"))
        require_ranks(
            files,
            rank_count(checkpoint, "tensor_model_parallel_size", tensor, files.tensor_size),
            rank_count(
                checkpoint,
                "pipeline_model_parallel_size",
                args.get("pipeline_model_parallel_size"),
                files.pipeline_size,
            ),
        )
        self._require_one_iteration()
        ranks = [rank for stage in self._files for rank in stage]
        names = names_of_tensors({name for rank in ranks for name in rank.names})
        if len(names.stacks) > 1 and files.pipeline_size > 1:
            raise CheckpointError(
                f"`{checkpoint}` is of a model with several stacks of layers, in "
                f"{counted(files.pipeline_size, 'stage')}",
                why="its stages are read of models with one stack alone",
                hint="save it by Megatron with `--ckpt-format torch_dist`, which any layout reads",
            )
        for rank in ranks:
            rank.open_parts(names)
        self._number_layers()
        self._name_embedding()
        sizes = {
            name: tuple(tensor.shape)
            for _, part in self._all_parts()
            for name, tensor in part.tensors.items()
        }
        model = read_model(args, checkpoint, self._rows(), sizes, names)
        self._describe(model, args, tensor=files.tensor_size, pipeline=files.pipeline_size)
        version = self._files[0][0].version
        require_order(checkpoint, self.shape, version)
        gate_last = bool(args.get("glu_activation"))
        self._packing = Packing(self.shape, files.tensor_size, version, gate_last)
        self._weights = self._matched()
        self._require_equal_copies()
        buffers = [
            (name, f" in `{rank.path.parent.name}`", tensor)
            for rank, part in self._all_parts()
            for name, tensor in part.buffers.items()
        ]
        self.notes = [
            *self.notes,
            *require_computed(checkpoint, buffers, self.shape),
            *self._packing.replica_notes(self._weights),
        ]
        self._parts: dict[str, dict[str, list[Tensor]]] = {WEIGHT: self._weights}
        moments = None
        if not weights_only:
            self._parts, moments = self._with_optimizer()
        self.kinds = tuple(self._parts)
        self._compared: set[str] = set()
        schedule = read_schedule(self._files[0][0].content, args)
        self.notes = [*self.notes, *schedule.notes]
        self.progress = self._progress(args, moments, schedule)
        self.training_notes = [*model.training_notes, *unknown_scale_notes(self)]

    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        """Return the dtype of a tensor; see `ModelState`."""
        return self._parts[kind][name][0].dtype

    def read(self, name: str, kind: str = WEIGHT) -> Tensor:
        """Return a whole tensor; see `ModelState`."""
        if name not in self._compared:
            for main, weight in zip(self._parts[WEIGHT][name], self._weights[name], strict=True):
                require_rounded(self.checkpoint, name, main, weight)
            self._compared.add(name)
        return self._packing.join(name, self._parts[kind][name]).contiguous()

    def _require_one_iteration(self) -> None:
        """Raise a `CheckpointError` if files are of different checkpoints."""
        first = self._files[0][0]
        for rank in (rank for ranks in self._files for rank in ranks):
            for name, value in (("iteration", rank.iteration), ("version", rank.version)):
                if value != getattr(first, name):
                    raise CheckpointError(
                        f"`{self.checkpoint}` is mixed from several checkpoints",
                        why=f"`{rank.path}` is of {name} {value}, `{first.path}` of "
                        f"{getattr(first, name)}",
                        hint="copy the directories of all ranks of one checkpoint",
                    )

    def _number_layers(self) -> None:
        """Give each part of a stage the number of its first layer.

        With a virtual pipeline the first parts of all stages come first, then the second ones.
        """
        first = 0
        for part in range(max(len(ranks[0].parts) for ranks in self._files)):
            for ranks in self._files:
                for rank in ranks:
                    if len(rank.parts) != len(self._files[0][0].parts):
                        raise CheckpointError(
                            f"`{rank.path}` is not of this checkpoint",
                            why=f"it has {counted(len(rank.parts), 'part')} of the model, others "
                            f"have {len(self._files[0][0].parts)}",
                        )
                    rank.parts[part].first_layer = first
                first += ranks[0].parts[part].layers

    def _name_embedding(self) -> None:
        """Take tied output layers as the embedding if no rank has it under its own name."""
        if not self._embeddings():
            for _, part in self._all_parts():
                if part.copies:
                    part.take_copy()

    def _embeddings(self) -> dict[int, tuple[RankFile, Part]]:
        """Return the part with the token embedding of each rank of tensor parallelism."""
        return {
            number: (rank, part)
            for ranks in self._files
            for number, rank in enumerate(ranks)
            for part in rank.parts
            if part.embedding in part.tensors
        }

    def _rows(self) -> int:
        """Return the number of rows of the token embedding."""
        rows, held = 0, self._embeddings()
        for number, rank in enumerate(self._files[0]):
            part = held[number][1] if number in held else None
            tensor = None if part is None else part.tensors[part.embedding]
            if tensor is None or tensor.ndim != 2:
                raise CheckpointError(f"`{rank.path}` has no token embedding")
            rows += tensor.shape[0]
        return rows

    def _require_equal_copies(self) -> None:
        """Raise a `CheckpointError` if the output layer of a tied model has other values."""
        embeddings = self._embeddings()
        for ranks in self._files:
            for number, rank in enumerate(ranks):
                first, held = embeddings[number]
                for name, tensor in [one for part in rank.parts for one in part.copies.items()]:
                    if not same_values(tensor, held.tensors[EMBEDDING]):
                        raise different_copy(
                            self.checkpoint,
                            f"`{name}` in `{rank.path.parent.name}`",
                            f"`{held.foreign[EMBEDDING]}` in `{first.path.parent.name}`",
                        )

    def _matched(self) -> dict[str, list[Tensor]]:
        """Return the tensors of all ranks of each parameter.

        Raises:
            CheckpointError: Tensors are missing or surplus, or have another shape.
        """
        found: dict[str, list[Tensor]] = {name: [] for name in parameter_shapes(self.shape)}
        problems = []
        for rank, part in self._all_parts():
            where = rank.path.parent.name
            problems += [f"`{name}` in `{where}` is surplus" for name in part.surplus]
            for name, local in part.global_names():
                foreign, tensor = f"`{part.foreign[local]}` in `{where}`", part.tensors[local]
                if name not in found:
                    problems.append(f"{foreign} is surplus")
                    continue
                found[name].append(tensor)
                expected = self._packing.part_shape(name)
                if tuple(tensor.shape) != expected:
                    shapes = f"{list(tensor.shape)} instead of {list(expected)}"
                    problems.append(f"{foreign} has shape {shapes}")
                elif tensor.dtype not in FLOAT_DTYPES:
                    problems.append(f"{foreign} has dtype {tensor.dtype}")
        for name, parts in found.items():
            if len(parts) != self._packing.ranks:
                count = "is missing" if not parts else f"is there {counted(len(parts), 'time')}"
                problems.append(f"`{name}` {count}")
        require_no_problems(self.checkpoint, problems)
        return found

    def _all_parts(self) -> Iterator[tuple[RankFile, Part]]:
        return ((rank, part) for ranks in self._files for rank in ranks for part in rank.parts)

    def _with_optimizer(
        self,
    ) -> tuple[dict[str, dict[str, list[Tensor]]], Moments | None]:
        """Return the parts of each kind by name, and the optimizer of the first rank."""
        weights = {WEIGHT: self._weights}
        ranks = [rank for ranks in self._files for rank in ranks]
        try:
            read = [read_moments(rank) for rank in ranks]
        except UnreadOptimizer as reason:
            self._leave_adam_out(str(reason))
            return weights, None
        moments = [one for one in read if one is not None]
        if not moments:
            return weights, None
        if len(moments) != len(ranks):
            lacking = ranks[read.index(None)].path
            raise CheckpointError(
                f"`{self.checkpoint}` is not complete",
                why=f"`{lacking}` has no optimizer, other ranks have one",
            )
        parts: dict[str, dict[str, list[Tensor]]] = {
            kind: {name: [] for name in self._weights} for kind in (WEIGHT, *ADAM)
        }
        for rank, held in zip(ranks, moments, strict=True):
            names = [part.global_name(name) for part in rank.parts for name, _ in part.order]
            for kind, tensors in held.tensors.items():
                for name, tensor in zip(names, tensors, strict=True):
                    if name != TIED:
                        parts[kind][name].append(tensor)
        self._compare_moments(dict(zip(ranks, moments, strict=True)), parts)
        for kind in ADAM:
            self.notes = [*self.notes, *self._packing.replica_notes(parts[kind], kind)]
        steps = [held.step for held in moments if held.step is not None]
        return parts, dataclasses.replace(moments[0], step=max(steps, default=None))

    def _compare_moments(
        self, moments: Mapping[RankFile, Moments], parts: Mapping[str, Mapping[str, list[Tensor]]]
    ) -> None:
        """Raise an `OptimizerStateError` if a tied output layer has another state."""
        for place, (rank, held) in enumerate(moments.items()):
            names = [name for part in rank.parts for name, _ in part.order]
            for kind, tensors in held.tensors.items() if TIED in names else ():
                embedding = parts[kind][EMBEDDING][place % self._packing.ranks]
                if not same_values(tensors[names.index(TIED)], embedding):
                    raise OptimizerStateError(
                        f"the optimizer's state in `{rank.path}` does not fit the first stage's",
                        why=f"`{kind}` of the tied output layer differs from the token embedding's",
                        hint="copy the files of all ranks again, of one checkpoint, or take the "
                        "weights without it: `lmcore checkpoint convert --weights-only`",
                    )

    def _progress(
        self,
        args: Mapping[str, Any],
        moments: Moments | None,
        schedule: SavedSchedule,
    ) -> Progress | None:
        iteration = self._files[0][0].iteration
        samples = args.get("consumed_train_samples", 0)
        if iteration is None or type(samples) is not int or samples < 0:
            return None
        values, position = schedule.values, schedule.position
        if moments is None:
            return Progress(iteration, samples, schedule=values, scheduled_samples=position)
        return Progress(
            *(iteration, samples, moments.step, values, moments.settings, position),
            loss_scale=moments.loss_scale,
        )
