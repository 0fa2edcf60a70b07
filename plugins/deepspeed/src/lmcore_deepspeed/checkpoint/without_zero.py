"""State of Adam of a run without ZeRO, which each model-parallel rank's file has (`optimizer`).

run | state of a group of parameters
--- | ---
fp32 | of each parameter, by its number; the weights are the model's
fp16, bf16 with a fused Adam | a vector of all its parameters, and one of float32 weights
fp16, bf16 with another Adam | of each parameter, by its number, with float32 weights
bf16, in a pipeline | a partition like ZeRO's, with the names of the parameters

Parameters without names are in the order in which the model makes them, as in the model's
files.  There is one group, or one of matrices and one of the others, which have no weight
decay.  The mapping is checked by shapes and sizes; float32 weights are also compared with the
model's when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmcore.base.errors import counted
from lmcore.conversion.cast import FLOAT_DTYPES
from lmcore.conversion.huggingface.weights import StoredTensor
from lmcore.conversion.megatron.optimizer.groups import group_values
from lmcore.conversion.megatron.parameters.names import UNUSED, parameter_of
from lmcore.conversion.state import ADAM, WEIGHT, OptimizerStateError
from lmcore_deepspeed.checkpoint.loss_scaler import deepspeed_loss_scale
from lmcore_deepspeed.checkpoint.names import tied_name
from lmcore_deepspeed.checkpoint.sources import Source, Zero
from lmcore_deepspeed.checkpoint.zero import (
    ADAM_HINT,
    Partitions,
    Shapes,
    partition_count,
    saved_step,
)

__all__ = [
    "Held",
    "Unread",
    "WithoutZero",
    "mapped_shapes",
    "optimizer_names",
    "optimizer_sources",
    "parameters_in",
]

Held = list[tuple[str, Tensor]]
"""Parameters in the order in which a model makes them; a copy has the name ""."""

_PARTITION, _MAPPINGS = "single_partition_of_fp32_groups", "param_slice_mappings"
_FLAT, _LISTED = "fp32_groups_flat", "fp32_groups"


class WithoutZero(Source):
    """State of Adam, and float32 weights if there are any, of one model-parallel rank.

    Attributes:
        path: File of the rank.
    """

    def __init__(self, path: Path, optimizer: Mapping[str, Any], held: Held) -> None:
        """Map the state to the parameters.

        Args:
            path: File of the rank.
            optimizer: Value of `optimizer` in it.
            held: Parameters of the rank.

        Raises:
            OptimizerStateError: The state does not fit the parameters, or lacks a part.
        """
        self.path, self.tensors = path, {}
        self._found: dict[tuple[str, str], Tensor] = {}
        inner = _inner(optimizer)
        groups = [group for group in inner["param_groups"] if group["params"]]
        states = [[inner["state"][number] for number in group["params"]] for group in groups]
        flat = isinstance(optimizer.get(_FLAT), list)
        weights = optimizer.get(_FLAT if flat else _LISTED)
        if inner is not optimizer and (
            not isinstance(weights, list) or len(weights) != len(groups)
        ):
            raise self._unfit("it lacks float32 weights for its groups of parameters")
        parts = self._divided(held, states, flat=flat)
        for place, (part, members) in enumerate(zip(parts, states, strict=True)):
            for kind in ADAM:
                tensors = [state[kind] for state in members]
                self._take(kind, part, tensors[0] if flat else tensors)
            if isinstance(weights, list):
                self._take(WEIGHT, part, weights[place])
        for name, tensor in held:
            if name:
                self._found.setdefault((name, WEIGHT), tensor)
                dtype = self._found[name, WEIGHT].dtype
                known = dtype if dtype in FLOAT_DTYPES else None
                self.tensors[name] = StoredTensor(known, tuple(tensor.shape), path)
        self.kinds = (WEIGHT, *ADAM)
        self.step = saved_step({"optimizer_state_dict": inner})
        self.settings = group_values(inner)[1]
        if optimizer.get("dynamic_loss_scale"):
            # Each overflow halves the scale of these optimizers.
            self.loss_scale = deepspeed_loss_scale({**optimizer, "cur_hysteresis": 1})

    def read(self, name: str, kind: str) -> Tensor:
        """Return a whole tensor; see `Source`."""
        return self._found[name, kind]

    def dtype(self, name: str, kind: str) -> torch.dtype:
        """Return the dtype of a tensor; see `Source`."""
        return self._found[name, kind].dtype

    def _divided(
        self, held: Held, states: Sequence[Sequence[Mapping[str, Any]]], *, flat: bool
    ) -> list[Held]:
        """Return the parameters of each group, whose sizes the state has."""
        matrices = [(name, tensor) for name, tensor in held if tensor.ndim > 1]
        others = [(name, tensor) for name, tensor in held if tensor.ndim <= 1]
        ways = [[held]] if len(states) == 1 else [[matrices, others], [others, matrices]]
        saved = [[tuple(one[ADAM[0]].shape) for one in group] for group in states]
        found = [_sizes(way, flat=flat) for way in ways]
        if saved in found:
            return ways[found.index(saved)]
        counts = [[len(group) for group in one] for one in (saved, *found)]
        if flat or counts[0] not in counts[1:]:
            what = "elements" if flat else "parameters"
            shown = [[size for (size,) in group] for group in saved] if flat else counts[0]
            model = [[size for (size,) in group] for group in found[0]] if flat else counts[1]
            raise self._unfit(f"its groups have {shown} {what}, the model's {model}")
        way = ways[counts[1:].index(counts[0])]
        for group, part in zip(saved, way, strict=True):
            for size, (name, tensor) in zip(group, part, strict=True):
                if size != tuple(tensor.shape):
                    why = f"`{ADAM[0]}` in the place of `{name}` has shape {list(size)}"
                    raise self._unfit(f"{why} instead of {list(tensor.shape)}")
        raise AssertionError("sizes that differ have a difference")

    def _take(self, kind: str, part: Held, whole: Any) -> None:
        """Divide a group's vector, or take its list of tensors."""
        expected = sum(tensor.numel() for _, tensor in part)
        if isinstance(whole, Tensor):
            if whole.ndim != 1 or whole.numel() != expected:
                found = f"{whole.numel():,} elements"
                raise self._unfit(f"`{kind}` of a group has {found}, its parameters {expected:,}")
            vectors = torch.split(whole.detach(), [tensor.numel() for _, tensor in part])
            whole = [one.view(held.shape) for one, (_, held) in zip(vectors, part, strict=True)]
        elif not isinstance(whole, list) or len(whole) != len(part):
            count = len(whole) if isinstance(whole, list) else "no"
            raise self._unfit(f"`{kind}` of a group has {count} tensors for {len(part)} parameters")
        for (name, weight), tensor in zip(part, whole, strict=True):
            if not isinstance(tensor, Tensor) or tensor.shape != weight.shape:
                shape = list(tensor.shape) if isinstance(tensor, Tensor) else "no tensor"
                why = f"`{kind}` of `{name}` is {shape}, the weight {list(weight.shape)}"
                raise self._unfit(why)
            if name:
                self._found[name, kind] = tensor.detach()

    def _unfit(self, why: str) -> OptimizerStateError:
        return _unfit(self.path, why)


class Unread(Source):
    """State of an optimizer that is not read.

    Attributes:
        path: File of the rank.
    """

    def __init__(self, path: Path, reason: str) -> None:
        """Keep the reason, as text that follows a name."""
        self.path, self.tensors, self.without_adam = path, {}, reason

    def read(self, name: str, kind: str) -> Tensor:
        """Raise a `KeyError`: there are no tensors."""
        raise KeyError(name, kind)


def optimizer_sources(
    saved: Sequence[tuple[Path, object]], held: Sequence[Held], *, pipeline: bool
) -> list[Source]:
    """Return the state of the optimizer of each stage of one rank of tensor parallelism.

    Args:
        saved: File of each stage, and value of `optimizer` in it.
        held: Parameters of each layer of a pipeline, or of the model without one.
        pipeline: True if there are layers.

    Raises:
        CheckpointError: A state does not fit the parameters, or a part of it is missing.
    """
    there = [(path, one) for path, one in saved if isinstance(one, dict) and one]
    reasons = [(path, _unread(path, one)) for path, one in there]
    unread: list[Source] = [Unread(path, reason) for path, reason in reasons if reason is not None]
    lacking = [path for path, one in saved if not (isinstance(one, dict) and one)]
    lacking += [path for path, reason in reasons if reason is not None]
    if len(lacking) == len(saved):
        return unread
    if lacking:
        raise _unfit(lacking[0], "it lacks the state of Adam, which files of other stages have")
    if any(_PARTITION in one for _, one in there):
        named = dict(optimizer_names(held))
        return [
            Zero(path, Partitions({0: path}, {0: one}, mapped_shapes([one], named)))
            for path, one in there
        ]
    parts = _stage_parameters([one for one in held if one], there) if pipeline else held
    if len(parts) != len(there):
        raise _unfit(there[-1][0], "it has no weights of the model")
    return [WithoutZero(*one, part) for one, part in zip(there, parts, strict=True)]


def optimizer_names(held: Sequence[Held]) -> Held:
    """Return the parameters of a pipeline with the names that its optimizer has for them.

    An embedding has two names, as only a tied one is named separately there.

    Args:
        held: Parameters of each layer.
    """
    layers = [layer for layer in held if layer]
    named = [one for layer in layers for one in layer]
    return named + [(tied_name(name), tensor) for name, tensor in (layers[0] if layers else [])]


def mapped_shapes(states: Iterable[Mapping[str, Any]], named: Mapping[str, Tensor]) -> Shapes:
    """Return the shapes of the parameters that partitions name; empty if they name none.

    Args:
        states: State of the optimizer of each data-parallel rank.
        named: Weights by the optimizer's names.
    """
    found: dict[str, tuple[int, ...]] = {}
    for state in states:
        mappings = state.get(_MAPPINGS)
        saved = mappings if isinstance(mappings, list) else []
        names = {name for one in saved if isinstance(one, dict) for name in one}
        found |= {name: tuple(named[name].shape) for name in names & named.keys()}
    return [found] if found else []


def parameters_in(tensors: Iterable[tuple[str, Tensor]], buffers: object) -> Held:
    """Return the parameters in a file of the model, each once.

    Args:
        tensors: Tensors of the file by name, in its order.
        buffers: Names of tensors that are no parameters; None if they are not known.
    """
    left_out = buffers if isinstance(buffers, list) else []
    found: Held = []
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in tensors:
        place = tensor.data_ptr(), tensor.shape
        known = name in left_out or parameter_of(name, swiglu=False) == UNUSED
        if known or place in seen or not tensor.is_floating_point():
            continue
        seen.add(place)
        found.append((name, tensor))
    return found


def _stage_parameters(
    layers: Sequence[Held], optimizers: Sequence[tuple[Path, Mapping[str, Any]]]
) -> list[Held]:
    """Return the parameters of each stage of a pipeline, found by the size of its optimizer.

    A later stage may begin with a copy of the embedding, which the output uses, too.

    Args:
        layers: Parameters of each layer with any, in order.
        optimizers: File of each stage, and value of `optimizer` in it.

    Raises:
        OptimizerStateError: A stage's state is not as large as any row of layers.
    """
    sizes = [sum(tensor.numel() for _, tensor in layer) for layer in layers]
    copy: Held = [("", tensor) for _, tensor in layers[0]] if layers else []
    found: list[Held] = []
    first = 0
    for stage, (path, optimizer) in enumerate(optimizers):
        size, last = _numel(optimizer), stage == len(optimizers) - 1
        for begin in [[], copy] if stage else [[]]:
            end, rest = first, size - sum(tensor.numel() for _, tensor in begin)
            while end < len(layers) and rest > 0:
                rest -= sizes[end]
                end += 1
            if rest == 0 and (end == len(layers) or not last):
                break
        else:
            raise _unfit(path, f"it has {size:,} elements, which no layers of the pipeline have")
        found.append(begin + [one for layer in layers[first:end] for one in layer])
        first = end
    return found


def _inner(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of torch's optimizer."""
    inner = optimizer.get("optimizer_state_dict", optimizer)
    return inner if isinstance(inner, dict) else {}


def _states(optimizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    states = _inner(optimizer).get("state")
    held = states.values() if isinstance(states, dict) else []
    return [one for one in held if isinstance(one, dict)]


def _numel(optimizer: Mapping[str, Any]) -> int:
    """Return the number of elements of all parameters of an optimizer."""
    held = (one.get(ADAM[0]) for one in _states(optimizer))
    return sum(one.numel() for one in held if isinstance(one, Tensor))


def _sizes(parts: Sequence[Held], *, flat: bool) -> list[list[tuple[int, ...]]]:
    """Return the shapes of the tensors of each group: of a vector, or of each parameter."""
    if flat:
        return [[(sum(tensor.numel() for _, tensor in part),)] for part in parts]
    return [[tuple(tensor.shape) for _, tensor in part] for part in parts]


def _unread(path: Path, optimizer: Mapping[str, Any]) -> str | None:
    """Return the reason for which the state of an optimizer is not read; None if it is.

    Raises:
        OptimizerStateError: Some parameters have a state of Adam, and others none.
    """
    if _PARTITION in optimizer:
        if (count := partition_count(path, optimizer)) > 1:
            owner = f"the first of {count} data-parallel ranks"
            return f"without ZeRO, DeepSpeed saves the share of {owner} only"
        mappings = optimizer.get(_MAPPINGS)
        named = isinstance(mappings, list) and all(isinstance(one, dict) for one in mappings)
        return None if named and mappings else "its vectors have no names of parameters"
    groups, states = _inner(optimizer).get("param_groups"), _inner(optimizer).get("state")
    known = isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(type(number) is int for number in group["params"])
        for group in groups
    )
    if not known or not isinstance(groups, list) or not isinstance(states, dict):
        return "it is of an unknown form"
    numbers = [group["params"] for group in groups if group["params"]]
    if len(numbers) not in {1, 2}:
        return f"it has {counted(len(numbers), 'group')} of parameters, whose members are not known"
    held = [states.get(number) for group in numbers for number in group]
    lacking = [
        one
        for one in held
        if not isinstance(one, dict) or not all(isinstance(one.get(kind), Tensor) for kind in ADAM)
    ]
    if len(lacking) == len(held):
        names = {str(key) for one in held if isinstance(one, dict) for key in one} - {"step"}
        others = ", ".join(f"`{name}`" for name in sorted(names))
        return f"it has {others} instead" if others else "it has no state yet"
    if lacking:
        without = counted(len(lacking), "parameter")
        raise _unfit(path, f"{without} without a state of Adam")
    return None


def _unfit(path: Path, why: str) -> OptimizerStateError:
    return OptimizerStateError(
        f"the optimizer's state in `{path}` does not fit the model", why=why, hint=ADAM_HINT
    )
