"""`start`: device, precision, kernels and processes for a training loop of the user's own."""

from __future__ import annotations

import builtins
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lmcore.base import log
from lmcore.base.errors import ConfigError, RunError, suggestion
from lmcore.config.option import Option
from lmcore.config.section import Config, config_of, run_options, section_options
from lmcore.library.session import Session
from lmcore.plugin import discover
from lmcore.plugin.record import CPU
from lmcore.plugin.registrations import plugin_sections
from lmcore.runtime.device_choice import prepare_environment, select_device
from lmcore.runtime.launch.rank import RankInfo, rank_info
from lmcore.runtime.launch.scheduler_env import translate
from lmcore.runtime.runtime import connect_processes, start_runtime
from lmcore.runtime.user_line import install_excepthook

if TYPE_CHECKING:
    import torch

    from lmcore.config.plugin_section import PluginSections
    from lmcore.runtime.process.stop_limit import StopLimit

__all__ = ["start"]

logger = logging.getLogger(__name__)

_FURTHER = ("distributed_backend", "distributed_timeout_minutes", "zero_stage")
"""Options that `start` takes beside the sections `accelerator` and of plugins."""
_LOGGERS = ("tensorboard_", "wandb_", "mlflow_", "codecarbon_")
_TRAINING_ONLY = ("tensorboard_tags", "tensorboard_log_interval")


def start(
    *,
    device: str | torch.device | None = None,
    precision: str | None = None,
    zero_stage: int = 0,
    seed: int | None = None,
    stop_timeout_minutes: float = 0,
    **options: Any,
) -> Session:
    """Start a session: device, precision and kernels, and the connection of the run's processes.

    If `lmcore run`, torchrun or a scheduler started several processes, all of them must call this
    function, with the same arguments.

    Args:
        device: Device type or plugin, as `lmcore train --device`, or a device of torch without an
            index; None: detected.
        precision: Precision policy, such as "bf16"; None: the first that the device offers.
        zero_stage: ZeRO stage of prepared models: 0 replicates them, 1 shards optimizer state, 2
            gradients too, 3 weights too.
        seed: Seed of the random numbers of host and device, which differ between ranks; None
            leaves the generators unchanged.
        stop_timeout_minutes: Minutes that one call may take after Ctrl-C, another signal that the
            program handles, or the failure of another process, before this process ends by force: a
            hung device never returns.  0: no limit.
        options: Further options of `lmcore train` by their names with underscores: the section
            `accelerator` (`recompute`, `ops`, `strict_ops`, `deterministic`, `num_threads`,
            `loss_scale`, `plugin_off`, ...), `distributed_backend`, `distributed_timeout_minutes`,
            the loggers of `Session.log` (`tensorboard_dir`, `wandb_project`,
            `mlflow_experiment`, `codecarbon_dir`, ...), and the options of the installed plugins.

    Returns:
        Open session: a context manager, or to be ended by `close`.

    Raises:
        ConfigError: A session is open already, or an argument is wrong.
        DeviceError: There is no such device, or it cannot compute in the precision.
        PluginError: A plugin broke its contract.
        RunError: The processes differ, or one of them stopped.
    """
    Session.require_none()
    hook = install_excepthook()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_older_objects_frozen())
        given = {
            "device": _device_type(device),
            "precision": precision,
            "zero_stage": zero_stage,
            **options,
        }
        given = {name: value for name, value in given.items() if value is not None}
        stop_limit = _stop_limit(stop_timeout_minutes, stack)
        os.environ.update(translate(os.environ))
        rank = rank_info(os.environ)
        log.configure(rank=rank.rank, world_size=rank.world_size)
        plugins = discover(off=_names(given.get("plugin_off", ())))
        config = _config(given, plugin_sections(plugins, _own_options().values()))
        _refuse_own_group(rank)
        selection = select_device(plugins, config.accelerator.device, rank)
        variables = prepare_environment(plugins, selection, rank)
        if selection.probe.device_type != CPU:
            _log_late(variables)
        arguments = {name: repr(value) for name, value in {**given, "seed": seed}.items()}
        connection = connect_processes(config, rank, "the arguments of `lmcore.start`", arguments)
        rendezvous = stack.enter_context(connection)
        if rendezvous is not None and stop_limit is not None:
            rendezvous.watch.over = stop_limit.request
        runtime = stack.enter_context(start_runtime(config, plugins, selection, rank, rendezvous))
        hook.put_first()
        if seed is not None:
            from lmcore.parallel.random_states import seed_everything

            seed_everything(_seed(seed), runtime)
        session = Session(runtime, config, plugins, seed=seed, resources=stack.pop_all())
        if stop_limit is not None:
            stop_limit.activity = lambda: f"update {session.updates + 1} on `{session.device}`"
        return session


_was_frozen = False


@contextlib.contextmanager
def _older_objects_frozen() -> Iterator[None]:
    """Leave the objects that exist now out of garbage collection within the context.

    Nearly all of them are torch's modules, which are never garbage, and which Python would traverse
    now and then: 0.1 s each, in `start`, in the process that probes plugins, and in the middle of a
    step later.  Reference cycles among them are freed at the end.  Only the first session of a
    process does so, as before a later one there may be models of an earlier one; and no session in
    a notebook, or if the program controls garbage collection itself.
    """
    global _was_frozen  # noqa: PLW0603
    interactive = hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")
    if _was_frozen or interactive or not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    _was_frozen = True
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _config(given: Mapping[str, Any], sections: PluginSections) -> Config:
    """Return the configuration with the values of keyword arguments.

    Raises:
        ConfigError: A name or a value is wrong.
    """
    known = {**_own_options(), **sections.options}
    logged = {} if known.keys() >= given.keys() else _logging_options()
    known |= logged
    for name in given:
        if name not in known:
            elsewhere = name in run_options()
            raise ConfigError(
                f"`lmcore.start({name}=...)`: unknown argument",
                why="it is an option of `lmcore train` that does not apply to a loop of your own"
                if elsewhere
                else None,
                hint=None if elsewhere else suggestion(name, known),
            )
    core: dict[str, dict[str, Any]] = {"accelerator": {}, "parallel": {}}
    core |= {"logging": {}} if logged else {}
    plugins: dict[str, Any] = {}
    for name, value in given.items():
        option = known[name]
        values = plugins if option.plugin else core[option.section]
        values[name] = _converted(option, value)
    return config_of(core, plugins, sections)


def _converted(option: Option, value: Any) -> Any:
    """Return the value of an argument as its option has it.

    Raises:
        ConfigError: The type or the range is wrong; text is no number.
    """
    where = f"`lmcore.start({option.name}={value!r})`"
    items = list(value) if option.repeated and not isinstance(value, str) else [value]
    if option.type is not str and any(isinstance(item, str) for item in items):
        raise ConfigError(f"{where}: {option.expected}, not text")
    return option.convert(items if option.repeated else value, where=where)


def _device_type(device: Any) -> str | None:
    """Return the device type that an argument names.

    Raises:
        ConfigError: It is neither text nor a device without an index.
    """
    import torch

    if device is None or isinstance(device, str):
        return device
    where = f"`lmcore.start(device={device!r})`"
    if not isinstance(device, torch.device):
        raise ConfigError(f"{where}: expected text", hint='for example `device="cpu"`')
    if getattr(device, "index", None) is not None:
        raise ConfigError(
            f"{where}: it has an index",
            why="each process of the run gets a device of its own, by its rank",
            hint=f"`device=torch.device({device.type!r})`, and the plugin's variable for the "
            "devices that a process sees",
        )
    return device.type


def _own_options() -> dict[str, Option]:
    """Return the options of the core that `start` takes."""
    further = (option for option in section_options("parallel") if option.name in _FURTHER)
    return {option.name: option for option in (*section_options("accelerator"), *further)}


def _logging_options() -> dict[str, Option]:
    """Return the options of loggers, which are loaded for a session that names one."""
    return {
        one.name: one
        for one in section_options("logging")
        if one.name.startswith(_LOGGERS) and one.name not in _TRAINING_ONLY
    }


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _seed(seed: int) -> int:
    converted: int = _converted(run_options()["seed"], seed)
    return converted


def _stop_limit(minutes: float, stack: contextlib.ExitStack) -> StopLimit | None:
    """Begin to limit the time to stop, until the stack ends; None for no limit, and no import."""
    if not minutes:
        return None
    from lmcore.runtime.process.stop_limit import StopLimit

    seconds = 60 * _converted(run_options()["stop_timeout_minutes"], minutes)
    limit = stack.enter_context(StopLimit(seconds, "stop_timeout_minutes"))
    limit.activity = lambda: "the start of the session"
    return limit


def _refuse_own_group(rank: RankInfo) -> None:
    """Refuse a process group of the script's own, as a session makes torch's default group.

    Raises:
        RunError: torch.distributed is initialized.
    """
    distributed = sys.modules.get("torch.distributed")
    if rank.world_size == 1 or distributed is None or not distributed.is_initialized():
        return
    raise RunError(
        "`torch.distributed` is initialized before `lmcore.start`",
        why="`lmcore.start` connects the processes, by the device's communication backend",
        hint="delete the script's call of `init_process_group`: calls of `torch.distributed` after "
        "`lmcore.start` use its default group",
    )


def _log_late(variables: Mapping[str, str]) -> None:
    """Log the variables of plugins that were set after torch was imported, as this module does."""
    if variables:
        logger.info(
            "torch was imported before %s %s set; `lmcore run` sets %s first",
            ", ".join(sorted(variables)),
            "was" if len(variables) == 1 else "were",
            "it" if len(variables) == 1 else "them",
        )
