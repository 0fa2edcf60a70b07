"""States in DeepSpeed's checkpoints, under lmcore's names.

Megatron-DeepSpeed adds the arguments of its run, which describe the model.  A checkpoint without
them is of a model of transformers, which its `config.json` describes; see `transformers_state`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmcore.base.errors import CheckpointError, counted
from lmcore.conversion.foreign_pickle.load import load_tensors
from lmcore.conversion.foreign_pickle.records import load_content, values_of
from lmcore.conversion.megatron.directory import rank_count
from lmcore.conversion.megatron.optimizer.loss_scale import unknown_scale_notes
from lmcore.conversion.megatron.optimizer.moments import other_optimizer, require_rounded
from lmcore.conversion.megatron.parameters.names import EMBEDDING, HEAD, TIED, UNUSED, parameter_of
from lmcore.conversion.megatron.parameters.packing import Packing, require_order
from lmcore.conversion.megatron.run.saved_arguments import has_gates, read_model, saved_layout
from lmcore.conversion.state import WEIGHT, ModelState, require_no_problems
from lmcore.conversion.unread import different_copy, require_computed, same_values
from lmcore.model.family import parameter_shapes, vocabulary_parameters
from lmcore_deepspeed.checkpoint.directory import UNIVERSAL_PART, DeepSpeedDirectory, find_files
from lmcore_deepspeed.checkpoint.missing_files import (
    embedding_files,
    require_files,
    weight_files,
)
from lmcore_deepspeed.checkpoint.names import legacy_names
from lmcore_deepspeed.checkpoint.opened import OpenedCheckpoint
from lmcore_deepspeed.checkpoint.rank_tensors import open_ranks, universal_tensors
from lmcore_deepspeed.checkpoint.saved_run import (
    read_kinds,
    recorded_precision,
    run_progress,
    run_schedule,
    saved_precision,
)
from lmcore_deepspeed.checkpoint.transformers_state import TransformersDeepSpeedState

__all__ = ["MegatronDeepSpeedState", "read_deepspeed"]


def read_deepspeed(path: Path, *, weights_only: bool = False, compare: bool = True) -> ModelState:
    """Return the state of the newest checkpoint at *path*.

    Args:
        path: Directory that DeepSpeed saved to, or one checkpoint in it.
        weights_only: True to take the weights from the model's files, if these have them.
        compare: True to compare the checksums of files that are read.

    Raises:
        CheckpointError: A file is missing or damaged, lmcore does not have the model, or nothing
            describes it.
    """
    files = dataclasses.replace(find_files(path), compare=compare)
    without_zero = files.universal is None and not files.partitions
    bare = dataclasses.replace(files, optimizers={}) if without_zero else files
    files = bare if weights_only else files
    content = load_content(files.first, compare=compare)
    args = values_of(content.get("args"))
    opened = OpenedCheckpoint(path, files, content, weights_only=weights_only)
    if args is not None and "hidden_size" in args and "num_attention_heads" in args:
        try:
            return MegatronDeepSpeedState(opened, args)
        except CheckpointError:
            if without_zero and not weights_only:
                # A missing or surplus tensor of the model is why its state does not fit: name it.
                weights = dataclasses.replace(opened, files=bare, weights_only=True)
                MegatronDeepSpeedState(weights, args)
            raise
    return TransformersDeepSpeedState(opened)


class MegatronDeepSpeedState(ModelState):
    """Model, and the state of Adam if it is there, of Megatron-DeepSpeed; see `ModelState`.

    Attributes:
        checkpoint: Directory of the checkpoint, such as `global_step100`.
    """

    format = "Megatron-DeepSpeed"

    def __init__(self, opened: OpenedCheckpoint, args: Mapping[str, Any]) -> None:
        """Open the files of all ranks and compare their tensors with the saved arguments.

        Args:
            opened: Checkpoint.
            args: Arguments of the run.

        Raises:
            CheckpointError: A file is missing or damaged, lmcore does not have the model, or the
                tensors do not fit the arguments.
        """
        files, content, weights_only = opened.files, opened.content, opened.weights_only
        self.path, self.checkpoint, self._universal = opened.path, files.path, files.universal
        tensor = args.get("tensor_model_parallel_size", args.get("model_parallel_size"))
        tensor_size = rank_count(files.path, "tensor_model_parallel_size", tensor, 1)
        if files.universal is not None:
            rank = universal_tensors(files, files.universal, content, weights_only=weights_only)
            self._ranks, self.part = [rank], UNIVERSAL_PART
        else:
            name = "pipeline_model_parallel_size"
            size = tensor_size * rank_count(files.path, name, args.get(name), 1)
            self._ranks = open_ranks(files, content, tensor_size, size, weights_only=weights_only)
        swiglu = has_gates(args)
        tied = not args.get("untie_embeddings_and_output_weights")
        self._copies: list[tuple[int, str]] = []
        self._buffers: list[tuple[int, str]] = []
        self._names = [
            self._named(number, swiglu=swiglu, tied=tied) for number in range(len(self._ranks))
        ]
        model = read_model(args, self.checkpoint, self._rows(files, args))
        self.settings = saved_precision(content) | dict(model.settings)
        self.precision = recorded_precision(content, args)
        self.layout = saved_layout(args, data=content.get("dp_world_size"))
        self.tokenizer, self.tokenizer_type = model.tokenizer, model.tokenizer_type
        self.shape = model.shape
        self.notes = [*model.notes, *opened.notes(self._dtypes())]
        self.notes += self._padding_notes(files, content, args)
        self.vocab_size = self._vocab_size(content, model.vocab_size)
        version = self._version(content)
        require_order(self.checkpoint, self.shape, version)
        gate_last = bool(args.get("glu_activation"))
        self._packing = Packing(self.shape, len(self._ranks), version, gate_last)
        self._require_fit(files)
        self._compare_unread()
        if files.universal is not None and swiglu and tensor_size > 1:
            self._require_gates(files.universal)
        if not weights_only:
            self._find_kinds(files, content, args)
        self.notes = [*self.notes, *self._replica_notes()]
        self._own: ModelState | None = None
        if files.universal is not None and files.models and not weights_only:
            self._own = self._own_weights(opened, args)
        self.progress = run_progress(content, args, self._ranks[0], adam=len(self.kinds) > 1)
        schedule = run_schedule(content, args)
        if self.progress is not None:
            self.progress = dataclasses.replace(
                self.progress, schedule=schedule.values, scheduled_samples=schedule.position
            )
        self.notes = [*self.notes, *schedule.notes]
        self.training_notes = [*model.training_notes, *unknown_scale_notes(self)]

    def _find_kinds(
        self, files: DeepSpeedDirectory, content: Mapping[str, Any], args: Mapping[str, Any]
    ) -> None:
        """Set the kinds of tensors, and note why the state of the optimizer is not read."""
        names = [list(one.values()) for one in self._names]
        self.kinds, self.without_adam = read_kinds(files, content, self._ranks, names)
        other, unread = other_optimizer(args), "the state of Adam is not read"
        if other is not None and len(self.kinds) > 1:
            self.kinds, self.without_adam = (WEIGHT,), f"it is that of `{other}`"
            unread = "the state of its optimizer is not read"
        if self.without_adam is not None:
            self.notes = [*self.notes, f"{unread}: {self.without_adam}"]

    @property
    def files(self) -> Path:
        """Directory of the files that are read: one checkpoint, or its universal part."""
        return self._universal or self.checkpoint

    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        """Return the dtype of a tensor; see `ModelState`."""
        return self._ranks[0].dtype(self._names[0][name], kind)

    def read(self, name: str, kind: str = WEIGHT) -> Tensor:
        """Return a whole tensor; see `ModelState`."""
        parts = [
            rank.read(names[name], kind)
            for rank, names in zip(self._ranks, self._names, strict=True)
        ]
        found = self._packing.join(name, parts).contiguous()
        if self._own is not None and kind == WEIGHT:
            self._require_own(name, found, self._own.read(name))
        return found

    def _require_own(self, name: str, found: Tensor, own: Tensor) -> None:
        """Raise an `OptimizerStateError` if the universal part does not round to the model's."""
        # A universal part has no rows of padding.
        rows = len(found) if name in vocabulary_parameters(self.shape) else len(own)
        require_rounded(self.checkpoint, name, found, own[:rows])

    def _own_weights(self, opened: OpenedCheckpoint, args: Mapping[str, Any]) -> ModelState | None:
        """Return the weights in the model's own files; None, and a note, if they are not read."""
        files = opened.files.without_optimizer()
        try:
            return MegatronDeepSpeedState(
                dataclasses.replace(opened, files=files, weights_only=True), args
            )
        except CheckpointError as error:
            note = f"the weights in the model's own files are not compared: {error.what}"
            self.notes = [*self.notes, note]
            return None

    def _compare_unread(self) -> None:
        """Compare tied output layers and computed buffers with what is read in their place."""
        for number, name in self._copies:
            rank, original = self._ranks[number], self._names[number][EMBEDDING]
            copy = rank.read(name)
            if not same_values(rank.read(original).to(copy.dtype), copy):
                places = (f"`{one}`{self._where(number)}" for one in (name, original))
                raise different_copy(self.checkpoint, *places)
        buffers = [
            (name, self._where(number), self._ranks[number].read(name))
            for number, name in self._buffers
        ]
        self.notes = [*self.notes, *require_computed(self.checkpoint, buffers, self.shape)]
        self.notes += dict.fromkeys(note for rank in self._ranks for note in rank.notes)

    def _replica_notes(self) -> list[str]:
        """Return notes that name parameters whose replicas on the ranks have different values."""
        if len(self._ranks) == 1:
            return []
        whole = [name for name in self._names[0] if self._packing.split_dim(name) is None]
        ranks = list(zip(self._ranks, self._names, strict=True))
        return [
            note
            for kind in self.kinds
            for note in self._packing.replica_notes(
                {name: [rank.read(names[name], kind) for rank, names in ranks] for name in whole},
                kind,
            )
        ]

    def _where(self, number: int) -> str:
        """Return the rank of tensor parallelism for messages; nothing for a single one."""
        return f" of rank {number}" if len(self._ranks) > 1 else ""

    def _dtypes(self) -> set[torch.dtype | None]:
        """Return the dtypes of the weights."""
        ranks = zip(self._ranks, self._names, strict=True)
        return {rank.tensors[name].dtype for rank, names in ranks for name in names.values()}

    def _named(self, number: int, *, swiglu: bool, tied: bool) -> dict[str, str]:
        """Return the name in the module of each parameter of lmcore; others keep their names.

        Args:
            number: Rank of tensor parallelism.
            swiglu: True if the feed-forward layers are gated.
            tied: True if the output layer has the weights of the token embedding.
        """
        found: dict[str, str] = {}
        copies = []
        for name, legacy in legacy_names(self._ranks[number].tensors).items():
            ours = parameter_of(legacy, swiglu=swiglu) or name
            if ours == UNUSED:
                self._buffers.append((number, name))
                continue
            if tied and ours in {TIED, HEAD}:
                copies.append(name)
                continue
            # The embedding of a pipeline has one name in layer files, another in the optimizer.
            if ours in found and not name.startswith("tied_modules."):
                if found[ours].startswith("tied_modules."):
                    continue
                raise CheckpointError(
                    f"`{self.checkpoint}` has a parameter twice",
                    why=f"`{found[ours]}` and `{name}` are the same",
                )
            found[ours] = name
        if copies and EMBEDDING not in found:
            found[EMBEDDING] = copies.pop(0)
        self._copies += [(number, name) for name in copies]
        return found

    def _rows(self, files: DeepSpeedDirectory, args: Mapping[str, Any]) -> int:
        rows = 0
        for rank, names in zip(self._ranks, self._names, strict=True):
            shape = rank.tensors[names[EMBEDDING]].shape if EMBEDDING in names else ()
            if len(shape) != 2:
                tied = not args.get("untie_embeddings_and_output_weights")
                found, ranks = self._ranks[0].tensors, len(self._ranks)
                require_files(files.path, embedding_files(files, found, ranks, tied=tied))
                raise CheckpointError(f"`{self.checkpoint}` has no token embedding")
            rows += shape[0]
        return rows

    def _padding_notes(
        self, files: DeepSpeedDirectory, content: Mapping[str, Any], args: Mapping[str, Any]
    ) -> list[str]:
        info = content.get("universal_checkpoint_info")
        saved = info if isinstance(info, dict) else args
        padded, rows = saved.get("padded_vocab_size"), self.shape.padded_vocab_size
        if files.universal is None or type(padded) is not int or padded <= rows:
            return []
        missing, are = counted(padded - rows, "row"), "is" if padded - rows == 1 else "are"
        note = (
            f"{missing} of padding of the vocabulary {are} missing, as a universal checkpoint has "
            f"none: losses differ, since the softmax included all {padded} rows"
        )
        return [note]

    def _vocab_size(self, content: Mapping[str, Any], known: int | None) -> int | None:
        info = content.get("universal_checkpoint_info")
        size = info.get("original_vocab_size") if isinstance(info, dict) else None
        return size if type(size) is int and 0 < size <= self.shape.padded_vocab_size else known

    def _version(self, content: Mapping[str, Any]) -> float:
        version = content.get("checkpoint_version", 3.0)
        if version not in (0, 1.0, 2.0, 3.0, 4.0):
            raise CheckpointError(
                f"`{self.checkpoint}` is of a version that lmcore does not know",
                why=f"`checkpoint_version` is `{version}`",
            )
        return float(version)

    def _require_gates(self, universal: Path) -> None:
        """Raise a `CheckpointError` if gates of several ranks were joined as other matrices are.

        Converters of older versions did so: the rows are then the gate and the other projection of
        the first rank, then of the second one.
        """
        for ours, name in self._names[0].items():
            path = universal / name / "fp32.pt"
            if ".feed_forward.up" not in ours:
                continue
            content = load_tensors(path, compare=False)  # it was compared
            if not isinstance(content, dict) or content.get("param_n_sub_params") != 2:
                raise CheckpointError(
                    f"`{path}` is refused",
                    why="it was joined over several ranks as if it had no gate",
                    hint="read the checkpoint that it was converted from, or convert it again with "
                    "a later version of DeepSpeed",
                )

    def _require_fit(self, files: DeepSpeedDirectory) -> None:
        """Raise a `CheckpointError` that lists missing and surplus tensors and wrong shapes.

        Missing files are named instead of the tensors in them.
        """
        problems, lacking = [], set()
        for number, (rank, names) in enumerate(zip(self._ranks, self._names, strict=True)):
            where = self._where(number)
            for ours in parameter_shapes(self.shape):
                if ours not in names:
                    lacking.add(ours)
                    problems.append(f"`{ours}`{where} is missing")
                    continue
                name, expected = names[ours], self._packing.part_shape(ours)
                stored = rank.tensors[name]
                if stored.shape != expected:
                    problems.append(
                        f"`{name}`{where} has shape {list(stored.shape)} instead of "
                        f"{list(expected)}"
                    )
                elif stored.dtype is None:
                    problems.append(f"`{name}`{where} has no floating-point values")
            problems += [
                f"`{name}`{where} is surplus"
                for ours, name in names.items()
                if ours not in parameter_shapes(self.shape)
            ]
        if lacking:
            first, ranks = self._ranks[0], len(self._ranks)
            found = first.tensors.keys() - first.aliases.keys()
            missing = weight_files(files, found, lacking, ranks, self.shape)
            require_files(files.path, missing)
        require_no_problems(self.checkpoint, problems)
