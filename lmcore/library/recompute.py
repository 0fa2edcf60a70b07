"""Recompute policies for the modules of a user's model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lmcore.accelerator.recompute import remembering
from lmcore.errors import ConfigError
from lmcore.plugin import choose_recompute, recompute_policies

if TYPE_CHECKING:
    from lmcore.plugin import PluginSet
    from lmcore.runtime.runtime import Runtime

__all__ = ["recompute_module"]

_MARK = "_lmcore_recompute"


def recompute_module(module: nn.Module, name: str, runtime: Runtime, plugins: PluginSet) -> None:
    """Apply a recompute policy to the forward pass of a module, in training.

    A policy for whole layers runs the module itself; a policy for attention runs torch's
    `scaled_dot_product_attention` within it.

    Args:
        module: Module; changed in place.
        name: Name of the policy.
        runtime: Device, precision and random-number streams.
        plugins: Plugins that offer policies.

    Raises:
        ConfigError: The device does not offer the policy, or the module has one already.
        DeviceError: The policy is not exact on the device.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"`recompute` of {type(module).__name__}", why="it is no `torch.nn.Module`"
        )
    if hasattr(module, _MARK):
        raise ConfigError(
            f"`recompute`: this {type(module).__name__} has policy `{getattr(module, _MARK)}`",
            hint="apply one policy to a module",
        )
    offered = recompute_policies(plugins, runtime.selection, runtime.device)
    policy = choose_recompute(offered, name)
    policy.verify(runtime.device)
    remember = remembering(runtime.rng, runtime.precision.context)
    forward = module.forward
    if policy.block is not None:
        run = functools.partial(policy.block, remember=remember)

        @functools.wraps(forward)
        def whole(*arguments: Any, **options: Any) -> Any:
            if not module.training:
                return forward(*arguments, **options)
            return _through(run, forward, arguments, options)

        module.forward = whole
    elif policy.attention is not None:
        run = functools.partial(policy.attention, remember=remember)

        @functools.wraps(forward)
        def attention(*arguments: Any, **options: Any) -> Any:
            if not module.training:
                return forward(*arguments, **options)
            with _Attention(run):
                return forward(*arguments, **options)

        module.forward = attention
    setattr(module, _MARK, policy.name)


class _Attention(TorchFunctionMode):
    """Mode in which torch's attention is called by a recompute policy."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        if function is not functional.scaled_dot_product_attention:
            return function(*arguments, **options)
        return _through(self._run, function, arguments, options)


def _through(
    run: Callable[..., Any],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Call a function by a runner, which takes tensors as positional arguments only."""
    places = [index for index, value in enumerate(arguments) if isinstance(value, Tensor)]
    names = [name for name, value in options.items() if isinstance(value, Tensor)]

    def call(*tensors: Tensor) -> Any:
        own, named = list(arguments), dict(options)
        for index, tensor in zip(places, tensors[: len(places)], strict=True):
            own[index] = tensor
        named.update(zip(names, tensors[len(places) :], strict=True))
        return function(*own, **named)

    return run(call, *(arguments[index] for index in places), *(options[name] for name in names))
