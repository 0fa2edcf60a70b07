"""Contents of a session's checkpoint: tensors by name, other values as JSON, equal on all ranks.

In JSON, a mapping with one reserved key is in the place of a tensor, of a mapping with keys that
are no text (as schedulers of torch have), and of a number that is not finite (as the best loss so
far may be).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lmcore.base.errors import ConfigError, RunError
from lmcore.contract.dtype import dtype_name
from lmcore.parallel.mesh import ReplicaClass
from lmcore.parallel.replica_comparison import ReplicaComparison
from lmcore.parallel.tensor_layout import TensorLayout, local_part
from lmcore.runtime.launch.rank import named_ranks

if TYPE_CHECKING:
    from lmcore.checkpoint import Manifest
    from lmcore.library.placement import ModelPlacement
    from lmcore.runtime.runtime import Runtime

__all__ = ["SavedTensors", "plain_name"]

_COMPILED = re.compile(r"(?:^|(?<=\.))_orig_mod\.")


def plain_name(name: str) -> str:
    """Return the name of a tensor without the parts that `torch.compile` adds to it, at any depth.

    Args:
        name: Name in a `state_dict`, such as `_orig_mod.layers.0._orig_mod.weight`.
    """
    return _COMPILED.sub("", name)


class SavedTensors:
    """Tensors of models and optimizers by their names in a checkpoint.

    Attributes:
        tensors: Local tensors.
        layouts: Layouts of sharded tensors.
        weights: Parameters of prepared models that every rank holds whole.
        replicas: Names of *weights* and of optimizer state of their shape.
        shapes: Dtype and shape of whole tensors that all ranks must have, as JSON values.
    """

    def __init__(self, placement: ModelPlacement) -> None:
        """Begin without tensors.

        Args:
            placement: Prepared models.
        """
        self.tensors: dict[str, Tensor] = {}
        self.layouts: dict[str, TensorLayout] = {}
        self.weights: dict[str, Tensor] = {}
        self.replicas: set[str] = set()
        self.shapes: dict[str, list[Any]] = {}
        self._placement, self._shards = placement, placement.mesh.shards
        self._names: dict[int, str] = {}

    def add_model(self, name: str, model: nn.Module) -> None:
        """Add the parameters and persistent buffers of a model."""
        for key, parameter in model.named_parameters():
            self._names[id(parameter)] = f"{name}.{plain_name(key)}"
        for saved, tensor in model.state_dict(keep_vars=True).items():
            key = plain_name(saved)
            if not isinstance(tensor, Tensor):
                raise ConfigError(
                    f"`{name}`: `{key}` of its `state_dict` is a {type(tensor).__name__}",
                    why="a model's state is made of tensors",
                )
            replica = self._placement.is_replicated(tensor)
            self.add(f"{name}.{key}", tensor, replica=replica)
            if replica:
                self.weights[f"{name}.{key}"] = tensor.detach()

    def add_optimizer(self, name: str, optimizer: Optimizer) -> dict[str, Any]:
        """Add the state of an optimizer; return its hyperparameters and numbers as JSON values."""
        groups, numbers = [], dict[str, dict[str, Any]]()
        for group in optimizer.param_groups:
            names = [self._name(name, optimizer, parameter) for parameter in group["params"]]
            for parameter, own in zip(group["params"], names, strict=True):
                replicated = self._placement.is_replicated(parameter)
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        replica = replicated and value.shape == parameter.shape
                        self._add(f"{name}.{key}.{own}", value, replica=replica)
                    elif value is not None:
                        numbers.setdefault(own, {})[key] = value
            values = {key: value for key, value in group.items() if key != "params"}
            shown = {
                key: value.item() if isinstance(value, Tensor) else value
                for key, value in values.items()
            }
            groups.append({"params": names, "values": shown})
        return {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}

    def parameter_names(self, name: str, optimizer: Optimizer) -> set[str]:
        """Return the names of an optimizer's parameters in a checkpoint."""
        groups = optimizer.param_groups
        return {self._name(name, optimizer, each) for group in groups for each in group["params"]}

    def complete_optimizer(self, name: str, optimizer: Optimizer, runtime: Runtime) -> None:
        """Add state of sharded parameters that other ranks have, and this rank has not.

        A rank without a gradient of a parameter has no state for it yet: zeros, as optimizers make
        them at the first step.  All ranks must call it.
        """
        if runtime.processes is None or self._shards.size == 1:
            return
        own = {
            self._name(name, optimizer, parameter): {
                key: dtype_name(value.dtype)
                for key, value in state.items()
                if isinstance(value, Tensor) and value.shape == parameter.shape
            }
            for parameter, state in optimizer.state.items()
        }
        found = runtime.processes.gather(own, f"the state of `{name}`")
        if all(each == own for each in found):
            return
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            full = self._names[id(parameter)]
            held = {key: dtype for each in found for key, dtype in each.get(full, {}).items()}
            for key in held.keys() - own.get(full, {}).keys():
                if local_part(parameter) is not parameter:
                    dtype = getattr(torch, held[key])
                    self._add(f"{name}.{key}.{full}", torch.zeros_like(parameter, dtype=dtype))

    def make_optimizer_state(self, name: str, optimizer: Optimizer, manifest: Manifest) -> None:
        """Make the tensors of an optimizer's state that are in a checkpoint, and drop others."""
        keys: dict[str, list[str]] = {}
        owners = {
            self._name(name, optimizer, parameter): (parameter, group)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for saved in manifest.tensors:
            if saved.startswith(f"{name}."):
                key, _, own = saved.removeprefix(f"{name}.").partition(".")
                keys.setdefault(own, []).append(key)
        for own, (parameter, group) in owners.items():
            state = optimizer.state[parameter]
            state.clear()
            for key in keys.get(own, []):
                entry = manifest.tensors[f"{name}.{key}.{own}"]
                dtype = getattr(torch, entry.dtype)
                if tuple(entry.shape) == tuple(parameter.shape):
                    state[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                else:
                    on_device = key != "step" or group.get("capturable") or group.get("fused")
                    device = parameter.device if on_device else torch.device("cpu")
                    state[key] = torch.zeros(entry.shape, dtype=dtype, device=device)

    def set_groups(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        """Set hyperparameters and numbers of an optimizer from JSON values."""
        for group, entry in zip(optimizer.param_groups, saved["groups"], strict=True):
            for key, value in entry["values"].items():
                known = group.get(key)
                if isinstance(known, Tensor):
                    known.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(known, tuple) else value
            for parameter in group["params"]:
                numbers = saved["numbers"].get(self._names[id(parameter)], {})
                optimizer.state[parameter].update(numbers) if numbers else None

    def make_tensor(self, name: str, manifest: Manifest) -> Tensor:
        """Add and return a new tensor for a tensor of a checkpoint."""
        entry = manifest.tensors[name]
        self.tensors[name] = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
        return self.tensors[name]

    def add(self, name: str, tensor: Tensor, *, replica: bool = False) -> None:
        """Add a tensor that all ranks have, or its local part unless that is empty.

        Args:
            name: Name in the checkpoint.
            tensor: Tensor, which may be sharded.
            replica: True if it is equal on all ranks.

        Raises:
            ConfigError: The tensor is sharded in another way than parameters are, or another tensor
                has the name.
        """
        self._add(name, tensor, replica=replica)
        self.shapes[name] = [dtype_name(tensor.dtype), list(tensor.shape)]

    def _add(self, name: str, tensor: Tensor, *, replica: bool = False) -> None:
        """Add a tensor that other ranks may lack unless it is a replica."""
        if name in self.tensors:
            raise ConfigError(
                f"two tensors have the name `{name}` in a checkpoint",
                why="names of tensors in mappings and lists are made of their keys",
                hint="rename a key",
            )
        local = local_part(tensor)
        if local is tensor:
            self.tensors[name] = tensor.detach()
            if replica:
                self.replicas.add(name)
                self.shapes[name] = [dtype_name(tensor.dtype), list(tensor.shape)]
        elif not tensor.placements[0].is_shard(0):  # type: ignore[attr-defined]
            raise ConfigError(
                f"`{name}` is a `DTensor` that is not sharded along its first dim",
                why="the ranks hold no parts of it that make a whole tensor",
                hint=f"pass `{name}.full_tensor()`",
            )
        elif local.numel():
            whole, shards = TensorLayout.whole(tuple(tensor.shape)), self._shards
            self.tensors[name] = local.detach()
            self.layouts[name] = whole.shard(tensor.shape[0], shards.rank, shards.size)

    def _name(self, name: str, optimizer: Optimizer, parameter: Tensor) -> str:
        if id(parameter) not in self._names:
            raise ConfigError(
                f"`{name}`: {type(optimizer).__name__} has a parameter of no model that is given",
                hint="give the model too: its parameters name the optimizer's state",
            )
        return self._names[id(parameter)]


_TENSOR = "tensor of the checkpoint"
_ITEMS = "items of a mapping"
_NUMBER = "number that is not finite"
_SCALARS = (str, int, float, type(None))  # bool is an int


def encode(name: str, value: Any, add: Callable[[str, Tensor], None]) -> Any:
    """Return a value as JSON, and add its tensors to the checkpoint.

    Args:
        name: Name of the value in the checkpoint, such as "scheduler.base_lrs".
        value: Value of JSON types and tensors.
        add: Function that adds a tensor to the checkpoint, by its name.

    Raises:
        ConfigError: The value has something else.
    """
    if isinstance(value, Tensor):
        add(name, value)
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return _encoded_mapping(name, value, add)
    if isinstance(value, (list, tuple)):
        return [encode(f"{name}.{index}", each, add) for index, each in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: str(float(value))}
    if not isinstance(value, _SCALARS):
        raise ConfigError(
            f"`save` of {type(value).__name__}, `{name}`",
            why="it is neither a model, an optimizer, a tensor nor a JSON value, and has no "
            "`state_dict`",
            hint="objects are not pickled: save its numbers, texts, lists and dicts",
        )
    return value


def _encoded_mapping(
    name: str, value: Mapping[Any, Any], add: Callable[[str, Tensor], None]
) -> Any:
    for key in value:
        if not isinstance(key, _SCALARS) or (isinstance(key, float) and not math.isfinite(key)):
            raise ConfigError(
                f"`save` of a mapping with the key {key!r}, `{name}`",
                why=f"JSON has no key of type {type(key).__name__}",
                hint="use texts or integers as keys, or save the list of its items",
            )
    encoded = {key: encode(f"{name}.{key}", each, add) for key, each in value.items()}
    if all(isinstance(key, str) for key in encoded) and not encoded.keys() & _RESERVED:
        return encoded
    return {_ITEMS: [[key, each] for key, each in encoded.items()]}


_RESERVED = {_TENSOR, _ITEMS, _NUMBER}


def decode(value: Any, tensor_of: Callable[[str], Any] = str) -> Any:
    """Return the value that `encode` was given, with lists in the places of tuples.

    Args:
        value: JSON value.
        tensor_of: Function of the name of a tensor that returns it; by default, the name itself.
    """
    if isinstance(value, list):
        return [decode(each, tensor_of) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TENSOR}:
        return tensor_of(value[_TENSOR])
    if value.keys() == {_NUMBER}:
        return float(value[_NUMBER])
    if value.keys() == {_ITEMS}:
        return {key: decode(each, tensor_of) for key, each in value[_ITEMS]}
    return {key: decode(each, tensor_of) for key, each in value.items()}


def has_tensors(value: Any) -> bool:
    """Return True if a JSON value of a checkpoint has names of tensors."""
    if isinstance(value, dict):
        return value.keys() == {_TENSOR} or any(map(has_tensors, value.values()))
    return isinstance(value, list) and any(map(has_tensors, value))


def is_value(value: Any) -> bool:
    """Return True if a value has JSON types and tensors only."""
    if isinstance(value, Mapping):
        return all(map(is_value, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_value, value))
    return isinstance(value, (*_SCALARS, Tensor))


class SavedReplicas:
    """Comparison of the values of a checkpoint that must be equal on all ranks."""

    def __init__(self, runtime: Runtime) -> None:
        """Compare nothing yet.

        Args:
            runtime: Device and processes.
        """
        self._runtime, self._comparison = runtime, ReplicaComparison(runtime)

    def check(self, weights: Mapping[str, Tensor], groups: Mapping[str, Any]) -> None:
        """Check that all ranks have equal values; all ranks must call it.

        Args:
            weights: Parameters that every rank holds whole, by name, the same names on all ranks.
            groups: Parameter groups of optimizers as JSON values, by the name of the optimizer.

        Raises:
            RunError: Values differ; on all ranks, with the ranks and likely causes.
        """
        processes = self._runtime.processes
        if processes is None:
            return
        digest = hashlib.sha256(json.dumps(groups, sort_keys=True).encode()).hexdigest()
        subject = "the hyperparameters of optimizers"
        lines: list[str] = []
        if len(set(processes.gather(digest, subject))) > 1:
            lines = [*_differences(processes.gather(groups, subject))]
        ranks = np.arange(self._runtime.rank.world_size)[None]
        drift = self._comparison.find_drift([ReplicaClass(ranks, weights)]) if weights else None
        if drift is None and not lines:
            return
        if drift is None:
            raise RunError(
                "`save`: the ranks have different hyperparameters",
                why="\n".join(lines),
                hint="give schedulers values that are equal on all ranks: "
                "`scheduler.step(rt.all_reduce(loss))`",
            )
        lines = [*drift.lines, *lines]
        raise RunError(
            f"`save`: replicas differ: {drift.title}, on {named_ranks(drift.ranks)}",
            why="\n".join(lines),
            hint="set weights and hyperparameters alike on all ranks, as by `rt.broadcast`, and "
            "give schedulers equal values: `scheduler.step(rt.all_reduce(loss))`; else suspect the "
            "memory or the device of a rank",
        )


def _differences(of_ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield lines about hyperparameters that differ.

    Args:
        of_ranks: Parameter groups of each rank, by the name of the optimizer.
    """
    for name, groups in of_ranks[0].items():
        for index, group in enumerate(groups):
            for key in group["values"]:
                found = [own[name][index]["values"].get(key) for own in of_ranks]
                if any(value != found[0] for value in found):
                    values = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(found))
                    yield f"`{key}` of group {index} of `{name}`: {values}"
