"""Which device, kernels, precision and recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmcore.config.option import option


def plugin_off_option() -> Any:
    """Return the field of `--plugin-off`, which every command has that looks at the plugins."""
    return option((), "Installed plugins to leave out.", metavar="NAME")


@dataclass(frozen=True)
class AcceleratorSection:
    """What is asked of the accelerator plugin; the choices depend on the plugins installed."""

    device: str | None = option(
        None, "Device type, as listed by `lmcore plugins`; default: detected.", metavar="TYPE"
    )
    plugin_off: tuple[str, ...] = plugin_off_option()
    precision: str | None = option(
        None,
        "Precision policy, such as fp32, bf16 or fp16; default: the device's first.",
        metavar="NAME",
    )
    loss_scale: float | None = option(
        None, "Fixed loss scale of fp16; 0 or none: dynamic.", minimum=0
    )
    initial_loss_scale: float = option(
        2.0**32, "Dynamic loss scale of the first step; 2^32 by default.", above=0
    )
    min_loss_scale: float = option(1.0, "Lowest dynamic loss scale.", above=0)
    loss_scale_window: int = option(
        1000, "Steps without an overflow after which the dynamic loss scale is doubled.", minimum=1
    )
    hysteresis: int = option(
        2,
        "Overflows, counted from when the dynamic loss scale grew last, until it is halved.",
        minimum=1,
    )
    recompute: str = option("none", "Recompute policy, as the device offers them.", metavar="NAME")
    recompute_method: str | None = option(
        None,
        "Layers that a policy for whole layers recomputes: all, in groups kept together "
        "(uniform), or the first ones (block); default: uniform.",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int = option(
        1, "Layers in a group (uniform), or recomputed at all (block).", minimum=1
    )
    ops: tuple[str, ...] = option(
        (),
        "Preferred kernels, `op=id,id`; the first that supports the case is used.",
        metavar="OP=ID",
    )
    strict_ops: bool = option(False, "Fail where an op would use the core's reference.")
    deterministic: bool = option(False, "Use only kernels that declare themselves deterministic.")
    num_threads: int | None = option(
        None, "Host threads of each process; default: torch's.", minimum=1
    )
