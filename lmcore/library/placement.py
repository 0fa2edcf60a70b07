"""Placement of a user's model and optimizer: device, precision, replication or sharding."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lmcore.base.errors import ConfigError, DeviceError
from lmcore.config.derived.layout import ParallelLayout
from lmcore.contract.dtype import dtype_name
from lmcore.contract.precision.check import without_gradients
from lmcore.library.exchange import check_same
from lmcore.parallel.collectives import broadcast_coalesced
from lmcore.parallel.mesh import ParallelMesh
from lmcore.parallel.tensor_layout import local_part

if TYPE_CHECKING:
    from lmcore.contract import PrecisionPolicy
    from lmcore.parallel.data_parallel import Replica
    from lmcore.runtime.runtime import Runtime

__all__ = ["ModelPlacement"]

_connected: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that are replicated or sharded, by the processes of this session or an earlier one."""

_WHOLE = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Rprop)
"""Optimizers whose operations torch's `DTensor` does not have, or not for each shape."""
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class ModelPlacement:
    """Prepared models and optimizers of a session.

    Attributes:
        models: Prepared models, in the order of `prepare`.
        device: Device of the models.
        mesh: Ranks over which models are replicated or sharded.
    """

    def __init__(self, runtime: Runtime, zero_stage: int) -> None:
        """Connect the ranks; all ranks must call it.

        Args:
            runtime: Device, precision and processes.
            zero_stage: ZeRO stage of models.
        """
        self.models: list[Replica] = []
        self._runtime, self.device = runtime, runtime.device.torch_device
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._parameters: dict[int, nn.Parameter] = {}  # of the models, by their ids
        # From the parameters before `prepare`, which hold whole weights: they must not be kept.
        self._replaced: MutableMapping[nn.Parameter, nn.Parameter] = WeakIdKeyDictionary()
        size = runtime.rank.world_size
        layout = ParallelLayout(data=size, zero_stage=zero_stage if size > 1 else 0)
        self.mesh = ParallelMesh.of(layout, runtime)

    def prepare(self, objects: Sequence[Any]) -> None:
        """Prepare models and then optimizers, in place; see `Session.prepare`."""
        for each in objects:
            if not isinstance(each, (nn.Module, Optimizer)):
                raise _wrong_type(each)
        for each in objects:
            if isinstance(each, nn.Module):
                self._prepare_model(each)
        for each in objects:
            if isinstance(each, Optimizer):
                self._prepare_optimizer(each)

    def move(self, model: Any, optimizer: Any = None) -> None:
        """Move a model from the host to the device; its optimizer gets the moved parameters.

        A model that is not on the host, and anything that is no model, is left where it is.
        """
        if not isinstance(model, nn.Module) or self._runtime.device.type == "cpu":
            return
        if {parameter.device.type for parameter in model.parameters()} != {"cpu"}:
            return
        self._share_with_prepared(model)
        self._move(model)
        if isinstance(optimizer, Optimizer):
            self._exchange(optimizer)

    def is_prepared(self, model: nn.Module) -> bool:
        """Return True if a model was prepared."""
        return any(each.root is model for each in self.models)

    def is_replicated(self, tensor: Tensor) -> bool:
        """Return True if a tensor is a prepared model's, on its device, and not sharded."""
        known = id(tensor) in self._parameters and tensor.device.type == self.device.type
        return known and local_part(tensor) is tensor

    def reshard(self) -> None:
        """Drop gathered weights of sharded models, so that their parameters are the shards."""
        if self.mesh.layout.zero_stage:
            from lmcore.parallel.sharded_gradients import reshard

            for prepared in self.models:
                reshard(prepared.root)

    def has_parameters(self, optimizer: Optimizer) -> bool:
        """Return True if all parameters of an optimizer are of prepared models."""
        groups = optimizer.param_groups
        return all(id(each) in self._parameters for group in groups for each in group["params"])

    def _refuse(self, model: nn.Module) -> None:
        """Refuse a model that is prepared already, or has no weights."""
        if self.is_prepared(model):
            raise ConfigError(
                f"`prepare`: this {type(model).__name__} is prepared already",
                hint="`prepare` changes the model itself: call it once, and use the same object",
            )
        others = {id(module) for each in self.models for module in each.root.modules()}
        if any(id(module) in others for module in model.modules()):
            raise ConfigError(
                f"`prepare`: a part of this {type(model).__name__} is prepared already",
                hint="prepare the whole model only",
            )
        if model in _connected:
            raise ConfigError(
                f"`prepare`: this {type(model).__name__} was prepared in an earlier session",
                why="its gradients are reduced by the process groups of that session",
                hint="prepare a new model, and load its weights by `rt.load`",
            )
        for name, tensor in _tensors(model):
            if nn.parameter.is_lazy(tensor):
                raise ConfigError(
                    f"`prepare`: `{name}` has no shape yet",
                    hint="run a forward pass of the model first, on the host, and make the "
                    "optimizer after it",
                )
            if tensor.is_meta:
                raise ConfigError(
                    f"`prepare`: `{name}` is on the meta device, without memory",
                    hint="give the model its weights first, on the host or the device",
                )

    def _prepare_model(self, model: nn.Module) -> None:
        self._refuse(model)
        runtime = self._runtime
        shared = self._share_with_prepared(model)
        _refuse_divided(model)
        before = dict(model.named_parameters(remove_duplicate=False))
        facts: dict[str, Any] = {
            f"module {name}" if name else "class": type(module).__qualname__
            for name, module in model.named_modules()
        }
        for name, tensor in _tensors(model):
            strides = list(tensor.stride()) if tensor.layout == torch.strided else None
            dtype = dtype_name(tensor.dtype)
            facts[name] = [list(tensor.shape), strides, dtype, tensor.requires_grad]
        facts |= {f"{name} in another prepared model": True for name in shared}
        check_same(runtime, "the model that they prepare", facts)
        if self.mesh.replicas.size > 1:
            _refuse_sparse(model)
        if self.mesh.layout.zero_stage:
            _refuse_unsharded(model)
        self._move(model)
        dtypes = {name: dtype_name(parameter.dtype) for name, parameter in before.items()}
        with _without_hooks(model) as hooks, runtime.rng.preserved(), without_gradients(model):
            try:
                runtime.precision.apply(model)
            except DeviceError as error:
                raise _of_dtypes(runtime.precision, dtypes) or error from None
        prepared = self._replicate(model)
        if self.mesh.layout.zero_stage:
            _set_hooks(model, hooks)
        after = self._record(model, before)
        self._parameters |= {id(parameter): parameter for parameter in after.values()}
        self.models.append(prepared)

    def _move(self, model: nn.Module) -> None:
        """Move a model to the device; shared parameters stay shared."""
        before = dict(model.named_parameters(remove_duplicate=False))
        with _without_hooks(model):
            model.to(self._runtime.device.torch_device)
            _share_again(model, before)
        self._record(model, before)

    def _record(
        self, model: nn.Module, before: Mapping[str, nn.Parameter]
    ) -> dict[str, nn.Parameter]:
        """Remember which parameters were replaced, and return the current ones by name."""
        after = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in before.items():
            if after[name] is not parameter:
                self._replaced[parameter] = after[name]
        return after

    def _share_with_prepared(self, model: nn.Module) -> list[str]:
        """Exchange parameters that were moved with another model, so that both share them.

        Returns:
            Names of the parameters that *model* shares with prepared models.

        Raises:
            ConfigError: It shares a parameter, and models are sharded.
        """
        shared = []
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            known = self._current(parameter)
            if known is not parameter:
                _set_parameter(model, name, known)
            if id(known) not in self._parameters:
                continue
            if self.mesh.layout.zero_stage:
                raise ConfigError(
                    f"`prepare`: `{name}` of this {type(model).__name__} is also "
                    f"{self._place_of(known)}, which is prepared already",
                    why="each model is sharded alone with `zero_stage`, so that its optimizer "
                    "would train two parameters",
                    hint="prepare one module that has both models, such as "
                    "`nn.ModuleList([first, second])`, or use `zero_stage=0`",
                )
            shared.append(name)
        return shared

    def _place_of(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter and its model's class, for messages."""
        return next(
            f"`{name}` of a {type(prepared.root).__name__.removeprefix('FSDP')}"
            for prepared in self.models
            for name, each in prepared.root.named_parameters(remove_duplicate=False)
            if self._current(each) is parameter
        )

    def _current(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter on the device, or the sharded one, that replaced *parameter*."""
        while parameter in self._replaced:
            parameter = self._replaced[parameter]
        return parameter

    def _replicate(self, model: nn.Module) -> Replica:
        """Broadcast the weights of rank 0, and replicate or shard the model."""
        from lmcore.parallel.data_parallel import replicate

        if self.mesh.replicas.size > 1:
            _connected.add(model)
        with torch.no_grad():
            broadcast_coalesced([tensor for _, tensor in _tensors(model)], self.mesh.replicas)
        known = self._parameters
        return replicate(model, _layers(model), self.mesh, all_used=False, reduced=known)

    def _prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Check the parameters of an optimizer, and replace them by the sharded parameters."""
        if optimizer in self._optimizers:
            raise ConfigError(
                f"`prepare`: this {type(optimizer).__name__} is prepared already",
                hint="call `prepare` once for each object",
            )
        if self.mesh.layout.zero_stage and isinstance(optimizer, _WHOLE):
            raise ConfigError(
                f"`prepare`: {type(optimizer).__name__} with `zero_stage`",
                why="torch computes its update from whole parameters only",
                hint="use `zero_stage=0`, or another optimizer, such as `AdamW`",
            )
        check_same(self._runtime, "the optimizer that they prepare", _settings(optimizer))
        self._exchange(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._parameters:
                    raise ConfigError(
                        f"`prepare`: {type(optimizer).__name__} has a parameter "
                        f"{list(parameter.shape)} of no prepared model",
                        why="the model was exchanged after the optimizer was made, or is not "
                        "prepared",
                        hint="make the optimizer from `model.parameters()`, and prepare the model "
                        "with it or before it",
                    )
        self._optimizers.add(optimizer)

    def _exchange(self, optimizer: Optimizer) -> None:
        """Replace the parameters of an optimizer by those on the device, or by the sharded ones."""
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                known = self._current(parameter)
                if known is parameter:
                    continue
                state = optimizer.state.get(parameter, {})
                if state.get("step", bool(state)):
                    raise ConfigError(
                        f"`prepare`: {type(optimizer).__name__} has made steps already",
                        why="its state belongs to parameters that are moved or sharded now",
                        hint="prepare the optimizer before its first step",
                    )
                if state:  # made by the optimizer's constructor
                    optimizer.state[known] = {
                        key: _like(value, parameter, known) for key, value in state.items()
                    }
                    del optimizer.state[parameter]
                group["params"][index] = known


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a model, shared ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _like(value: Any, before: Tensor, now: Tensor) -> Any:
    """Return state of a parameter, moved and sharded as the parameter is *now*."""
    if not isinstance(value, Tensor) or value.shape != before.shape:
        return value
    if local_part(now) is now:
        return value.to(now.device)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(now, DTensor)
    moved = value.to(now.device)
    return distribute_tensor(moved, now.device_mesh, now.placements, src_data_rank=None)


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """Return the class, hyperparameters and shapes of an optimizer as JSON values."""
    found: dict[str, Any] = {"class": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            shown = [list(each.shape) for each in value] if key == "params" else repr(value)
            found[f"{key} of group {index}"] = shown
    return found


def _refuse_divided(model: nn.Module) -> None:
    """Refuse tensors that a call of torch has sharded.

    Raises:
        ConfigError: The model has one.
    """
    for name, tensor in _tensors(model):
        if local_part(tensor) is not tensor:
            raise ConfigError(
                f"`prepare`: `{name}` is a DTensor, which is divided over processes already",
                hint="give the model as it was before `fully_shard` or `distribute_tensor`: "
                "`lmcore.start(zero_stage=3)` shards it",
            )


def _refuse_sparse(model: nn.Module) -> None:
    """Refuse sparse tensors, and embeddings with sparse gradients.

    Raises:
        ConfigError: The model has one.
    """
    for name, tensor in _tensors(model):
        if tensor.layout != torch.strided:
            raise ConfigError(
                f"`prepare`: `{name}` is sparse",
                why="all ranks get the tensors of rank 0, which have to be dense for that",
                hint="keep it dense (`to_dense()`), or as an attribute that is no parameter or "
                "buffer",
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            from lmcore.parallel.gradient_buckets import sparse_gradient

            raise sparse_gradient(f"{name}.weight" if name else "weight")


def _refuse_unsharded(model: nn.Module) -> None:
    """Refuse parameters that torch does not shard.

    Raises:
        ConfigError: The model has one.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            fault = "complex"
            hint = "keep the real and imaginary parts (`torch.view_as_real`) as the parameter"
        elif parameter.dim() == 0:
            fault = "a scalar"
            hint = "give it one dimension: `nn.Parameter(value.reshape(1))`"
        elif parameter.numel() == 0:
            fault, hint = f"empty ({list(parameter.shape)})", "make it a buffer, or leave it out"
        elif not parameter.is_contiguous():
            fault = f"not contiguous (strides {list(parameter.stride())})"
            hint = (
                "`model.to(memory_format=torch.contiguous_format)` before for channels-last "
                "weights, `parameter.data = parameter.data.contiguous()` for others"
            )
        else:
            continue
        raise ConfigError(
            f"`prepare`: `{name}` is {fault}",
            why="`zero_stage` shards real, contiguous parameters with elements and dimensions only",
            hint=f"use `zero_stage=0`, or {hint}",
        )


def _share_again(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Share the parameters again that modules of *model* shared *before* its move to the device.

    For a device type of a plugin (PrivateUse1) torch's `Module.to` makes a parameter for each use.
    """
    first: dict[int, nn.Parameter] = {}
    for name, parameter in before.items():
        moved = model.get_parameter(name)
        shared = first.setdefault(id(parameter), moved)
        if moved is not shared:
            _set_parameter(model, name, shared)


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module), attribute, parameter)


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[dict[str, dict[str, Any]]]:
    """Remove the hooks of a model's gradients for the context, which may exchange parameters."""
    named = model.named_parameters()
    hooks = {name: {kind: getattr(each, kind) for kind in _HOOKS} for name, each in named}
    _set_hooks(model, {})
    try:
        yield hooks
    finally:
        _set_hooks(model, hooks)


def _set_hooks(model: nn.Module, hooks: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the hooks of a model's gradients, by the names of parameters."""
    for name, parameter in model.named_parameters():
        for kind in _HOOKS:
            own = hooks.get(name, {}).get(kind)
            if own is not None or getattr(parameter, kind) is not None:
                setattr(parameter, kind, {} if own is None else own)  # None removes none of them


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model that are sharded separately.

    They are the members of module lists of one class with several members and weights, as
    transformers have them.
    """
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        members = list(module)
        alike = len(members) > 1 and len({type(member) for member in members}) == 1
        if alike and all(any(True for _ in member.parameters()) for member in members):
            yield from members
            inside.update(part for member in members for part in member.modules())


def _of_dtypes(policy: PrecisionPolicy, dtypes: Mapping[str, str]) -> ConfigError | None:
    """Return the error that a model had weights of another dtype than a policy keeps."""
    real = {name: dtype for name, dtype in dtypes.items() if not dtype.startswith("complex")}
    other = next((name for name, dtype in real.items() if dtype != policy.keep), None)
    if other is None or policy.keep != "float32":
        return None
    return ConfigError(
        f"`prepare`: `{other}` is {dtypes[other]}",
        why=f"with the precision `{policy.name}` weights are in float32",
        hint="`model.float()` before",
    )


def _wrong_type(found: Any) -> ConfigError:
    return ConfigError(
        f"`prepare` of {type(found).__name__}",
        why="it is neither a `torch.nn.Module` nor a `torch.optim.Optimizer`",
        hint="`loader` takes a DataLoader; a learning-rate scheduler needs no preparation"
        if hasattr(found, "__iter__") or hasattr(found, "get_last_lr")
        else None,
    )
