"""`DistributedState`: a model in Megatron's `torch_dist` format, under lmcore's names.

The tensors are in torch's distributed checkpoint format, the layers stacked in a first dim or each
under its own name.  The two projections of SwiGLU are one tensor, gate then up, or two, whose names
end with `_w` and `_v`.  Arguments and counters are in `common.pt`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmcore.base.errors import CheckpointError, several
from lmcore.checkpoint.dcp_metadata import dtype_of
from lmcore.conversion.cast import FLOAT_DTYPES
from lmcore.conversion.foreign_pickle.records import load_content, values_of
from lmcore.conversion.megatron.checkpoint_state import MegatronCheckpointState
from lmcore.conversion.megatron.directory import COMMON_NAME
from lmcore.conversion.megatron.optimizer.groups import group_values
from lmcore.conversion.megatron.optimizer.loss_scale import megatron_loss_scale, unknown_scale_notes
from lmcore.conversion.megatron.optimizer.moments import (
    UnreadOptimizer,
    other_optimizer,
    require_rounded,
)
from lmcore.conversion.megatron.parameters.names import (
    EMBEDDING,
    HEAD,
    TIED,
    UNUSED,
    parameter_of,
    stack_of,
)
from lmcore.conversion.megatron.parameters.packing import Packing
from lmcore.conversion.megatron.run.saved_arguments import has_gates, read_model
from lmcore.conversion.megatron.run.schedule import SavedSchedule, read_schedule
from lmcore.conversion.megatron.torch_dist.buckets import BucketState, has_buckets
from lmcore.conversion.megatron.torch_dist.gathered import GatheredState, has_gathered
from lmcore.conversion.megatron.torch_dist.stored_tensors import StoredTensors
from lmcore.conversion.state import (
    ADAM,
    WEIGHT,
    OptimizerStateError,
    Progress,
    require_no_problems,
)
from lmcore.conversion.unread import different_copy, require_computed, same_values
from lmcore.model.megatron_names import names_of_tensors

__all__ = ["DistributedState"]

_STACKED = re.compile(r"^((?:module\.)*(encoder|decoder)\.layers\.)(?!\d+\.)(.+)$")
_OPTIMIZER = re.compile(r"^optimizer\.state\.(fp32_param|param|exp_avg|exp_avg_sq)\.(.+)$")
_KINDS = {"fp32_param": WEIGHT, "param": WEIGHT, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_COPIES = (TIED, HEAD)
"""Names of the output layer, which a tied model may also have."""
_MOST_LAYERS = 10_000
_HALVES = ("_w", "_v")
"""Endings of the names of gate and up if they are separate tensors."""


@dataclass(frozen=True)
class _Stored:
    """Position of a tensor: its name in the files, and its layer if layers are stacked.

    Attributes:
        name: Name in the files; of gate and up, if they are two tensors, without the ending.
        layer: Number of the layer in the first dim; None: it is not stacked.
        halves: True if gate and up are two tensors.
    """

    name: str
    layer: int | None = None
    halves: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(self.name + half for half in _HALVES) if self.halves else (self.name,)


class DistributedState(MegatronCheckpointState):
    """Model, and the state of Adam if it is there, in `torch_dist`; see `ModelState`."""

    format = "Megatron-LM (torch_dist)"

    def _open(self, *, weights_only: bool, compare: bool) -> None:
        checkpoint = self.checkpoint
        content = load_content(checkpoint / COMMON_NAME)
        args = values_of(content.get("args"))
        if args is None:
            raise CheckpointError(
                f"`{checkpoint}` does not say which model it has",
                why=f"its `{COMMON_NAME}` lacks the arguments of the run that wrote it",
            )
        self._stored = StoredTensors(checkpoint, compare=compare)
        self._entries = self._stored.entries
        self._names = names_of_tensors(self._entries.keys())
        self._counts = self._layers_of_stacks(args)
        self._swiglu = has_gates(args)
        problems, stored = self._named()
        names = (EMBEDDING, *_COPIES)
        embedding = next((stored[WEIGHT][one] for one in names if one in stored[WEIGHT]), None)
        if embedding is None or len(self._entries[embedding.name].shape) != 2:
            raise CheckpointError(f"`{checkpoint}` has no token embedding")
        sizes = {name: self._entries[one.names[0]].shape for name, one in stored[WEIGHT].items()}
        rows = self._entries[embedding.name].shape[0]
        model = read_model(args, checkpoint, rows, sizes, self._names)
        self._describe(model, args)
        self._packing = Packing(self.shape, 1, gate_last=bool(args.get("glu_activation")))
        self._compare_copies(stored[WEIGHT])
        problems += self._unfit(stored[WEIGHT], complete=True)
        require_no_problems(checkpoint, problems)
        computed = [(one.name, "", self._whole(one)) for one in self._buffers_of_model]
        self.notes = [*self.notes, *require_computed(checkpoint, computed, self.shape)]
        schedule = read_schedule(content, args)
        self.notes = [*self.notes, *schedule.notes]
        self._weights = stored[WEIGHT]
        self._buckets: BucketState | None = None
        self._places = {WEIGHT: stored[WEIGHT]}
        other = None if weights_only or not self._has_optimizer() else other_optimizer(args)
        if other is not None:
            self._leave_adam_out(f"it is that of `{other}`")
        elif not weights_only and len(self._names.stacks) > 1 and self._is_bucketed():
            self._leave_adam_out("it is distributed, of a model with several stacks of layers")
        elif not weights_only and has_buckets(self._stored):
            self._buckets = BucketState(self._stored, self.shape, args, self._weight)
            self.kinds = (WEIGHT, *ADAM)
            self.notes = [*self.notes, *self._buckets.replica_notes()]
        elif not weights_only and has_gathered(self._stored):
            self._gathered(args)
        elif not weights_only:
            self._places = self._with_optimizer(stored)
            self.kinds = tuple(self._places)
        self.progress = self._progress(content, args, schedule)
        self.training_notes = [*model.training_notes, *unknown_scale_notes(self)]
        if self._other_state and len(self.kinds) > 1:
            self.training_notes = [*self.training_notes, f"not read: {several(self._other_state)}"]

    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        """Return the dtype of a tensor; see `ModelState`."""
        if self._buckets is not None:
            return self._buckets.dtype(name, kind)
        return self._dtype_of(self._places[kind][name])

    def read(self, name: str, kind: str = WEIGHT) -> Tensor:
        """Return a whole tensor; see `ModelState`."""
        if self._buckets is not None:
            tensor = self._buckets.read(name, kind)
        else:
            tensor = self._packing.join(name, [self._whole(self._places[kind][name])])
        if kind == WEIGHT and (self._buckets or self._places[kind][name] != self._weights[name]):
            weight = self._packing.join(name, [self._weight(name)])
            require_rounded(self.checkpoint, name, tensor, weight)
            if name in self._other_mains:
                other = self._packing.join(name, [self._whole(self._other_mains[name])])
                require_rounded(self.checkpoint, name, tensor, other)
        return tensor.contiguous()

    def _weight(self, name: str) -> Tensor:
        """Return a weight of the model in Megatron's packing."""
        return self._whole(self._weights[name])

    def _whole(self, place: _Stored) -> Tensor:
        """Return the tensor of a position, gate and up joined."""
        parts = [self._stored.read(stored, place.layer) for stored in place.names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _compare_copies(self, weights: dict[str, _Stored]) -> None:
        """Leave out the output layer of a tied model, or take it as the embedding.

        Raises:
            CheckpointError: It has other values than the embedding.
        """
        copies = [weights.pop(name) for name in _COPIES if name in weights and self.shape.tied]
        if not copies:
            return
        original = weights.setdefault(EMBEDDING, copies[0])
        for copy in copies:
            if copy.name != original.name and not same_values(
                self._whole(copy), self._whole(original)
            ):
                raise different_copy(self.checkpoint, f"`{copy.name}`", f"`{original.name}`")

    def _named(self) -> tuple[list[str], dict[str, dict[str, _Stored]]]:
        """Return problems with names, and the positions of each kind by lmcore's names."""
        found: dict[str, dict[str, _Stored]] = {kind: {} for kind in (WEIGHT, "main", *ADAM)}
        self._buffers_of_model: list[_Stored] = []
        self._other_state: list[str] = []
        self._other_mains: dict[str, _Stored] = {}
        problems = []
        for stored in self._entries:
            match = _OPTIMIZER.match(stored)
            kind, name = WEIGHT, stored
            if match is not None:
                kind, name = _KINDS[match[1]], match[2]
                kind = "main" if kind == WEIGHT else kind
            elif stored.startswith(("optimizer.", "chained_", "rng_state", "rerun_state")):
                self._other_state += [stored] if stored.startswith("optimizer.state.") else []
                continue
            bare = stored.removesuffix("_w").removesuffix("_v")
            halves = bare != stored and all(bare + half in self._entries for half in _HALVES)
            place = bare if halves else stored
            for foreign, layer in self._layers_of(name[:-2] if halves else name):
                ours = parameter_of(foreign, swiglu=self._swiglu, names=self._names)
                if ours == UNUSED:
                    self._buffers_of_model.append(_Stored(place, layer, halves))
                    continue
                if ours is None:
                    problems.append(f"`{stored}` is surplus")
                    break
                one = _Stored(place, layer, halves)
                other = found[kind].setdefault(ours, one)
                if other.name != place and kind == "main" and match is not None:
                    self._other_mains[ours] = one  # under the name of another optimizer
                elif other.name != place and not same_values(self._whole(one), self._whole(other)):
                    problems.append(f"`{stored}` and `{other.name}` are the same parameter")
                    break
        return problems, found

    def _layers_of(self, name: str) -> list[tuple[str, int | None]]:
        """Return the name of each layer of a stacked tensor, or the name alone."""
        match = _STACKED.match(name)
        if match is None:
            return [(name, None)]
        only = next(iter(self._counts.values()))  # a model with one stack may name it otherwise
        layers = range(self._counts.get(match[2], only))
        return [(f"{match[1]}{layer}.{match[3]}", layer) for layer in layers]

    def _layers_of_stacks(self, args: Mapping[str, Any]) -> dict[str, int]:
        """Return the number of layers of each stack by its name in the files."""
        found: dict[str, int] = {}
        for stack in self._names.stacks.values():
            layers = args.get(f"{stack.core}_num_layers") if len(self._names.stacks) > 1 else None
            layers = args.get("num_layers") if layers is None else layers
            count = layers if isinstance(layers, int) else 0
            found[stack.core] = count if 0 < count <= _MOST_LAYERS else 0
        return found

    def _stacked(self, name: str) -> int:
        """Return the number of layers of the stack that a parameter is in."""
        place = stack_of(name, self._names)
        return self._counts[self._names.stacks[place[0]].core] if place is not None else 0

    def _unfit(self, stored: Mapping[str, _Stored], *, complete: bool) -> list[str]:
        """Return the tensors that are missing or surplus, or have another shape or dtype."""
        needed = self.parameters
        problems = [
            f"`{place.name}` is surplus" for name, place in stored.items() if name not in needed
        ]
        for name, expected in needed.items():
            place = stored.get(name)
            if place is None:
                problems += [f"`{name}` is missing"] if complete else []
                continue
            wanted = (expected[0] // len(place.names), *expected[1:])
            wanted = wanted if place.layer is None else (self._stacked(name), *wanted)
            for one in place.names:
                entry = self._entries[one]
                if entry.shape != wanted:
                    shapes = f"{list(entry.shape)} instead of {list(wanted)}"
                    problems.append(f"`{one}` has shape {shapes}")
                elif dtype_of(entry.dtype) not in FLOAT_DTYPES:
                    problems.append(f"`{one}` has dtype {entry.dtype}")
        return list(dict.fromkeys(problems))

    def _with_optimizer(
        self, stored: dict[str, dict[str, _Stored]]
    ) -> dict[str, dict[str, _Stored]]:
        weights = stored[WEIGHT]
        held = [stored[kind] for kind in ADAM]
        if not any(held) or self._is_flattened(held):
            if self._has_optimizer():
                self._leave_adam_out(_UNREAD)
            return {WEIGHT: weights}
        for kind in ADAM:
            self._require_state(self._unfit(stored[kind], complete=True))
        half = [name for name in weights if self._dtype_of(weights[name]).itemsize < 4]
        missing = [name for name in half if name not in stored["main"]]
        problems = [f"the float32 parameter of `{name}` is missing" for name in missing]
        problems += self._unfit(stored["main"], complete=False)
        self._require_state(problems)
        mains = {name: stored["main"].get(name, place) for name, place in weights.items()}
        return {WEIGHT: mains, **{kind: stored[kind] for kind in ADAM}}

    def _gathered(self, args: Mapping[str, Any]) -> None:
        """Open the state of an optimizer that was gathered."""
        try:
            self._buckets = GatheredState(self._stored, self.shape, args, self._weight)
            self.kinds = (WEIGHT, *ADAM)
            self.notes = [*self.notes, *self._buckets.replica_notes()]
        except UnreadOptimizer as reason:
            self._leave_adam_out(str(reason))

    def _is_bucketed(self) -> bool:
        return has_buckets(self._stored) or has_gathered(self._stored)

    def _has_optimizer(self) -> bool:
        held = (*self._entries, *self._stored.objects)
        return any(name.startswith(("optimizer.", "chained_")) for name in held)

    def _require_state(self, problems: Sequence[str]) -> None:
        """Raise an `OptimizerStateError` that lists problems of the optimizer's tensors."""
        require_no_problems(
            self.checkpoint,
            problems,
            hint="copy all of its files again, or take the weights without the optimizer: `lmcore "
            "checkpoint convert --weights-only`",
            error=OptimizerStateError,
        )

    def _is_flattened(self, held: Sequence[Mapping[str, _Stored]]) -> bool:
        """Return True if moments have as many elements as their parameters in fewer dims."""
        for places in held:
            for name, place in places.items():
                size = self.parameters.get(name, ())
                stored = self._entries[place.names[0]].shape
                wanted = size if place.layer is None else (self._stacked(name), *size)
                same = math.prod(stored) * len(place.names) == math.prod(wanted)
                if same and len(stored) != len(wanted):
                    return True
        return False

    def _progress(
        self,
        content: Mapping[str, Any],
        args: Mapping[str, Any],
        schedule: SavedSchedule,
    ) -> Progress | None:
        iteration = content.get("iteration", args.get("iteration"))
        samples = args.get("consumed_train_samples", 0)
        if not all(type(value) is int and value >= 0 for value in (iteration, samples)):
            return None
        if len(self.kinds) == 1:
            values, position = schedule.values, schedule.position
            return Progress(iteration, samples, schedule=values, scheduled_samples=position)
        if self._buckets is not None:
            step, settings = self._buckets.step, self._buckets.settings
            scale = self._buckets.loss_scale
        else:
            optimizer = content.get("optimizer")
            step, settings = group_values(optimizer)
            held = optimizer if isinstance(optimizer, dict) else {}
            scale = megatron_loss_scale(held.get("grad_scaler"))
        values, position = schedule.values, schedule.position
        return Progress(iteration, samples, step, values, settings, position, scale)

    def _dtype_of(self, place: _Stored) -> torch.dtype:
        return dtype_of(self._entries[place.names[0]].dtype)


_UNREAD = (
    "it was distributed, and saved in pieces of parameters by an earlier version; Megatron's "
    "`--dist-ckpt-optim-fully-reshardable` saves it by parameters"
)
