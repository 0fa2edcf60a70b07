"""The policies of a run: asked of the plugins, proved, and refused in words."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lmcore.base.errors import ConfigError, DeviceError, PluginError
from lmcore.config.load import load_config
from lmcore.config.section import Config
from lmcore.contract import (
    CheckpointStager,
    PluginInfo,
    PrecisionPolicy,
    RecomputePolicy,
    full_policy,
    full_precision_policy,
    none_policy,
)
from lmcore.hookspecs import hookimpl
from lmcore.plugin import create_device, discover, select
from lmcore.runtime.policies import Policies, start_policies

PRECISION = "lmcore_precision_policies"
RECOMPUTE = "lmcore_recompute_policies"
STAGERS = "lmcore_checkpoint_stagers"


def returning(answer: Any) -> Callable[[], Any]:
    """Return a hook that gives this answer."""

    def implementation() -> Any:
        return answer

    return hookimpl(implementation)


class Point:
    """The entry point of an extension."""

    name, value = "extra", "extra.plugin"
    dist = types.SimpleNamespace(name="lmcore-extra", version="1.0")

    def __init__(self, plugin: Any) -> None:
        self.plugin = plugin

    def load(self) -> Any:
        """Return the plugin."""
        return self.plugin


def start(flags: str = "", **hooks: Any) -> Policies:
    """Start the policies of the CPU's plugin and of an extension with these hooks."""
    installed = importlib.metadata.entry_points(group="lmcore.plugins")
    points = [point for point in installed if point.name == "cpu"]
    answers = {"lmcore_plugin_info": PluginInfo("extra", ">=1,<2"), **hooks}
    plugin = types.SimpleNamespace(**{name: returning(one) for name, one in answers.items()})
    plugins = discover(env={}, entry_points=[*points, Point(plugin)])  # type: ignore[list-item]
    selection = select(plugins, requested="cpu", env={})
    device = create_device(plugins, selection, Config())
    return start_policies(load_config(flags.split()).config, plugins, selection, device)


def named(name: str, compute: str = "float32", **more: Any) -> PrecisionPolicy:
    """Return a policy that does nothing."""
    names = (name, compute, "float32", "float32")
    return PrecisionPolicy(*names, contextlib.nullcontext, **more)


def test_the_cpus() -> None:
    """The CPU's plugin offers what its defaults name; saving at once copies nothing."""
    found = start()
    assert (found.precision.name, found.recompute.name) == ("fp32", "none")
    assert (found.placement.method, found.placement.num_layers) == ("uniform", 1)
    assert (found.stager.name, found.stager.copies) == ("in-place", False)
    assert start("--async-save").stager.name == "buffers"


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_all_of_the_cpus(name: str, recompute: str) -> None:
    """Every policy that the CPU offers starts, and leaves the random numbers alone."""
    torch.manual_seed(1)
    found = start(f"--precision {name} --recompute {recompute}")
    first = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), first)
    assert (found.precision.name, found.recompute.name) == (name, recompute)


def test_an_extension_adds_to_the_device() -> None:
    """Policies and stagers of a plugin without a device are chosen like the device's own."""
    stager = CheckpointStager("spool", dict, priority=99, copies=False)
    found = start(
        "--precision half --recompute half",
        **{
            PRECISION: [replace(named("half"), summary="an extension's")],
            RECOMPUTE: [RecomputePolicy("half", "halves")],
            STAGERS: [stager],
        },
    )
    assert found.precision.words == "half: everything in float32 (an extension's)"
    assert found.recompute.summary == "halves"
    assert found.stager == dataclasses.replace(stager, plugin="extra")


def test_a_dtype_that_the_device_lacks() -> None:
    """A policy that computes in it is refused when named, and never the default."""
    hooks = {PRECISION: [named("fp8", "float8_e5m2", priority=999)]}
    assert start(**hooks).precision.name == "fp32"
    with pytest.raises(ConfigError, match="`--precision fp8`: the device cannot run it") as caught:
        start("--precision fp8", **hooks)
    assert caught.value.why == (
        "device `cpu` computes products in bfloat16, float16, float32, float64, not in float8_e5m2"
    )
    assert caught.value.hint == "it can run `bf16`, `fp16`, `fp32`, `fp64`"


def test_a_policy_that_is_not_in_force() -> None:
    """A precision that only says what it does ends the start."""
    with pytest.raises(DeviceError, match="precision `half` is not applied"):
        start("--precision half", **{PRECISION: [named("half", "bfloat16")]})


def test_a_recompute_policy_that_is_not_exact() -> None:
    """A policy that changes the numbers ends the start."""

    def run(call: Any, x: Any, *, remember: Any) -> Any:
        return call(x) * 2

    with pytest.raises(DeviceError, match="recompute `half` is not exact"):
        start("--recompute half", **{RECOMPUTE: [RecomputePolicy("half", "halves", block=run)]})


def test_a_loss_scale() -> None:
    """A fixed loss scale is refused if nothing is scaled; settings of a dynamic one are not."""
    flags = "--hysteresis 4 --loss-scale-window 1000"
    assert start(f"--precision fp16 {flags}").precision.loss_scaling
    assert start("--precision fp16 --loss-scale 1024").precision.name == "fp16"
    assert start(f"--precision bf16 --loss-scale 0 {flags}").precision.name == "bf16"
    with pytest.raises(ConfigError, match="`--loss-scale 1024` cannot be combined with"):
        start("--precision bf16 --loss-scale 1024")


def test_offload_on_the_host() -> None:
    """Offloading on the host is an error that says that there is no other memory."""
    for name in ("offload", "full-offload"):
        with pytest.raises(ConfigError, match=f"`--recompute {name}`") as caught:
            start(f"--recompute {name}")
        assert "no pinned host memory" in str(caught.value.why)
        assert "the device is the host itself" in str(caught.value.why)


@pytest.mark.parametrize(
    "hook, offered",
    [
        (PRECISION, [full_precision_policy()]),
        (PRECISION, [named("new"), named("new")]),
        (RECOMPUTE, [full_policy()]),
        (STAGERS, [CheckpointStager("buffers", dict)]),
    ],
)
def test_a_name_that_is_there_already(
    hook: str, offered: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """An extension that offers a name again is left out with a warning; the device's own stay."""
    found = start("--recompute full", **{hook: offered})
    assert "which is there already" in caplog.text
    assert "`extra`" in caplog.text
    assert (found.precision.name, found.recompute.name) == ("fp32", "full")


def test_two_defaults() -> None:
    """An extension that makes the default a matter of luck stops the run, with the way out."""
    hooks = {PRECISION: [named("other", priority=100)]}
    with pytest.raises(PluginError, match="`fp32` and `other` have the same priority, 100"):
        start(**hooks)
    assert start("--precision other", **hooks).precision.name == "other"


@pytest.mark.parametrize("policy", ["none", "selective"])
@pytest.mark.parametrize(
    "flag, value", [("--recompute-method", "block"), ("--recompute-num-layers", "3")]
)
def test_placement_without_whole_layers(policy: str, flag: str, value: str) -> None:
    """Saying which layers are recomputed, where none is, is an error."""
    with pytest.raises(ConfigError) as caught:
        start(f"--recompute {policy} {flag} {value}")
    assert caught.value.what == f"`{flag}` cannot be combined with `--recompute {policy}`"
    assert "--recompute full" in str(caught.value.hint)
    start(f"--recompute {policy} --recompute-num-layers 1")


def test_placement() -> None:
    """The flags say which layers a policy for whole layers is for."""
    found = start("--recompute full --recompute-method block --recompute-num-layers 3").placement
    assert (found.method, found.num_layers) == ("block", 3)
    assert none_policy().block is None
