"""Checkpoints of a user's loop: models, optimizers and further state in lmcore's format.

Tensors are saved under the name of their object: `model.layer.weight`, and optimizer state as
`optimizer.exp_avg.model.layer.weight`.  A checkpoint of any number of ranks and ZeRO stage can be
loaded by any other, as each rank reads its parts of whole tensors.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lmcore.base.errors import (
    CheckpointArgumentError,
    ConfigError,
    LmcoreError,
    counted,
    suggestion,
)
from lmcore.checkpoint import (
    WritePlanner,
    load_checkpoint,
    newest_verified,
    save_checkpoint,
    survey,
)
from lmcore.contract.transfer.staging import stage_tensors
from lmcore.library.exchange import check_same
from lmcore.library.saved_tensors import (
    SavedReplicas,
    SavedTensors,
    decode,
    encode,
    has_tensors,
    is_value,
    plain_name,
)
from lmcore.parallel.random_states import (
    named_random_states,
    random_state_name,
    random_states,
    set_random_states,
)

if TYPE_CHECKING:
    from lmcore.checkpoint import Manifest
    from lmcore.checkpoint.write_plan import WritePlan
    from lmcore.library.placement import ModelPlacement
    from lmcore.library.update import Updates
    from lmcore.runtime.runtime import Runtime

__all__ = ["SavedStates"]

logger = logging.getLogger(__name__)

_RESERVED = "rng"
_SHOWN = 10
_MODEL, _OPTIMIZER, _TENSOR, _VALUE = "a model", "an optimizer", "a tensor", "a value"
"""Kinds of objects in a checkpoint."""
_HINTS = {
    "choose another directory with `--save`": "choose another directory",
    "choose a directory with `--save` that": "choose a directory that",
    "`--keep-last N` deletes": "`keep_last=N` deletes",
    "give the `--precision` that it was trained with": "start the session with the `precision` of "
    "the session that saved it",
    "give the model options that the checkpoint was trained with": "build the model as it was when "
    "the checkpoint was saved",
    "load a run that lmcore trained, or leave `--load` out": "give the directory of `save`",
    "`--load RUN/checkpoints/iter_XXXXXXX`": "give its directory `iter_XXXXXXX` to `load`",
}
"""Hints with options of `lmcore train`, and their replacements for a caller of `save` or `load`."""


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
        self._replicas = SavedReplicas(runtime)
        self._held: dict[str, Any] = {}

    def save(
        self,
        directory: str | Path,
        updates: Updates,
        objects: Mapping[str, Any],
        *,
        keep_last: int | None,
    ) -> Path:
        """Save a checkpoint and return its path; see `Session.save`."""
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise ConfigError(f"`save(keep_last={keep_last!r})`: expected a number, 1 up, or None")
        path = _path("save", directory)
        self._check_names("save", objects)
        updates.finite.check_copied()
        self._placement.reshard()  # a pass without backward leaves whole weights
        state = SavedTensors(self._placement)
        values: dict[str, Any] = {}
        optimizers = [
            name
            for name, each in objects.items()
            if isinstance(each, Optimizer) and self._placement.has_parameters(each)
        ]
        for name, each in _ordered(objects):
            if isinstance(each, nn.Module):
                state.add_model(name, each)
            elif isinstance(each, Optimizer):
                found = state.add_optimizer(name, each)
                state.complete_optimizer(name, each, self._runtime)
                values[name] = encode(name, found, state.add)
            elif isinstance(each, Tensor):
                state.add(name, each)
            else:
                values[name] = encode(name, _value_of(each), state.add)
        tensors = state.tensors | named_random_states(self._runtime)
        meta: dict[str, Any] = {
            "values": values,
            "updates": updates.count,
            "loss_scale": updates.loss_scale.state(),
            "world_size": self._runtime.rank.world_size,
            "precision": self._runtime.precision.name,
        }
        with _hints_for_callers():
            plan = self._plan(tensors, state)
            groups = {name: values[name]["groups"] for name in values if name in optimizers}
            self._runtime.device.step_boundary()
            self._replicas.check(state.weights, groups)
            return save_checkpoint(
                path,
                updates.count,
                stage_tensors(self._runtime.stager, plan.views(tensors)),
                meta,
                model_shape={},
                keep_last=keep_last,
                plan=plan,
                channel=self._planner.saves,
            )

    def _plan(self, tensors: Mapping[str, Tensor], state: SavedTensors) -> WritePlan:
        """Return the write plan of this rank.

        Raises:
            RunError: The ranks have other tensors.
        """
        held = {name: (str(each.dtype), each.shape) for name, each in tensors.items()}
        processes = self._runtime.processes
        if processes and any(processes.gather(held != self._held, "the tensors of a checkpoint")):
            check_same(self._runtime, "the tensors of `save`", state.shapes)
            self._planner.forget()  # state may begin on one rank only
        self._held = held
        unequal = tensors.keys() - state.layouts.keys() - state.replicas
        return self._planner.plan(tensors, state.layouts, unequal)

    def load(
        self, directory: str | Path, updates: Updates, objects: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Load the newest checkpoint and return its JSON values; see `Session.load`."""
        path = _path("load", directory)
        self._check_names("load", objects)
        _require_loadable(objects)
        with _hints_for_callers():
            found = newest_verified(
                survey(path),
                channel=self._planner.loads,
                agree=lambda identity: check_same(
                    self._runtime, "the checkpoint that they load", identity
                ),
            )
            returned = self._fill(found.path, found.manifest, updates, objects)
        if self._runtime.rank.rank == 0:
            warning = found.warning()
            if warning is not None:
                logger.warning("%s", warning)
            logger.info("loaded %s", found.path)
        return returned

    def _fill(
        self,
        checkpoint: Path,
        manifest: Manifest,
        updates: Updates,
        objects: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Fill objects from a checkpoint and return its JSON values."""
        stored, manifest = _plain_names(manifest)
        values = _values(checkpoint, manifest)
        self._placement.reshard()
        state = SavedTensors(self._placement)
        rebuilt: dict[str, Any] = {}
        _require(checkpoint, manifest, values, objects)
        for name, each in _ordered(objects):
            if isinstance(each, nn.Module):
                own = {f"{name}.{plain_name(key)}" for key in each.state_dict()}
                saved = [key for key in manifest.tensors if key.startswith(f"{name}.")]
                _require_all(checkpoint, name, each, saved, own)
                state.add_model(name, each)
            elif isinstance(each, Optimizer):
                groups = values[name]["groups"]
                saved = [key for group in groups for key in group["params"]]
                _require_class(checkpoint, name, each, values[name])
                _require_all(checkpoint, name, each, saved, state.parameter_names(name, each))
                state.make_optimizer_state(name, each, manifest)
                state.add_optimizer(name, each)
            elif isinstance(each, Tensor):
                state.add(name, each)
            else:
                rebuilt[name] = decode(values[name], lambda key: state.make_tensor(key, manifest))
        random = self._random_states(manifest)
        rank = self._runtime.rank.rank
        named = {random_state_name(name, rank): value for name, value in random.items()}
        wanted = state.tensors | named
        held = {stored.get(name, name): entry for name, entry in manifest.tensors.items()}
        load_checkpoint(
            checkpoint,
            {stored.get(name, name): tensor for name, tensor in wanted.items()},
            replace(manifest, tensors=held),
            verify=False,
            layouts={stored.get(name, name): one for name, one in state.layouts.items()},
            channel=self._planner.loads,
        )
        returned = {
            name: decode(value)
            for name, value in values.items()
            if name not in objects and not _is_of_optimizer(value) and not has_tensors(value)
        }
        for name, each in objects.items():
            if isinstance(each, Optimizer):
                state.set_groups(each, decode(values[name]))
            elif name in rebuilt and _is_state(each):
                each.load_state_dict(rebuilt[name])
            elif name in rebuilt:
                returned[name] = rebuilt[name]
        if random:
            set_random_states(random, self._runtime)
        updates.finite.drop_copied()
        updates.count = int(manifest.meta.get("updates", manifest.iteration))
        updates.loss_scale.restore(manifest.meta.get("loss_scale") or {})
        return returned

    def _random_states(self, manifest: Manifest) -> dict[str, Tensor]:
        """Return tensors for the random states of this rank; none if a checkpoint lacks them."""
        rank = self._runtime.rank
        if manifest.meta.get("world_size") != rank.world_size:
            return {}
        random = random_states(self._runtime)
        names = {random_state_name(name, rank.rank) for name in random}
        return random if names <= manifest.tensors.keys() else {}

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


def _path(call: str, directory: Any) -> Path:
    if not isinstance(directory, (str, os.PathLike)):
        raise ConfigError(f"`{call}({directory!r})`: expected the path of a directory")
    if isinstance(directory, str) and not directory.strip():
        raise ConfigError(
            f"`{call}({directory!r})`: the path is empty",
            why="it would be the working directory",
            hint="a variable may be unset; `.` is the working directory",
        )
    return Path(directory)


def _ordered(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield models first, whose parameters name the state of optimizers."""
    yield from sorted(objects.items(), key=lambda item: not isinstance(item[1], nn.Module))


def _value_of(found: Any) -> Any:
    state_dict = getattr(found, "state_dict", None)
    return state_dict() if callable(state_dict) else found


def _values(checkpoint: Path, manifest: Manifest) -> dict[str, Any]:
    values = manifest.meta.get("values")
    if not isinstance(values, dict):
        raise CheckpointArgumentError(
            f"`{checkpoint}` was not saved by `Session.save`",
            why="`lmcore train` saved it, or another program",
            hint="`lmcore train --load` continues its run",
        )
    return values


def _plain_names(manifest: Manifest) -> tuple[dict[str, str], Manifest]:
    """Return a manifest without the parts of names that `torch.compile` adds.

    Earlier versions saved them.

    Args:
        manifest: Manifest of a checkpoint.

    Returns:
        Name in the checkpoint by the plain one, where the two differ; and the manifest.
    """
    values = manifest.meta.get("values")
    if not isinstance(values, dict):
        return {}, manifest
    own = {name for name, value in values.items() if not _is_of_optimizer(value)}
    plain = {
        name: name if name.partition(".")[0] in own else plain_name(name)
        for name in manifest.tensors
    }
    renamed = {new: name for name, new in plain.items() if new != name}
    if not renamed:
        return {}, manifest
    optimizers = {name: value for name, value in values.items() if name not in own}
    for name, value in optimizers.items():
        groups = [
            {**group, "params": [plain_name(one) for one in group["params"]]}
            for group in value["groups"]
        ]
        numbers = {plain_name(one): held for one, held in value["numbers"].items()}
        optimizers[name] = {**value, "groups": groups, "numbers": numbers}
    tensors = {plain[name]: entry for name, entry in manifest.tensors.items()}
    meta = {**manifest.meta, "values": {**values, **optimizers}}
    return renamed, replace(manifest, tensors=tensors, meta=meta)


def _is_state(found: Any) -> bool:
    return callable(getattr(found, "load_state_dict", None))


def _require_loadable(objects: Mapping[str, Any]) -> None:
    for name, each in objects.items():
        if not _is_state(each) and not is_value(each):
            raise ConfigError(
                f"`load({name}=...)` of {type(each).__name__}",
                why="it has no `load_state_dict`, and is no tensor or JSON value",
                hint=f'JSON values are returned: `values = rt.load(...)`, `values["{name}"]`',
            )


def _require(
    checkpoint: Path, manifest: Manifest, values: Mapping[str, Any], objects: Mapping[str, Any]
) -> None:
    """Refuse objects that a checkpoint does not have, or has as another kind of object.

    Raises:
        CheckpointError: There is one.
    """
    names = {tensor.partition(".")[0] for tensor in manifest.tensors} - {_RESERVED}
    saved = {name: _TENSOR if name in manifest.tensors else _MODEL for name in sorted(names)}
    saved |= {
        name: _OPTIMIZER if _is_of_optimizer(value) else _VALUE for name, value in values.items()
    }
    kinds = {nn.Module: _MODEL, Optimizer: _OPTIMIZER, Tensor: _TENSOR, object: _VALUE}
    for name, each in objects.items():
        kind = next(kind for cls, kind in kinds.items() if isinstance(each, cls))
        if saved.get(name) == kind or (isinstance(each, nn.Module) and not each.state_dict()):
            continue
        if name in saved:
            raise CheckpointArgumentError(
                f"`{name}` of checkpoint `{checkpoint}` is {saved[name]}, not {kind}",
                why=f"`load` was given {type(each).__name__}",
                hint="give each object by the name that it has in `save`",
            )
        listed = ", ".join(f"`{other}`" for other in sorted(saved))
        left = [other for other in saved if saved[other] == kind and other not in objects]
        raise CheckpointArgumentError(
            f"checkpoint `{checkpoint}` has no `{name}`",
            why=f"it has {listed}" if saved else "it is empty",
            hint=f"did you mean `{left[0]}`? `load` takes the names of `save`"
            if len(left) == 1
            else suggestion(name, saved),
        )


def _require_all(
    checkpoint: Path, name: str, found: Any, saved: Sequence[str], own: Collection[str]
) -> None:
    """Refuse a model or optimizer without some of the tensors that it was saved with.

    Args:
        checkpoint: Directory of the checkpoint.
        name: Name of the object.
        found: Model or optimizer.
        saved: Names of tensors or parameters in the checkpoint.
        own: Names of the object's own.

    Raises:
        CheckpointError: It lacks some.
    """
    lacking = [f"`{each}`" for each in saved if each not in own]
    if lacking:
        more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
        raise CheckpointArgumentError(
            f"`{name}` of checkpoint `{checkpoint}` has {counted(len(lacking), 'tensor')} that "
            f"this {type(found).__name__} has not",
            why=", ".join(lacking[:_SHOWN]) + more,
            hint=f"build `{name}` as it was when it was saved, or leave it out of `load`",
        )


def _is_of_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and {"groups", "numbers"} <= value.keys()


def _require_class(checkpoint: Path, name: str, optimizer: Optimizer, saved: Any) -> None:
    """Refuse the state of an optimizer of another class, or with other groups.

    Raises:
        CheckpointError: They differ.
    """
    groups, own_groups = len(saved["groups"]), len(optimizer.param_groups)
    if groups != own_groups:
        raise CheckpointArgumentError(
            f"`{name}` of checkpoint `{checkpoint}` has {counted(groups, 'parameter group')}, and "
            f"{type(optimizer).__name__} has {own_groups}",
            hint="make the optimizer with the groups that it had when it was saved",
        )
    own = type(optimizer).__name__
    if saved.get("class", own) != own:
        raise CheckpointArgumentError(
            f"`{name}` of checkpoint `{checkpoint}` is {saved['class']}, not {own}",
            why="the state of one kind of optimizer does not fit another",
            hint=f"leave `{name}` out of `load` to begin with a new state",
        )


@contextlib.contextmanager
def _hints_for_callers() -> Iterator[None]:
    """Replace options of `lmcore train` in the hint of an error, also of another rank's."""
    try:
        yield
    except LmcoreError as error:
        for option, replacement in _HINTS.items():
            error.hint = error.hint and error.hint.replace(option, replacement)
        raise
