"""`ShardedGradients`: gradients of sharded parameters that are missing on some or all ranks.

torch's `fully_shard` reduces the gradients that it finds, so that ranks which use different
parameters would reduce different tensors together.  Here missing gradients are filled with 0, and
gradients that are missing on all ranks are dropped afterwards.  A forward pass without backward
leaves weights gathered: they are dropped after a pass without gradients, and after each step of an
optimizer, so that no later pass computes with old ones.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from lmcore.base.errors import ConfigError, RunError
from lmcore.contract.torch_versions import UNUSED_SHARDED_PARAMETERS
from lmcore.parallel.gradient_buckets import plain_backward, sparse_gradient
from lmcore.parallel.tensor_layout import local_part
from lmcore.runtime.profiler_range import ProfilerRange, no_range

if TYPE_CHECKING:
    from lmcore.parallel.mesh import ParallelMesh

__all__ = ["ShardedGradients", "reshard"]


class ShardedGradients:
    """Counts the ranks on which each sharded parameter has a gradient.

    Attributes:
        filled: True if the last backward pass gave any parameter a gradient.
    """

    def __init__(
        self,
        root: nn.Module,
        mesh: ParallelMesh,
        sharding: Callable[..., AbstractContextManager[None]],
    ) -> None:
        """Register hooks; all ranks must call it, with the same module.

        Args:
            root: Module that `fully_shard` has sharded.
            mesh: Mesh with the ranks over which it is sharded.
            sharding: Context of each micro-batch, which sets when torch reduces gradients.
        """
        from torch.distributed.fsdp import FSDPModule

        self.filled = False
        self._group, self._stage = mesh.shards.group, mesh.layout.zero_stage
        self._sharding = sharding
        self._named = list(root.named_parameters())
        self._indices = {name: index for index, (name, _) in enumerate(self._named)}
        self._missing = set(self._indices.values())  # since the last reduction
        self._before: set[int] = set()  # gradients of earlier reductions that were not used yet
        self._open = self._pending = False
        self._counts: tuple[Tensor, Any] | None = None  # kept until the all-reduce is done
        assert isinstance(root, FSDPModule)
        if UNUSED_SHARDED_PARAMETERS:
            root.set_reduce_scatter_unused_params(True)
        self._without_hook = set(self._indices)
        for prefix, module in root.named_modules():
            if isinstance(module, FSDPModule):
                self._watch(prefix, module)
        _drop_old_weights(root)

    @contextlib.contextmanager
    def backward(self, *, last: bool, profiler_range: ProfilerRange = no_range) -> Iterator[None]:
        """Wrap the backward pass of a micro-batch; after the last one gradients are means.

        A gradient that is missing on a rank counts as 0 in the mean, and one that is missing on all
        ranks stays None.  If no parameter gets a gradient, which must be so on all ranks, nothing
        is reduced.

        Args:
            last: True for the last micro-batch of a step.
            profiler_range: Profiler range for the time spent waiting.

        Raises:
            ConfigError: A gradient is sparse, or the last micro-batch does not use the model.
            RunError: The ranks use different parameters, and this torch cannot reduce that.
        """
        if not self._pending:
            self._before = {i for i, (_, each) in enumerate(self._named) if each.grad is not None}
        self._open, self.filled = True, False
        try:
            with self._sharding(last=last, profiler_range=profiler_range):
                yield
        finally:
            self._open = False
        if last and self._pending and not self.filled and self._stage == 1:
            raise ConfigError(
                "the last micro-batch of an update does not use a model that an earlier one uses",
                why="`zero_stage=1` averages gradients in the last backward pass of the model",
                hint="use each model in the last micro-batch, or `zero_stage=2`",
            )
        self._pending = self._pending or self.filled
        if last and self._pending:
            self._drop_unused()
            self._missing, self._pending = set(self._indices.values()), False

    def _drop_unused(self) -> None:
        """Drop the gradients of parameters that had none on any rank."""
        if self._counts is not None:
            self._counts[1].wait()
        device = local_part(self._named[0][1].data).device
        counts = torch.ones(len(self._named), dtype=torch.float32, device=device)
        if self._missing:
            counts[sorted(self._missing)] = 0.0
        work = distributed.all_reduce(counts, group=self._group, async_op=True)
        self._counts = counts, work
        absent = [
            index
            for index in sorted(self._missing - self._before)
            if self._named[index][1].grad is not None or not UNUSED_SHARDED_PARAMETERS
        ]
        if not absent:
            return
        work.wait()
        names = []
        for index, count in zip(absent, counts[absent].tolist(), strict=True):
            name, parameter = self._named[index]
            if not count:
                parameter.grad = None
            elif not UNUSED_SHARDED_PARAMETERS:
                names.append(name)
        if names:
            raise RunError(
                f"only some ranks have a gradient of {', '.join(names[:5])}",
                why=UNUSED_SHARDED_PARAMETERS.absence,
                hint=f"use torch {UNUSED_SHARDED_PARAMETERS.since} or newer, or no `zero_stage`",
            )

    def _watch(self, prefix: str, module: Any) -> None:
        """Register hooks at gradients as soon as forward passes gather whole parameters."""

        def gathered(*_: Any) -> None:
            for name, parameter in module.named_parameters(prefix):
                if name in self._without_hook and local_part(parameter) is parameter:
                    self._without_hook.remove(name)
                    self._register(name, parameter)
            if not self._without_hook:
                handle.remove()

        handle = module.register_forward_pre_hook(gathered)
        module.register_forward_hook(_watch_backward)

    def _register(self, name: str, parameter: Tensor) -> None:
        index = self._indices[name]

        def computed(whole: Tensor) -> None:
            if not self._open:
                raise plain_backward(name)
            if whole.grad is not None and whole.grad.layout != torch.strided:
                raise sparse_gradient(name)
            self.filled = True
            self._missing.discard(index)

        sharded = self._named[index][1]

        def call_hooks(grad: Tensor) -> Tensor:
            hooks = sharded._backward_hooks or {}  # noqa: SLF001 - torch has no function for it
            for hook in list(hooks.values()):
                changed = hook(grad)
                grad = grad if changed is None else changed
            return grad

        trained = parameter.requires_grad
        parameter.requires_grad = True  # torch requires it of a parameter with hooks
        parameter.register_hook(call_hooks)
        parameter.register_post_accumulate_grad_hook(computed)
        parameter.requires_grad = trained


def _watch_backward(_module: nn.Module, _arguments: Any, output: Any) -> None:
    """Refuse backward passes that compute gradients of gradients: weights are dropped in them."""
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(_refuse_double_backward)


def _refuse_double_backward(_grad: Tensor) -> None:
    if torch.is_grad_enabled():
        raise ConfigError(
            "a backward pass with `create_graph=True` through a sharded model",
            why="its layers drop their gathered weights before the second backward pass",
            hint="use `zero_stage=0`: gradients of gradients, such as a gradient penalty, need it",
        )


def _drop_old_weights(root: nn.Module) -> None:
    """Call `reshard` after each forward pass without gradients, and each step of an optimizer."""
    model = weakref.ref(root)

    def passed(module: nn.Module, *_: Any) -> None:
        if not torch.is_grad_enabled():
            reshard(module)

    def stepped(*_: Any) -> None:
        if (module := model()) is not None:
            reshard(module)

    root.register_forward_hook(passed)  # after torch's own, which leave weights gathered
    weakref.finalize(root, register_optimizer_step_post_hook(stepped).remove)


def reshard(root: nn.Module) -> None:
    """Drop the weights that `fully_shard` has gathered; the next pass gathers them again.

    A pass without backward leaves them gathered, and registered in the place of the shards.

    Args:
        root: Sharded module.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
