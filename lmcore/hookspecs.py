"""Every extension point of lmcore, on one page.

A plugin is a module named by an entry point in the group `lmcore.plugins`; it implements any of
these hooks as plain functions marked with `hookimpl`.  A device needs three: `lmcore_plugin_info`,
`lmcore_probe` and `lmcore_create_device`.  A hook takes any subset of its specified arguments, by
name, without defaults.  The module must not import torch: `lmcore plugins` and the launcher load
it.  A plugin without `lmcore_probe` brings no device and adds to every other one's.

Order in a run: info, probe, options, tokenizers, corpora (launcher) -> launch environment
(launcher, per worker) -> device, problems, policies, kernels, backends (each worker) -> run start,
run end (each worker).  There are no hooks in a step: what runs there was bound before.

Each docstring has the hook's caller, the time of the call, the ranks and the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from lmcore.config.section import Config
    from lmcore.contract.communication import CommBackend
    from lmcore.contract.device import Device
    from lmcore.contract.op.records import OpImpl
    from lmcore.contract.precision.policy import PrecisionPolicy
    from lmcore.contract.probe import Check, PluginInfo, Probe, Problem
    from lmcore.contract.recompute import RecomputePolicy
    from lmcore.contract.registry import (
        CommandRegistry,
        CorpusRegistry,
        EngineRegistry,
        FamilyRegistry,
        FormatRegistry,
        LoggerRegistry,
        OptionRegistry,
        TaskRegistry,
        TokenizerRegistry,
    )
    from lmcore.contract.transfer.staging import CheckpointStager

__all__ = ["PROJECT", "hookimpl", "hookspec"]

PROJECT = "lmcore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def lmcore_plugin_info() -> PluginInfo:  # type: ignore[empty-body]
    """Return the plugin's name and the versions that it works with.

    Called by: discovery, for every plugin; the one hook that every plugin needs.
    When: first, right after import.
    Ranks: the launcher and every worker.
    Return: a `PluginInfo`; a plugin whose ranges exclude this lmcore or torch is refused with
    that reason, and none of its other hooks is called.
    """


@hookspec
def lmcore_probe(env: Mapping[str, str]) -> Probe:  # type: ignore[empty-body]
    """Look for the plugin's device without initialising it.

    Called by: discovery, for every plugin, in a separate process that ends afterwards.
    When: before a device is chosen, and in a worker before it accepts the choice; `env` is the
    process environment.
    Ranks: the launcher and every worker.
    Return: a `Probe`; its `count` decides how many processes a run starts by default: one for each
    device, or one process if the device has no communication backend.  Do not import torch: read
    the driver's files, libraries or package metadata.  Hardware without working software is BROKEN,
    with the fix.
    """


@hookspec
def lmcore_add_options(registry: OptionRegistry) -> None:
    """Add settings of the plugin's own: `registry.add(section)`.

    Called by: commands that take a run's settings, for every usable plugin.
    When: before the command line and files are read.
    Ranks: the launcher and every worker.
    Return: nothing; the section is a frozen dataclass of `lmcore.config.option` fields, whose
    values are `config.plugins[NAME]` afterwards, NAME being the plugin's.  Field `depth` of
    plugin `mine` is the flag `--mine-depth`.
    """


@hookspec
def lmcore_add_commands(registry: CommandRegistry) -> None:
    """Add commands: `registry.add(name, load, summary)`.

    Called by: `lmcore --help`, and `lmcore NAME` for a name that is none of the core's.  A name of
    two words, such as `data clean`, is a command of a group, one of the core's or of plugins.
    When: before the command runs.
    Ranks: the launcher.
    Return: nothing; `load` names "package.module:function", which takes the arguments after the
    command's name and returns the exit status.
    """


@hookspec
def lmcore_add_corpora(registry: CorpusRegistry) -> None:
    """Add texts that `--corpus NAME` trains on: `registry.add(name, path, summary)`.

    Called by: commands that read a corpus, for every usable plugin.
    When: before the corpus is opened.
    Ranks: the launcher and every worker.
    Return: nothing; `path` is a UTF-8 text file that the plugin's distribution brings.
    """


@hookspec
def lmcore_add_tokenizers(registry: TokenizerRegistry) -> None:
    """Add tokenizer types: `registry.add(name, factory)`.

    Called by: commands that take `--tokenizer-type`, for every usable plugin.
    When: before flags are read.
    Ranks: the launcher and every worker.
    Return: nothing; `factory` makes a tokenizer from the options of the command line.
    """


@hookspec
def lmcore_add_families(registry: FamilyRegistry) -> None:
    """Add families of models: `registry.add(family)`.

    Called by: every command that reads settings or checkpoints, for every usable plugin.
    When: after discovery, before flags are read; torch is not imported.
    Ranks: the launcher and every worker.
    Return: nothing; a family is a record, `lmcore.model.family.Family`, which names its model's
    class and its samples as `module:object`.
    """


@hookspec
def lmcore_add_formats(registry: FormatRegistry) -> None:
    """Add formats of checkpoints: `registry.add(checkpoint_format)`.

    Called by: every command that reads settings or checkpoints, for every usable plugin.
    When: after discovery, before flags are read; torch is not imported.
    Ranks: the launcher and every worker.
    Return: nothing; a format is a record, `lmcore.model.checkpoint_format.CheckpointFormat`, which
    names the functions that read and write as `module:object`.
    """


@hookspec
def lmcore_add_engines(registry: EngineRegistry) -> None:
    """Add training engines: `registry.add(engine)`.

    Called by: every command that reads settings or checkpoints, for every usable plugin.
    When: after discovery, before flags are read; torch is not imported.
    Ranks: the launcher and every worker.
    Return: nothing; an engine is a record, `lmcore.model.training_engine.TrainingEngine`, which
    names the function that builds it as `module:object`.
    """


@hookspec
def lmcore_add_tasks(registry: TaskRegistry) -> None:
    """Add evaluation tasks: `registry.add(name, load)`.

    Called by: commands that evaluate on tasks, for every usable plugin.
    When: after flags are read; torch is not imported.
    Ranks: the launcher and every worker.
    Return: nothing; `load` names a record as `module:OBJECT`, a `lmcore.evaluation.task.Task`.  Two
    plugins with a task of one name are an error of these commands.
    """


@hookspec
def lmcore_add_loggers(registry: LoggerRegistry) -> None:
    """Add loggers of runs: `registry.add(run_logger)`.

    Called by: every command that reads settings or checkpoints, for every usable plugin.
    When: after discovery, before flags are read; torch is not imported.
    Ranks: the launcher and every worker; rank 0 opens the loggers of its run.
    Return: nothing; a logger is a record, `lmcore.model.run_logger.RunLogger`, which names the
    function that opens it as `module:object`.  A logger that fails is left out with a warning.
    """


@hookspec
def lmcore_launch_env(probe: Probe, rank_info: Mapping[str, Any]) -> Mapping[str, str]:  # type: ignore[empty-body]
    """Return the environment variables that a worker needs before torch is imported.

    Called by: the launcher of workers, for the chosen plugin and those without a device.
    When: after the choice, once for each worker; `rank_info` has rank, local_rank, world_size
    and local_world_size.
    Ranks: the launcher, for every worker.
    Return: a mapping; variables that the user has set keep their values, and the log says so.
    Different values of one variable from two plugins stop the run.
    """


@hookspec
def lmcore_create_device(probe: Probe, config: Config) -> Device:  # type: ignore[empty-body]
    """Create the device of this process.

    Called by: the runtime, for the chosen plugin only.
    When: once in a process; torch may be imported from here on.
    Ranks: every worker.
    Return: a `Device` of the type that the probe promised, usually from `Device.from_torch`.
    """


@hookspec
def lmcore_validate_config(device: Device, config: Config) -> Sequence[Problem]:  # type: ignore[empty-body]
    """Return the settings of the configuration that the device cannot run.

    Called by: the runtime, for the chosen plugin and those without a device.
    When: before the model is built; the configuration is read-only.
    Ranks: every worker.
    Return: a sequence of `Problem`, empty when there are none; all of them are shown at once.  The
    core itself refuses `--compile` and `--deterministic` for a device that has a reason against
    `compile` or `deterministic` in `Device.missing`.
    """


@hookspec
def lmcore_comm_backends(device: Device) -> Sequence[CommBackend]:  # type: ignore[empty-body]
    """Offer communication backends for processes on this device type.

    Called by: the runtime of several processes, for the chosen plugin and those without a device.
    When: at process-group creation.
    Ranks: every worker.
    Return: a sequence of `CommBackend`; the available one with the highest priority is used.  A
    device whose plugin lacks the hook gets the backend that torch has registered for its type.
    """


@hookspec
def lmcore_op_impls(device: Device) -> Sequence[OpImpl]:  # type: ignore[empty-body]
    """Offer kernels for the ops of the core.

    Called by: the runtime, for the chosen plugin and those without a device; `lmcore ops`.
    When: before the model is built.
    Ranks: every worker.
    Return: a sequence of `OpImpl`; their modules are loaded only if they are bound.
    """


@hookspec
def lmcore_precision_policies(device: Device) -> Sequence[PrecisionPolicy]:  # type: ignore[empty-body]
    """Offer the precisions that the device can train in.

    Called by: the runtime, for the chosen plugin and those without a device.
    When: before the model is built.
    Ranks: every worker.
    Return: a sequence of `PrecisionPolicy`; the one with the highest priority is the default.  A
    device whose plugin lacks the hook gets `standard_precision_policies`, limited to its dtypes.
    """


@hookspec
def lmcore_recompute_policies(device: Device) -> Sequence[RecomputePolicy]:  # type: ignore[empty-body]
    """Offer ways to save activation memory.

    Called by: the runtime, for the chosen plugin and those without a device.
    When: before the model is built.
    Ranks: every worker.
    Return: a sequence of `RecomputePolicy`, `none` among them.  A device whose plugin lacks the
    hook gets `standard_recompute_policies`.
    """


@hookspec
def lmcore_checkpoint_stagers(device: Device) -> Sequence[CheckpointStager]:  # type: ignore[empty-body]
    """Offer ways to copy a run's tensors off the device before a checkpoint is written.

    Called by: the runtime, for the chosen plugin and those without a device.
    When: before the first checkpoint.
    Ranks: every worker.
    Return: a sequence of `CheckpointStager`; the available one with the highest priority is used.
    With `--async-save`, the copy of one that has `begin` runs while training computes.
    """


@hookspec
def lmcore_run_start(run: Mapping[str, Any]) -> None:
    """Do something when a run begins.

    Called by: the training loop's owner, for the chosen plugin and those without a device.
    When: after device and model are built; `run` has directory, rank, world_size and plan, the
    resolved configuration as a mapping.
    Ranks: every worker.
    Return: nothing.  Raising stops the run if the plugin is the chosen one.  The states of torch's
    random number generators are restored afterwards.
    """


@hookspec
def lmcore_run_end(run: Mapping[str, Any]) -> None:
    """Do something when a run has ended; `run` also has `status` and `iteration`.

    Called by: the training loop's owner, for the chosen plugin and those without a device.
    When: after the last step, also when the run failed.
    Ranks: every worker.
    Return: nothing.  Raising is logged and spoils no finished run.
    """


@hookspec
def lmcore_doctor(probe: Probe | None) -> Sequence[Check]:  # type: ignore[empty-body]
    """Check the plugin's software and hardware in depth.

    Called by: `lmcore doctor`, for every usable plugin.
    When: in a separate process with a time limit; torch may be imported.  `probe` is the plugin's,
    also if the device is absent or broken; None for a plugin that brings no device.
    Ranks: the launcher.
    Return: a sequence of `Check`, a line each.
    """
