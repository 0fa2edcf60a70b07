"""The hooks: the CPU plugin's, but for what `FAKE` names."""

import os
import time

from lmcore.contract import OpImpl, PluginInfo, Probe, ProbeState, Reject
from lmcore.hookspecs import hookimpl
from lmcore_cpu import plugin as cpu

FAKE = os.environ.get("FAKE", "")
SIMULATED = FAKE.startswith("sim-")
"""True if the device is one of two simulated devices, with one thing wrong."""

if FAKE == "slow-import":
    BEGIN = time.process_time()
    while time.process_time() < BEGIN + 0.7:  # more than the half second that is allowed
        pass

if FAKE == "no-import":
    raise ImportError("libfake.so.1: cannot open shared object file")

if FAKE == "restless":
    print("fake 1.0")


@hookimpl
def lmcore_plugin_info():
    if FAKE == "restless":
        time.sleep(0.6)
    api = ">=9" if FAKE == "api" else ">=1.3,<2"
    if FAKE == "not-twice":
        COUNT.append(0)
        return PluginInfo("fake", api, provides=("cpu",), summary=f"asked {len(COUNT)} times")
    return PluginInfo("fake", api, provides=("sim" if SIMULATED else "cpu",))


COUNT = []
KEPT = []


@hookimpl
def lmcore_probe():
    if FAKE == "opens":
        KEPT.append(os.open("/dev/zero", os.O_RDONLY))
        os.environ["FAKE_WAS_HERE"] = "1"
    if FAKE == "hang-probe":
        time.sleep(1000)
    if FAKE == "crash-probe":
        os.abort()
    if SIMULATED:
        return Probe("sim", ProbeState.PRESENT, 2, 10, ("two fakes on the bus",))
    state = {"absent": ProbeState.ABSENT, "broken": ProbeState.BROKEN}.get(FAKE, ProbeState.PRESENT)
    fix = "plug it in" if FAKE == "broken" else None
    count = 0 if FAKE == "absent" else 1
    return Probe("cpu", state, count, 10, ("a fake on the bus",), fix)


@hookimpl
def lmcore_create_device(config):
    if FAKE == "restless":
        import torch

        torch.nn.functional.dropout = lambda x, *_, **__: x
    if SIMULATED:
        from lmcore_fake.simulated import create
    else:
        from lmcore_fake.device import create

    return create(FAKE, deterministic=config.accelerator.deterministic)


@hookimpl
def lmcore_comm_backends():
    if SIMULATED:
        from lmcore_sim.plugin import lmcore_comm_backends

        return lmcore_comm_backends()
    from lmcore_fake.device import backend

    if FAKE == "no-backend":
        return []
    return [backend(FAKE)]


@hookimpl
def lmcore_precision_policies(device):
    from lmcore_fake.device import precisions

    return precisions(device, FAKE)


@hookimpl
def lmcore_recompute_policies(device):
    from lmcore.contract import standard_recompute_policies
    from lmcore_fake.device import careful_policy

    if FAKE == "recompute":
        from lmcore_fake.policies import recomputes

        return recomputes(device)
    if FAKE in {"rounds-again", "lazy-rounds-again", "lazy-forgets-draws"}:
        from lmcore_fake.policies import in_a_model

        return in_a_model(device, FAKE.removeprefix("lazy-"))
    own = [careful_policy()] if FAKE == "deterministic-recompute" else []
    return [*standard_recompute_policies(device), *own]


@hookimpl
def lmcore_checkpoint_stagers(device):
    if FAKE in {"threaded", "stager", "shared", "late"}:
        from lmcore_fake import device as fake

        name = {"stager": "stale"}.get(FAKE, FAKE)
        return [getattr(fake, f"{name}_stager")()]
    if FAKE in {"stagers", "sim-stagers"}:
        from lmcore_fake.policies import stagers

        return stagers(device)
    if FAKE == "no-stager":
        return []
    return cpu.lmcore_checkpoint_stagers(device)


def _never(context):
    """Reject every case, like the rules of a package's kernel if the package does not fit."""
    if context.dtype != "float32":
        return Reject("is for float32")
    return Reject("`norms` 1.0 is for torch 1.0")


@hookimpl
def lmcore_op_impls():
    if FAKE in {"rejects-all", "unusable-package"}:
        return [OpImpl("rms_norm", FAKE, "lmcore_fake.gone:rms_norm", supports=_never)]
    if FAKE not in {"mutants", "misfits", "hang-op", "crash-op", "when-asked"}:
        return []
    from lmcore_fake import kernels

    table = {"mutants": kernels.MUTANTS, "misfits": kernels.MISFITS}.get(FAKE, {})
    target = f"lmcore_fake.kernels:{FAKE.replace('-', '_')}"
    if FAKE in {"hang-op", "crash-op"}:
        return [OpImpl("swiglu", FAKE, target)]

    def float32(context):
        return None if context.dtype == "float32" else Reject("is for float32")

    traits, biased = frozenset({"deterministic"}), {"score_bias", "score_bias_gradient"}
    if FAKE == "when-asked":
        return [OpImpl("rms_norm", FAKE, target, supports=float32, traits=traits)]

    def both(context):
        return None if context.dtype in {"float32", "bfloat16"} else Reject("is for two dtypes")

    return [
        OpImpl(
            *(op, name, f"lmcore_fake.kernels:{target}"),
            supports=both if (op, name) in kernels.HALF else float32,
            traits=traits | (biased if name in kernels.BIASED else set()),
        )
        for (op, name), target in table.items()
    ]
