"""`ShardedGradients`: gradients of sharded parameters that are missing on some or all ranks.

torch's `fully_shard` reduces the gradients that it finds, so that ranks which use different
parameters would reduce different tensors together.  Here missing gradients are filled with 0, and
gradients that are missing on all ranks are dropped afterwards.  Weights that a pass without
gradients has gathered are dropped after it, so that no later pass computes with old ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from lmcore.errors import RunError
from lmcore.parallel.gradient_buckets import plain_backward, sparse_gradient
from lmcore.parallel.tensor_layout import local_part
from lmcore.runtime.profiler_range import ProfilerRange, no_range

if TYPE_CHECKING:
    from lmcore.parallel.mesh import Axis

__all__ = ["ShardedGradients", "reshard"]


class ShardedGradients:
    """Counts the ranks on which each sharded parameter has a gradient.

    Attributes:
        filled: True if the last backward pass gave any parameter a gradient.
    """

    def __init__(
        self, root: nn.Module, axis: Axis, sharding: Callable[..., AbstractContextManager[None]]
    ) -> None:
        """Register hooks; all ranks must call it, with the same module.

        Args:
            root: Module that `fully_shard` has sharded.
            axis: Ranks over which it is sharded.
            sharding: Context of each micro-batch, which sets when torch reduces gradients.
        """
        from torch.distributed.fsdp import FSDPModule

        self.filled = False
        self._axis, self._sharding = axis, sharding
        self._named = list(root.named_parameters())
        self._indices = {name: index for index, (name, _) in enumerate(self._named)}
        self._present = [False] * len(self._named)  # since the last reduction
        self._before: set[int] = set()  # gradients of earlier reductions that were not used yet
        self._open = self._pending = False
        self._counts: tuple[Tensor, Any] | None = None  # kept until the all-reduce is done
        assert isinstance(root, FSDPModule)
        set_unused = getattr(root, "set_reduce_scatter_unused_params", None)  # since torch 2.13
        self._fills = set_unused is not None
        if set_unused is not None:
            set_unused(True)
        self._unseen = set(self._indices)
        for prefix, module in root.named_modules():
            if isinstance(module, FSDPModule):
                self._watch(prefix, module)

        def passed(*_: Any) -> None:
            if not torch.is_grad_enabled():
                reshard(root)

        root.register_forward_hook(passed)  # after torch's own, which leave weights gathered

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
            ConfigError: A gradient is sparse.
            RunError: The ranks use different parameters, and this torch cannot reduce that.
        """
        if not self._pending:
            self._before = {i for i, (_, each) in enumerate(self._named) if each.grad is not None}
        self._open, self.filled = True, False
        with self._sharding(last=last, profiler_range=profiler_range):
            yield
        self._open = False
        self._pending = self._pending or self.filled
        if last and self._pending:
            self._drop_unused()
            self._present, self._pending = [False] * len(self._named), False

    def _drop_unused(self) -> None:
        """Drop the gradients of parameters that had none on any rank."""
        if self._counts is not None:
            self._counts[1].wait()
        counts = torch.tensor(self._present, dtype=torch.float32, device=self._device())
        work = distributed.all_reduce(counts, group=self._axis.group, async_op=True)
        self._counts = counts, work
        absent = [
            index
            for index, (_, parameter) in enumerate(self._named)
            if not self._present[index]
            and index not in self._before
            and (parameter.grad is not None or not self._fills)
        ]
        if not absent:
            return
        work.wait()
        names = []
        for index, count in zip(absent, counts[absent].tolist(), strict=True):
            name, parameter = self._named[index]
            if not count:
                parameter.grad = None
            elif not self._fills:
                names.append(name)
        if names:
            raise RunError(
                f"only some ranks have a gradient of {', '.join(names[:5])}",
                why=f"torch {torch.__version__} cannot average such gradients of sharded models",
                hint="use torch 2.13 or newer, or no `zero_stage`",
            )

    def _device(self) -> torch.device:
        return local_part(self._named[0][1].data).device

    def _watch(self, prefix: str, module: Any) -> None:
        """Register hooks at gradients as soon as forward passes gather whole parameters."""

        def gathered(*_: Any) -> None:
            for name, parameter in module.named_parameters(prefix):
                if name in self._unseen and local_part(parameter) is parameter:
                    self._unseen.remove(name)
                    self._mark(name, parameter)
            if not self._unseen:
                handle.remove()

        handle = module.register_forward_pre_hook(gathered)

    def _mark(self, name: str, parameter: Tensor) -> None:
        index = self._indices[name]

        def computed(whole: Tensor) -> None:
            if not self._open:
                raise plain_backward(name)
            if whole.grad is not None and whole.grad.layout != torch.strided:
                raise sparse_gradient(name)
            self.filled = self._present[index] = True

        trained = parameter.requires_grad
        parameter.requires_grad = True  # torch requires it of a parameter with hooks
        parameter.register_post_accumulate_grad_hook(computed)
        parameter.requires_grad = trained


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
