"""Forward passes of a user's model: recompute policies for its modules, and the precision.

A warning says if the precision is never used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType, TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lmcore.base.errors import ConfigError
from lmcore.contract.recompute import remembering
from lmcore.plugin import choose_recompute, recompute_policies
from lmcore.runtime.user_line import caller_line

if TYPE_CHECKING:
    from lmcore.contract.precision.policy import PrecisionPolicy
    from lmcore.plugin import PluginSet
    from lmcore.runtime.runtime import Runtime

__all__ = ["ForwardPrecision", "recompute_module"]

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
    runner = policy.block or policy.attention
    if runner is not None:
        run = functools.partial(runner, remember=remember)
        module.forward = _recomputed(module, run, whole=policy.block is not None)
    setattr(module, _MARK, policy.name)


def _recomputed(module: nn.Module, run: Callable[..., Any], *, whole: bool) -> MethodType:
    """Return a forward pass by a runner: a method, so that a copy of the module has its own.

    Args:
        module: Module.
        run: Runner of a recompute policy.
        whole: True to run the module itself; False: torch's attention within it.
    """
    forward: Any = module.forward
    own = lambda _, *arguments, **options: forward(*arguments, **options)  # noqa: E731
    if getattr(forward, "__self__", None) is module:
        own = forward.__func__

    @functools.wraps(own)
    def recomputed(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        call = functools.partial(own, self)
        if not self.training:
            return call(*arguments, **options)
        if whole:
            return _through(run, call, arguments, options)
        with _Attention(run):
            return call(*arguments, **options)

    return MethodType(recomputed, module)


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


logger = logging.getLogger(__name__)


class ForwardPrecision:
    """Context of forward passes, and a record of its use.

    Without it a forward pass computes in the dtype of the weights, without an error.

    Args:
        policy: Precision policy in force.
        warns: False if another rank logs the warning.

    Attributes:
        is_used: True if a context was entered or left since the last update of weights.
    """

    def __init__(self, policy: PrecisionPolicy, *, warns: bool) -> None:
        self._policy = policy
        self._is_needed = warns and not isinstance(policy.context(), nullcontext)
        self.is_used = False
        self._depth = 0

    def context(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass, in which the precision policy is in force."""
        context = self._policy.context()
        return _Recorded(self, context) if self._is_needed else context

    def check(self) -> None:
        """Log a warning, once, if no forward pass since the last update was in the context."""
        if not self._is_needed or self.is_used or self._depth:
            return
        self._is_needed = False
        logger.warning(
            "`backward` at %s: no forward pass was in `rt.autocast()`, so it computed in %s, not "
            'in %s; put it into `with rt.autocast():`, or start with `precision="fp32"`',
            caller_line() or "an unknown line",
            self._policy.keep,
            self._policy.name,
        )

    def enter(self) -> None:
        """Record that a context is entered."""
        self.is_used = True
        self._depth += 1

    def leave(self) -> None:
        """Record that a context is left; updates within it have not ended its use."""
        self.is_used = True
        self._depth -= 1


class _Recorded:
    """Context that records its use."""

    __slots__ = ("_inner", "_record")

    def __init__(self, record: ForwardPrecision, inner: AbstractContextManager[Any]) -> None:
        self._record, self._inner = record, inner

    def __enter__(self) -> Any:
        self._record.enter()
        return self._inner.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        self._record.leave()
        return self._inner.__exit__(kind, error, trace)
