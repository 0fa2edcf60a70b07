"""Checkpoints of a user's loop: models, optimizers and further state in lmcore's format.

Tensors are saved under the name of their object: `model.layer.weight`, and optimizer state as
`optimizer.exp_avg.model.layer.weight`.  A checkpoint of any number of ranks and ZeRO stage can be
loaded by any other, as each rank reads its parts of whole tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lmcore.accelerator.staging import stage_tensors
from lmcore.checkpoint import (
    WritePlanner,
    load_checkpoint,
    newest_verified,
    save_checkpoint,
    survey,
)
from lmcore.errors import CheckpointError, ConfigError
from lmcore.library.exchange import check_same
from lmcore.parallel.random_states import (
    named_random_states,
    random_state_name,
    random_states,
    set_random_states,
)
from lmcore.parallel.tensor_layout import TensorLayout, local_part

if TYPE_CHECKING:
    from lmcore.checkpoint import Manifest
    from lmcore.library.placement import ModelPlacement
    from lmcore.library.update import Updates
    from lmcore.runtime.runtime import Runtime

__all__ = ["SavedStates"]

_TENSOR = "tensor of the checkpoint"
"""Key of a mapping in the JSON values in the place of a tensor."""
_RESERVED = "rng"


class SavedStates:
    """Saves and loads of a session."""

    def __init__(self, runtime: Runtime, placement: ModelPlacement) -> None:
        """Open the channels of saves and loads; all ranks must call it.

        Args:
            runtime: Stager, random states and processes.
            placement: Prepared models.
        """
        self._runtime, self._placement = runtime, placement
        processes = runtime.processes
        self._planner = WritePlanner(processes.rendezvous if processes else None)

    def save(
        self,
        directory: Path,
        updates: Updates,
        objects: Mapping[str, Any],
        *,
        keep_last: int | None,
    ) -> Path:
        """Save a checkpoint and return its path; see `Session.save`."""
        self._check_names("save", objects)
        self._placement.reshard()  # a pass without backward leaves whole weights
        state = _State(self._placement)
        values: dict[str, Any] = {}
        for name, each in _ordered(objects):
            if isinstance(each, nn.Module):
                state.add_model(name, each)
            elif isinstance(each, Optimizer):
                values[name] = state.add_optimizer(name, each)
            elif isinstance(each, Tensor):
                state.tensors[name] = each.detach()
            else:
                values[name] = state.take_tensors(name, _value_of(each))
        try:
            json.dumps(values, allow_nan=False)
        except (TypeError, ValueError) as cause:
            raise ConfigError("`save`: a value is no JSON", why=str(cause)) from cause
        tensors = state.tensors | named_random_states(self._runtime)
        plan = self._planner.plan(tensors, state.layouts)
        meta: dict[str, Any] = {
            "values": values,
            "updates": updates.count,
            "loss_scale": updates.loss_scale.state(),
            "world_size": self._runtime.rank.world_size,
            "precision": self._runtime.precision.name,
        }
        return save_checkpoint(
            directory,
            updates.count,
            stage_tensors(self._runtime.stager, plan.views(tensors)),
            meta,
            model_shape={},
            keep_last=keep_last,
            plan=plan,
            channel=self._planner.saves,
        )

    def load(self, directory: Path, updates: Updates, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Load the newest checkpoint and return its JSON values; see `Session.load`."""
        self._check_names("load", objects)
        _require_loadable(objects)
        channel = self._planner.loads
        found = newest_verified(
            survey(directory),
            channel=channel,
            agree=lambda identity: check_same(
                self._runtime, "the checkpoint that they load", identity
            ),
        )
        checkpoint, manifest = found.path, found.manifest
        values = _values(checkpoint, manifest)
        self._placement.reshard()
        state = _State(self._placement)
        rebuilt: dict[str, Any] = {}
        _require(checkpoint, manifest, values, objects)
        for name, each in _ordered(objects):
            if isinstance(each, nn.Module):
                state.add_model(name, each)
            elif isinstance(each, Optimizer):
                _require_class(checkpoint, name, each, values[name])
                state.make_optimizer_state(name, each, manifest)
                state.add_optimizer(name, each)
            elif isinstance(each, Tensor):
                state.tensors[name] = each.detach()
            else:
                rebuilt[name] = state.make_tensors(values[name], manifest)
        same = manifest.meta.get("world_size") == self._runtime.rank.world_size
        random = random_states(self._runtime) if same else {}
        rank = self._runtime.rank.rank
        named = {random_state_name(name, rank): value for name, value in random.items()}
        if not named.keys() <= manifest.tensors.keys():
            random, named = {}, {}
        load_checkpoint(
            checkpoint,
            {**state.tensors, **named},
            manifest,
            verify=False,
            layouts=state.layouts,
            channel=channel,
        )
        for name, each in objects.items():
            if isinstance(each, Optimizer):
                state.set_groups(each, values[name])
            elif name in rebuilt:
                each.load_state_dict(rebuilt[name])
        if random:
            set_random_states(random, self._runtime)
        updates.count = int(manifest.meta.get("updates", manifest.iteration))
        updates.loss_scale.restore(manifest.meta.get("loss_scale") or {})
        return {
            name: value
            for name, value in values.items()
            if name not in objects and not _is_of_optimizer(value)
        }

    def _check_names(self, call: str, objects: Mapping[str, Any]) -> None:
        """Raise unless the names are identifiers, which do not clash, and the same on all ranks."""
        for name in objects:
            if name == _RESERVED:
                raise ConfigError(f"`{call}({name}=...)`: the name is taken by the random states")
            if not name.isidentifier():
                raise ConfigError(
                    f"`{call}(**{{{name!r}: ...}})`: the name is no identifier",
                    why="names of tensors begin with it: `model.layer.weight`",
                )
        kinds = {name: type(each).__name__ for name, each in objects.items()}
        check_same(self._runtime, f"the objects of `{call}`", kinds)


class _State:
    """Tensors of models and optimizers by their names in a checkpoint.

    Attributes:
        tensors: Local tensors.
        layouts: Layouts of sharded tensors.
    """

    def __init__(self, placement: ModelPlacement) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.layouts: dict[str, TensorLayout] = {}
        self._shards = placement.mesh.shards
        self._names: dict[int, str] = {}

    def add_model(self, name: str, model: nn.Module) -> None:
        """Add the parameters and persistent buffers of a model."""
        for key, parameter in model.named_parameters():
            self._names[id(parameter)] = f"{name}.{key}"
        for key, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                raise ConfigError(
                    f"`{name}`: `{key}` of its `state_dict` is a {type(tensor).__name__}",
                    why="a model's state is made of tensors",
                )
            self._add(f"{name}.{key}", tensor)

    def add_optimizer(self, name: str, optimizer: Optimizer) -> dict[str, Any]:
        """Add the state of an optimizer; return its hyperparameters and numbers as JSON values."""
        groups, numbers = [], dict[str, dict[str, Any]]()
        for group in optimizer.param_groups:
            names = [self._name(name, optimizer, parameter) for parameter in group["params"]]
            for parameter, own in zip(group["params"], names, strict=True):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        self._add(f"{name}.{key}.{own}", value)
                    elif value is not None:
                        numbers.setdefault(own, {})[key] = value
            values = {key: value for key, value in group.items() if key != "params"}
            shown = {
                key: value.item() if isinstance(value, Tensor) else value
                for key, value in values.items()
            }
            groups.append({"params": names, "values": shown})
        return {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}

    def make_optimizer_state(self, name: str, optimizer: Optimizer, manifest: Manifest) -> None:
        """Make the tensors of an optimizer's state that are in a checkpoint."""
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

    def take_tensors(self, name: str, value: Any) -> Any:
        """Return a JSON value with references in the places of tensors, which are added."""
        if isinstance(value, Tensor):
            self.tensors[name] = value.detach()
            return {_TENSOR: name}
        if isinstance(value, Mapping):
            return {
                str(key): self.take_tensors(f"{name}.{key}", each) for key, each in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.take_tensors(f"{name}.{index}", each) for index, each in enumerate(value)]
        return value

    def make_tensors(self, value: Any, manifest: Manifest) -> Any:
        """Return a JSON value with new tensors in the places of references."""
        if isinstance(value, dict) and value.keys() == {_TENSOR}:
            entry = manifest.tensors[value[_TENSOR]]
            made = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
            self.tensors[value[_TENSOR]] = made
            return made
        if isinstance(value, dict):
            return {key: self.make_tensors(each, manifest) for key, each in value.items()}
        if isinstance(value, list):
            return [self.make_tensors(each, manifest) for each in value]
        return value

    def _add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, or the local part of a sharded tensor unless it is empty."""
        local = local_part(tensor)
        if local is tensor:
            self.tensors[name] = tensor.detach()
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


def _ordered(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield models first, whose parameters name the state of optimizers."""
    yield from sorted(objects.items(), key=lambda item: not isinstance(item[1], nn.Module))


def _value_of(found: Any) -> Any:
    state_dict = getattr(found, "state_dict", None)
    return state_dict() if callable(state_dict) else found


def _values(checkpoint: Path, manifest: Manifest) -> dict[str, Any]:
    values = manifest.meta.get("values")
    if not isinstance(values, dict):
        raise CheckpointError(
            f"`{checkpoint}` was not saved by `Session.save`",
            why="`lmcore train` saved it, or another program",
            hint="`lmcore train --load` continues its run",
        )
    return values


def _require_loadable(objects: Mapping[str, Any]) -> None:
    for name, each in objects.items():
        is_state = isinstance(each, (nn.Module, Optimizer, Tensor))
        if not is_state and not hasattr(each, "load_state_dict"):
            raise ConfigError(
                f"`load({name}=...)` of {type(each).__name__}",
                why="it has no `load_state_dict`",
                hint=f'JSON values are returned: `values = rt.load(...)`, `values["{name}"]`',
            )


def _require(
    checkpoint: Path, manifest: Manifest, values: Mapping[str, Any], objects: Mapping[str, Any]
) -> None:
    saved = {tensor.partition(".")[0] for tensor in manifest.tensors} - {_RESERVED} | values.keys()
    for name, each in objects.items():
        is_empty = isinstance(each, nn.Module) and not each.state_dict()
        if name not in saved and not is_empty:
            raise CheckpointError(
                f"checkpoint `{checkpoint}` has no `{name}`",
                why=f"it has {', '.join(f'`{each}`' for each in sorted(saved))}"
                if saved
                else "it is empty",
                hint="give the names of `save`",
            )


def _is_of_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and {"groups", "numbers"} <= value.keys()


def _require_class(checkpoint: Path, name: str, optimizer: Optimizer, saved: Any) -> None:
    own = type(optimizer).__name__
    if not _is_of_optimizer(saved) or saved.get("class", own) != own:
        kind = saved.get("class") if _is_of_optimizer(saved) else "no optimizer"
        raise CheckpointError(
            f"`{name}` of checkpoint `{checkpoint}` is {kind}, not {own}",
            why="the state of one kind of optimizer does not fit another",
            hint=f"leave `{name}` out of `load` to begin with a new state",
        )
