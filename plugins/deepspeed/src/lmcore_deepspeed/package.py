"""The package DeepSpeed: imported for the run's device, connected, silenced, and cleaned up.

DeepSpeed is imported here only, with `--engine deepspeed`.  Nothing is compiled at the start of a
run: native ops of DeepSpeed are used only if they were built with the package.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError, DeviceError, MissingPackageError
from lmcore.contract.device_errors import first_line

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lmcore.parallel.wait_clock import WaitClock
    from lmcore.runtime.runtime import Runtime

__all__ = ["INSTALL", "initialize", "open_deepspeed", "time_waits"]

logger = logging.getLogger(f"lmcore.{__name__}")  # of the lines that lmcore formats

INSTALL = "pip install deepspeed"

_SAID_HERE = ("untested optimizer", "OVERFLOW", "Setting accelerator to")
"""Substrings of DeepSpeed's warnings that repeat lmcore's own messages."""

_COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "inference_all_reduce", "reduce", "broadcast"),
    *("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "reduce_scatter"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
)
"""Methods of DeepSpeed's communication backend that wait for other ranks."""

_RENAMED_IN_TORCH = r"`torch\.distributed\.\w+` is deprecated"


@contextlib.contextmanager
def open_deepspeed(runtime: Runtime) -> Iterator[Any]:
    """Import DeepSpeed for the run's device and return the package; all processes must call it.

    Raises:
        ConfigError: DeepSpeed was set up for another device.
        DeviceError: DeepSpeed cannot be imported, or its backend cannot be started.
        MissingPackageError: DeepSpeed is not installed.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment(runtime))
        package = _imported()
        known = package.accelerator.get_accelerator().device_name()
        if known.partition(":")[0] != runtime.device.type:
            raise ConfigError(
                f"DeepSpeed was set up for the device `{known}`, and the run is on "
                f"`{runtime.device.type}`",
                why="a process can use one device type with DeepSpeed",
                hint="unset DS_ACCELERATOR, or use `--engine native`",
            )
        _without_builds(package)
        stack.enter_context(_quiet(package))
        if runtime.processes is None:
            stack.enter_context(_alone(package))
        package.init_distributed(dist_init_required=None, auto_mpi_discovery=False)
        try:
            yield package
        finally:
            # DeepSpeed keeps the process groups of the finished run in module variables.
            package.utils.groups._WORLD_GROUP = None  # noqa: SLF001 - there is no public way
            package.comm.comm.cdb = None


def initialize(
    package: Any,
    model: nn.Module,
    optimizer: Optimizer,
    config: Mapping[str, Any],
    runtime: Runtime,
) -> Any:
    """Return DeepSpeed's engine of *model*; all processes must call it.

    Raises:
        ConfigError: DeepSpeed refuses the configuration.
    """
    with _environment(runtime), _precision_proved(package), _no_prints():
        try:
            engine, *_ = package.initialize(
                model=model, optimizer=optimizer, config=dict(config), dist_init_required=False
            )
        except (ValueError, TypeError, AssertionError, package.DeepSpeedConfigError) as cause:
            raise ConfigError(
                "DeepSpeed refuses its configuration",
                why=_reason(cause),
                hint="fix the file of `--deepspeed-config`, or leave the value out",
            ) from cause
    if runtime.processes is not None:
        _pass_timeout(package, runtime.processes.timeout)
    return engine


def time_waits(package: Any, clock: WaitClock) -> None:
    """Measure DeepSpeed's collectives as waits, on a device that computes synchronously.

    Args:
        package: DeepSpeed, whose communication backend lasts as long as the run.
        clock: Clock of the step.
    """
    backend = package.comm.comm.cdb
    for name in _COLLECTIVES:
        collective = getattr(backend, name, None)
        if clock.on_host and collective is not None:
            setattr(backend, name, functools.partial(_timed, collective, clock))


def _timed(collective: Callable[..., Any], clock: WaitClock, *values: Any, **options: Any) -> Any:
    work = clock.wait(collective, *values, **options)
    return _TimedWork(work, clock) if hasattr(work, "wait") else work


class _TimedWork:
    """An asynchronous collective whose end is waited for on a clock."""

    def __init__(self, work: Any, clock: WaitClock) -> None:
        self._work, self._clock = work, clock

    def wait(self, *arguments: Any) -> Any:
        return self._clock.wait(self._work.wait, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextlib.contextmanager
def _no_prints() -> Iterator[None]:
    """Log text that is printed to stdout, which is for the results of a command."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            logger.debug("DeepSpeed: %s", line)


@contextlib.contextmanager
def _precision_proved(package: Any) -> Iterator[None]:
    """Disable DeepSpeed's checks of dtypes: the run's precision policy has verified the device."""
    accelerator = package.accelerator.get_accelerator()
    accelerator.is_fp16_supported = accelerator.is_bf16_supported = lambda: True
    try:
        yield
    finally:
        del accelerator.is_fp16_supported, accelerator.is_bf16_supported


def _reason(cause: Exception) -> str:
    """Return the text of an error; of a pydantic report without its links."""
    errors = getattr(cause, "errors", None)
    if errors is None:
        return str(cause).strip() or type(cause).__name__
    rows = (
        f"`{'.'.join(str(part) for part in problem['loc'])}`: {problem['msg']}".replace("``: ", "")
        for problem in errors()
    )
    return "; ".join(rows)


def _imported() -> Any:
    try:
        import deepspeed
        import deepspeed.accelerator
        import deepspeed.comm.comm
        import deepspeed.utils.groups
    except ModuleNotFoundError as cause:
        if cause.name == "deepspeed":
            raise MissingPackageError(
                "deepspeed", needed_for="`--engine deepspeed`", install=INSTALL
            ) from cause
        raise _broken(cause) from cause
    except Exception as cause:
        raise _broken(cause) from cause
    return deepspeed


def _broken(cause: Exception) -> DeviceError:
    return DeviceError(
        "DeepSpeed cannot be imported",
        why=f"{type(cause).__name__}: {cause}",
        hint="check `python -c 'import deepspeed'`, or use `--engine native`",
    )


@contextlib.contextmanager
def _environment(runtime: Runtime) -> Iterator[None]:
    """Set the environment variables that DeepSpeed reads, unless set, and restore them."""
    wanted = {
        "DS_ACCELERATOR": runtime.device.type,
        "LOCAL_RANK": str(runtime.rank.local_rank),
    }
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _without_builds(package: Any) -> None:
    """Prevent DeepSpeed from compiling optional ops at their first use.

    It would take a minute or two, silently, in the first run on a host.
    """
    for name, built in package.git_version_info.installed_ops.items():
        if not built:
            package.ops.__compatible_ops__[name] = False


@contextlib.contextmanager
def _quiet(package: Any) -> Iterator[None]:
    """Forward DeepSpeed's warnings to lmcore's log, without warnings that lmcore gives itself."""
    theirs = package.utils.logger
    handlers, filters = list(theirs.handlers), list(theirs.filters)
    theirs.handlers[:] = [_Forward()]
    theirs.addFilter(_is_news)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_RENAMED_IN_TORCH, category=FutureWarning)
            yield
    finally:
        theirs.handlers[:], theirs.filters[:] = handlers, filters


def _is_news(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(part in text for part in _SAID_HERE)


class _Forward(logging.Handler):
    """A handler that forwards DeepSpeed's records to the logger of this module."""

    def emit(self, record: logging.LogRecord) -> None:
        logger.log(record.levelno, "DeepSpeed: %s", record.getMessage())


@contextlib.contextmanager
def _alone(package: Any) -> Iterator[None]:
    """Create the process group that DeepSpeed needs even in a run of one process."""
    from torch import distributed
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # public all the same

    backend = package.accelerator.get_accelerator().communication_backend_name()
    try:
        distributed.init_process_group(
            backend,
            store=HashStore(),
            rank=0,
            world_size=1,
        )
    except (RuntimeError, ValueError) as cause:
        raise DeviceError(
            f"DeepSpeed's communication backend `{backend}` cannot be started",
            why=first_line(cause),
            hint="run `lmcore doctor`, or use `--engine native`",
        ) from cause
    try:
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _pass_timeout(package: Any, seconds: float) -> None:
    """Set the run's timeout on DeepSpeed's own group; torch's default is half an hour."""
    from torch.distributed import distributed_c10d

    group = package.utils.groups._WORLD_GROUP  # noqa: SLF001 - there is no public name
    if group is not None:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)  # noqa: SLF001
