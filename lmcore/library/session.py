"""`Session`: device, precision, kernels and processes of a training loop of the user's own."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast, overload

import torch

from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.library import exchange
from lmcore.library.epoch import RecentEpochs
from lmcore.library.loader import ShardedLoader, shard_loader
from lmcore.library.metric_log import MetricLog
from lmcore.library.placement import ModelPlacement
from lmcore.library.update import Updates
from lmcore.runtime.user_line import add_device_hint, caller_line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from lmcore.config.section import Config
    from lmcore.contract import Compilations, RngTracker
    from lmcore.library.module_kernels import KernelReport
    from lmcore.library.op_calls import OpCalls
    from lmcore.library.saved_state import SavedStates
    from lmcore.plugin import PluginSet
    from lmcore.runtime.runtime import Runtime

__all__ = ["Session"]

Value = TypeVar("Value")
Second = TypeVar("Second")


class Session(MetricLog):
    """Device, precision policy, kernels and processes that the user's loop works with.

    `lmcore.start` opens a session; at its end, or by `close`, all processes end together.  One
    session is open at a time.

    Attributes:
        opened_at: File and line of the user's program that opened the session.
    """

    _open: ClassVar[Session | None] = None

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        plugins: PluginSet,
        *,
        seed: int | None,
        resources: contextlib.ExitStack,
    ) -> None:
        """Set up a session, for `lmcore.start`; users call that function."""
        self._runtime, self._config, self._plugins = runtime, config, plugins
        self._seed, self._resources = seed, resources
        self._placement = ModelPlacement(runtime, config.parallel.zero_stage or 0)
        self._updates = Updates(runtime, self._placement, config.accelerator)
        self._epochs, self._closed, self._pid = RecentEpochs(), False, os.getpid()
        self.opened_at = caller_line() or "an unknown line"
        Session._open = self
        atexit.register(self._end_at_exit)
        if runtime.processes is not None:
            from lmcore.library.ending import check_order

            rendezvous = runtime.processes.rendezvous
            rendezvous.watch.activity = lambda: f"update {self._updates.count + 1}"
            rendezvous.watch.check_order = functools.partial(check_order, rendezvous)

    @classmethod
    def current(cls) -> Session | None:
        """Return the open session; None if there is none."""
        return cls._open

    @classmethod
    def require_none(cls) -> None:
        """Raise an error if a session is open."""
        if cls._open is not None:
            raise ConfigError(
                "`lmcore.start`: a session is open already",
                why=f"it was opened at {cls._open.opened_at}",
                hint="end its `with` block, or call its `close()`, before the next one: "
                "`lmcore.Session.current().close()`",
            )

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._runtime.device.torch_device

    @property
    def rank(self) -> int:
        """Rank of this process, from 0 on."""
        return self._runtime.rank.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._runtime.rank.world_size

    @property
    def precision(self) -> str:
        """Name of the precision policy."""
        return self._runtime.precision.name

    @property
    def rng(self) -> RngTracker:
        """Random-number streams of the device: `with rt.rng.fork("data"):`."""
        return self._runtime.rng

    @functools.cached_property
    def ops(self) -> OpCalls:
        """The device's kernels as functions: `rt.ops.rms_norm(x, weight, 1e-5)`."""
        from lmcore.library.op_calls import OpCalls

        return OpCalls(self._runtime)

    def use_kernels(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        fused_loss: bool = True,
        linear: bool = False,
    ) -> KernelReport:
        """Run the device's kernels in the modules of any model, and report which; can be undone.

        Args:
            model: Model, for example of `transformers`; from the host it is moved to the device.
            optimizer: Optimizer whose update of the weights is replaced, too, if it is torch's
                `Adam` or `AdamW`; None: only the model.
            fused_loss: True to compute the loss without the logits, if labels are given in
                training; logits are computed when they are read.
            linear: True to run the device's kernel for `nn.Linear`, too.

        Raises:
            LmcoreError: The kernels are in the model or the optimizer already, the model is on
                another device, or the optimizer is of another type.
        """
        self._require_open("use_kernels")
        from lmcore.library.module_kernels import use_kernels

        self._placement.move(model, optimizer)
        return use_kernels(model, self._runtime, optimizer, fused_loss=fused_loss, linear=linear)

    @property
    def updates(self) -> int:
        """Number of updates of weights, by `step` or a prepared optimizer's own `step`."""
        return self._updates.count

    @property
    def updated(self) -> bool:
        """True if the last `step` updated weights: it ended an accumulation, without overflow."""
        return self._updates.updated

    def describe(self) -> dict[str, Any]:
        """Return versions, device, precision, processes and bound kernels as JSON values."""
        return {**self._runtime.environment(), "ops": self._runtime.ops.choices()}

    def memory(self) -> dict[str, int | None] | None:
        """Return the device's memory in bytes; None if the device does not report it.

        Its keys: "allocated", "peak_allocated", "reserved", "total".
        """
        read = self._runtime.device.memory_stats
        return None if read is None else dataclasses.asdict(read())

    def compilations(self) -> Compilations | None:
        """Return the programs that the device has compiled so far; None if it does not tell."""
        return self._runtime.device.compiled_so_far()

    def step_boundary(self) -> None:
        """Run what a lazy device has recorded, for loops without `backward` and `step`."""
        self._runtime.device.step_boundary()

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only; with the arguments of Python's `print`."""
        if self.is_main:
            print(*values, **options)  # noqa: T201 - the purpose of the method

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that has *name* in a profile by `torch.profiler`."""
        return torch.profiler.record_function(name)

    @overload
    def prepare(self, first: Value, /) -> Value: ...
    @overload
    def prepare(self, first: Value, second: Second, /) -> tuple[Value, Second]: ...
    @overload
    def prepare(self, first: Any, second: Any, /, *others: Any) -> tuple[Any, ...]: ...

    def prepare(self, *objects: Any) -> Any:
        """Move models to the device, apply the precision policy, and replicate or shard them.

        The objects themselves are changed and returned.  All ranks get the weights of rank 0.
        Prepare a model before its optimizer or with it.

        Args:
            objects: Modules and optimizers.

        Raises:
            ConfigError: An object is of another type or prepared already, or an optimizer has
                parameters of no prepared model.
            DeviceError: The precision policy has no effect in a model.
            RunError: The ranks have different models.
        """
        self._require_open("prepare")
        self._placement.prepare(objects)
        self._updates.watch(objects)
        return objects[0] if len(objects) == 1 else objects

    @overload
    def loader(self, loader: Iterable[Any], /, *, shard: bool = True) -> ShardedLoader: ...
    @overload
    def loader(
        self, one: Iterable[Any], two: Iterable[Any], /, *more: Iterable[Any], shard: bool = ...
    ) -> tuple[ShardedLoader, ...]: ...

    def loader(self, *loaders: Iterable[Any], shard: bool = True) -> Any:
        """Return an iterable of this rank's batches, on the device; of several, a tuple.

        Args:
            loaders: A `torch.utils.data.DataLoader`, with the batch size of one rank, or another
                iterable of batches.
            shard: False if its dataset gives each rank its own samples already.

        Raises:
            ConfigError: *loader* gives no batches, was returned by this function, or has a sampler
                that shards for another number of ranks.
        """
        self._require_open("loader")
        if not loaders:
            raise ConfigError("`loader` of nothing", hint="give it a `DataLoader`")
        settings: Any = {"seed": self._seed or 0, "shard": shard, "recent": self._epochs}
        sharded = tuple(shard_loader(loader, self._runtime, **settings) for loader in loaders)
        return sharded[0] if len(sharded) == 1 else sharded

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass, in which the precision policy is in force."""
        return self._updates.autocast()

    def accumulate(self, steps: int, *, last: bool | None = None) -> AbstractContextManager[None]:
        """Return the context of one of *steps* micro-batches that make an update.

        `backward` divides the loss by their number and averages gradients over the ranks in the
        last one; `step` does nothing before.  The last batch of an epoch of `loader` ends an
        update, if it was taken since the block before.

        Args:
            steps: Number of micro-batches of an update.
            last: True to update after this micro-batch in any case; False not to update before
                the number is reached; None: the end of an epoch decides.

        Raises:
            ConfigError: The number is no positive integer, or contexts are nested.
        """
        self._require_open("accumulate")
        ends = self._epochs.begin_block()
        return self._updates.accumulate(steps, last=ends if last is None else last)

    def backward(
        self, loss: Tensor, *, weight: float | Tensor | None = None, **options: Any
    ) -> None:
        """Compute the gradients of a loss, and average them over all ranks; all ranks must call it.

        Args:
            loss: Scalar loss of this rank's micro-batch.
            weight: Number of targets that the loss is the mean of: `step` updates by the gradients
                of the mean over all targets of the update and ranks.  None: losses count alike.
            options: Options of `torch.Tensor.backward`.

        Raises:
            ConfigError: The loss is no scalar, on another device, or depends on no parameter or,
                with several ranks, on no prepared model; the weight is no number of 0 or more; only
                some micro-batches of an update have weights, or one has two losses.
            RunError: The loss is NaN or infinite; checked on the CPU only.
        """
        self._require_open("backward")
        self._updates.backward(loss, weight, **options)

    def step(self, optimizer: Optimizer, *, clip: float | None = None) -> Tensor | None:
        """Update weights and drop their gradients; all ranks must call it.

        Args:
            optimizer: Optimizer of prepared models.
            clip: Largest norm of all gradients together; None: they are not clipped.

        Returns:
            Norm of the gradients before clipping, a scalar on the device, if *clip* is given and
            weights were updated; else None.

        Raises:
            ConfigError: *clip* is not positive, or *optimizer* has no gradients of `backward`, or
                `rt.accumulate` has not completed them.
            RunError: Gradients overflow at the smallest loss scale, the weights of all losses are
                0, or *clip* is given and the norm is not finite; on another device than the CPU,
                weights or norm of an earlier update.
        """
        self._require_open("step")
        return self._updates.step(optimizer, clip=clip)

    def recompute(self, module: nn.Module, policy: str) -> None:
        """Apply a recompute policy to a module: less memory for activations, more computation.

        Args:
            module: Module whose forward pass takes and returns tensors, such as a layer.
            policy: Recompute policy of the device, such as "full" or "selective".

        Raises:
            ConfigError: The device does not offer the policy, or the module has one already.
        """
        self._require_open("recompute")
        from lmcore.library.forward import recompute_module

        recompute_module(module, policy, self._runtime, self._plugins)

    def all_reduce(self, value: Value, op: str = "mean") -> Value:
        """Return a value reduced over all ranks; all ranks must call it.

        Args:
            value: Tensor of the same shape on all ranks, number, or a list, tuple or dict of these.
            op: "mean", "sum", "max" or "min".

        Raises:
            ConfigError: The operation is unknown, or the value is something else.
            RunError: The ranks have values of different shapes or types.
        """
        self._require_open("all_reduce")
        return cast("Value", exchange.all_reduce(self._runtime, value, op))

    def all_gather(self, value: Any) -> Any:
        """Return the values of all ranks, in the order of ranks; all ranks must call it.

        Args:
            value: Tensor of the same shape and dtype on all ranks, or a JSON value.

        Returns:
            Tensors as one tensor, [world size, *shape]; JSON values as a list.

        Raises:
            ConfigError: The value is neither.
        """
        self._require_open("all_gather")
        return exchange.all_gather(self._runtime, value)

    def gather_for_metrics(self, value: Any) -> Any:
        """Return results for the batch of a loader from all ranks, without repeated samples.

        With several ranks the last round of a loader may be filled with samples from the beginning;
        their results are left out.  All ranks must call it, once for each batch and result.

        Args:
            value: Results for the batch in use: tensors [samples, ...], a scalar tensor for the
                batch, lists of JSON values (one for each sample), another JSON value for the batch,
                or dicts, lists and tuples of these.

        Returns:
            The same structure with the samples of all ranks, in the order of the loader.

        Raises:
            ConfigError: No batch of `loader` is in use, or a value is neither.
            RunError: The ranks have values of different shapes or types.
        """
        self._require_open("gather_for_metrics")
        return exchange.gather_samples(self._runtime, value, self._epochs.required().count_new)

    def broadcast(self, value: Value, source: int = 0) -> Value:
        """Return the value of one rank on all ranks; all ranks must call it.

        Args:
            value: Tensor of the same shape and dtype on all ranks, or a JSON value.
            source: Rank whose value it is.

        Raises:
            ConfigError: There is no such rank, or the value is neither tensor nor JSON.
        """
        self._require_open("broadcast")
        return cast("Value", exchange.broadcast(self._runtime, value, source))

    def barrier(self) -> None:
        """Wait until all ranks have called it, and for the work on this rank's device."""
        self._require_open("barrier")
        self._runtime.device.synchronize()
        if self._runtime.processes is not None:
            self._runtime.processes.barrier("`barrier`")

    def save(self, directory: str | Path, *, keep_last: int | None = None, **objects: Any) -> Path:
        """Save a checkpoint as `iter_XXXXXXX` in a directory; all ranks must call it.

        Args:
            directory: Directory of the checkpoints, which all hosts share.
            keep_last: Number of checkpoints to keep; None: all.
            objects: Prepared models and their optimizers, objects with a `state_dict` of JSON
                values and tensors (such as a learning-rate scheduler), tensors, and JSON values, by
                the names under which `load` finds them.

        Returns:
            Path of the checkpoint.

        Raises:
            CheckpointError: It could not be written; earlier ones are unchanged.
            ConfigError: An object cannot be saved, or *keep_last* is no positive integer.
            RunError: Weights or hyperparameters differ between the ranks.
        """
        self._require_open("save")
        return self._states.save(directory, self._updates, objects, keep_last=keep_last)

    def load(self, directory: str | Path, **objects: Any) -> dict[str, Any]:
        """Load the newest checkpoint of a directory, of any number of ranks; all must call it.

        Args:
            directory: Directory of checkpoints, or one checkpoint.
            objects: Objects to fill, by the names of `save`.

        Returns:
            JSON values of the checkpoint by name.

        Raises:
            CheckpointError: There is no checkpoint, or it is damaged, or has other tensors.
        """
        self._require_open("load")
        return self._states.load(directory, self._updates, objects)

    @functools.cached_property
    def _states(self) -> SavedStates:
        from lmcore.library.saved_state import SavedStates

        return SavedStates(self._runtime, self._placement)

    def close(self) -> None:
        """End the session, together with all ranks; a second call does nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        """Return the session itself."""
        self._require_open("with")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the session; an exception ends it on all ranks, which report its text."""
        if self._closed:
            return
        self._closed = True
        self._epochs.is_open = False
        Session._open = None
        atexit.unregister(self._end_at_exit)
        if os.getpid() != self._pid:  # a fork; the session goes on in the process that opened it
            return
        self._updates.end()
        if error is not None:
            add_device_hint(error, self.device)
            self._close_loggers("failed")
            self._resources.__exit__(kind, error, trace)
            return
        self._close_loggers("completed")
        with self._resources:
            self._updates.finite.check_copied()
            if self._runtime.processes is not None:
                from lmcore.library.ending import end_together

                self._runtime.device.synchronize()
                end_together(self._runtime.processes.rendezvous, self._updates.count)

    def _end_at_exit(self) -> None:
        """End a session that is open at the exit, by the uncaught exception if there is one."""
        error = getattr(sys, "last_value", None)
        try:
            self.__exit__(type(error) if error is not None else None, error, None)
        except LmcoreError as failure:
            if error is None:  # the interpreter would exit with status 0
                sys.stderr.write(f"{failure.render()}\n")
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(failure.exit_status)

    def _require_open(self, name: str) -> None:
        if self._closed:
            what = f"`{name}`: the session has ended"
            raise ConfigError(what, hint="call `lmcore.start` for a new one")
