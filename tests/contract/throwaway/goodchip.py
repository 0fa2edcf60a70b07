"""A whole accelerator plugin by somebody else: the host under another name, with a kernel."""

from lmcore.contract import (
    Check,
    CheckStatus,
    CommBackend,
    Device,
    OpImpl,
    PluginInfo,
    Probe,
    ProbeState,
    full_policy,
    full_precision_policy,
    none_policy,
)
from lmcore.hookspecs import hookimpl

NOT_THERE = "memory_stats reset_peak_memory empty_cache pin_memory new_stream new_event peak_flops"


@hookimpl
def lmcore_plugin_info():
    return PluginInfo("goodchip", api=">=1.3,<2", provides=("goodchip",), summary="a good chip")


@hookimpl
def lmcore_probe(env):
    # Below the CPU's own plugin: it is used where it is asked for by name.
    evidence = (f"GOODCHIP_MODE is {env.get('GOODCHIP_MODE', 'not set')}",)
    return Probe("cpu", ProbeState.PRESENT, 1, -1, evidence)


@hookimpl
def lmcore_launch_env():
    return {"GOODCHIP_LAUNCHED": "1"}


@hookimpl
def lmcore_create_device():
    import os

    import torch

    if "HEAVY_MARK" in os.environ:
        import lmcore_goodchip.heavy  # noqa: F401  # leaves its mark

    generator = torch.default_generator
    return Device(
        type="cpu",
        index=0,
        name="Good Chip 1",
        dtypes=frozenset({"float32"}),
        synchronize=lambda: None,
        set_current=lambda: None,
        seed=generator.manual_seed,
        get_rng_state=generator.get_state,
        set_rng_state=generator.set_state,
        missing=dict.fromkeys(NOT_THERE.split(), "the good chip has none"),
    )


@hookimpl
def lmcore_comm_backends():
    return [CommBackend("gloo", "cpu")]


@hookimpl
def lmcore_op_impls():
    return [OpImpl("layer_norm", "good", "lmcore_goodchip.plugin:layer_norm")]


def layer_norm(x_BSH, weight_H, bias_H, epsilon):
    import torch

    return torch.nn.functional.layer_norm(x_BSH, x_BSH.shape[-1:], weight_H, bias_H, epsilon)


@hookimpl
def lmcore_precision_policies():
    return [full_precision_policy()]


@hookimpl
def lmcore_recompute_policies():
    return [none_policy(), full_policy()]


@hookimpl
def lmcore_doctor():
    return [Check("temperature", CheckStatus.OK, "cool")]
