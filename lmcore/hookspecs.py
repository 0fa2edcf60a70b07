"""Every extension point of lmcore, on one page.

A plugin is a module named by an entry point in the group `lmcore.plugins`; it implements any of
these hooks as plain functions marked with `hookimpl`.  A hook takes any subset of its specified
arguments, by name, without defaults.  The module must not import torch: `lmcore plugins` and the
launcher load it.  A plugin without `lmcore_probe` brings no device and adds to every other one's.

Order in a run: info, probe (launcher) -> launch environment (launcher, per worker) -> device,
operations, policies (each worker) -> run start, run end (each worker).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from lmcore.accelerator.communication import CommBackend
    from lmcore.accelerator.device import Device
    from lmcore.accelerator.op import OpImpl
    from lmcore.accelerator.precision import PrecisionPolicy
    from lmcore.accelerator.probe import Check, PluginInfo, Probe, Problem
    from lmcore.accelerator.recompute import RecomputePolicy
    from lmcore.config.section import Config

__all__ = ["PROJECT", "hookimpl", "hookspec"]

PROJECT = "lmcore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def lmcore_plugin_info() -> PluginInfo:  # type: ignore[empty-body]
    """Say who the plugin is and which versions it works with.

    When: first, right after import, in the launcher and in each worker.
    Return: a `PluginInfo`; a plugin whose ranges exclude this lmcore or torch is refused with
    that reason, and none of its other hooks is called.
    """


@hookspec
def lmcore_probe(env: Mapping[str, str]) -> Probe:  # type: ignore[empty-body]
    """Say whether the plugin's device is here and fit, without initialising it.

    When: in the launcher, where the choice is made, and in each worker, which checks that it
    sees the same; `env` is the process environment.
    Return: a `Probe`.  Do not import torch: read the driver's files, libraries or package
    metadata.  Hardware that is there with software that cannot use it is BROKEN, with the fix.
    """


@hookspec
def lmcore_launch_env(probe: Probe, rank_info: Mapping[str, Any]) -> Mapping[str, str]:  # type: ignore[empty-body]
    """Say which environment variables a worker needs before torch is imported.

    When: in the launcher, once for each worker, for the chosen plugin only; `rank_info` has
    rank, local_rank, world_size and local_world_size.
    Return: variables; those the user has set already are left as they are, and the run says so.
    """


@hookspec
def lmcore_create_device(probe: Probe, config: Config) -> Device:  # type: ignore[empty-body]
    """Create the device of this process.

    When: once in each worker, for the chosen plugin only; torch may be imported from here on.
    Return: a `Device`.
    """


@hookspec
def lmcore_comm_backends(device: Device) -> Sequence[CommBackend]:  # type: ignore[empty-body]
    """Say how processes on this device type exchange tensors.

    When: in each worker, at process-group creation.
    Return: backends; the available one with the highest priority is used.
    """


@hookspec
def lmcore_op_impls(device: Device) -> Sequence[OpImpl]:  # type: ignore[empty-body]
    """Offer kernels for the ops of the core.

    When: in each worker, when the model is built.
    Return: kernels; their modules are loaded only if they are bound.
    """


@hookspec
def lmcore_precision_policies(device: Device) -> Sequence[PrecisionPolicy]:  # type: ignore[empty-body]
    """Offer the precisions that the device can train in.

    When: in each worker, when the model is built.
    Return: policies; the one with the highest priority is the default.
    """


@hookspec
def lmcore_recompute_policies(device: Device) -> Sequence[RecomputePolicy]:  # type: ignore[empty-body]
    """Offer ways to save activation memory.

    When: in each worker, when the model is built.
    Return: policies, `none` among them.
    """


@hookspec
def lmcore_validate_config(device: Device, config: Config) -> Sequence[Problem]:  # type: ignore[empty-body]
    """Name what of the configuration the device cannot do.

    When: in each worker, before the model is built; the configuration is read-only.
    Return: problems, empty when there are none.
    """


@hookspec
def lmcore_doctor(probe: Probe) -> Sequence[Check]:  # type: ignore[empty-body]
    """Check the plugin's software and hardware in depth.

    When: in `lmcore doctor`, in a process of its own; torch may be imported.
    Return: checks, a line each.
    """


@hookspec
def lmcore_run_start(run: Mapping[str, Any]) -> None:
    """Hear that a run begins.

    When: in each worker, after device and model are there; `run` has directory, rank,
    world_size and the resolved configuration as a mapping.
    """


@hookspec
def lmcore_run_end(run: Mapping[str, Any]) -> None:
    """Hear that a run ended; `run` also has `status` and `iteration`.

    When: in each worker, also when the run failed.
    """


@hookspec
def lmcore_add_tokenizers(registry: Any) -> None:
    """Register tokenizer types: `registry.add(name, factory)`.

    When: by commands that take `--tokenizer-type`, before flags are read.
    """
