"""Section `accelerator`: device, kernels, precision and recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmcore.config.need import Need
from lmcore.config.option import DROPOUT, FREE, option

MAX_THREADS = 1024
"""Largest number of threads or worker processes of a process; far more end in a crash when the
system refuses to start them."""


def plugin_off_option() -> Any:
    """Return the field of `--plugin-off`, an option of every command that loads plugins."""
    return option((), "Installed plugins to turn off.", metavar="NAME", on_resume=DROPOUT)


_LOSS_SCALE = Need(
    "a precision with a loss scale, such as `--precision fp16`",
    lambda run: run.loss_scaling is not False,
)
_DYNAMIC = Need(
    "`--loss-scale 0`",
    lambda run: not run.config.accelerator.loss_scale,
    refused="a fixed loss scale never changes",
)
_RECOMPUTE = Need(
    "a recompute policy for whole layers, such as `--recompute full`",
    lambda run: run.config.accelerator.recompute not in {"none", "selective"},
    refused="it says which whole layers are recomputed",
)


@dataclass(frozen=True)
class AcceleratorSection:
    """Device, kernels, precision and recomputation; choices depend on the installed plugins."""

    device: str | None = option(
        None,
        "Device type, as listed by `lmcore plugins`; default: detected.",
        metavar="TYPE",
        on_resume=FREE,
    )
    plugin_off: tuple[str, ...] = plugin_off_option()
    precision: str | None = option(
        None,
        "Precision policy, such as fp32, bf16 or fp16; auto: bf16 if its products are faster here "
        "than those of the default, the first that the device lists.",
        metavar="NAME",
    )
    loss_scale: float | None = option(
        None,
        "Fixed loss scale for fp16; 0 or none: dynamic.",
        minimum=0,
        needs=_LOSS_SCALE.or_off(0).else_error(
            "gradients of other precisions do not underflow: there is nothing to scale"
        ),
    )
    initial_loss_scale: float = option(
        2.0**32,
        "Initial dynamic loss scale; 2^32 by default.",
        above=0,
        on_resume=FREE,
        needs=(_LOSS_SCALE, _DYNAMIC),
    )
    min_loss_scale: float = option(
        1.0, "Minimum of the dynamic loss scale.", above=0, needs=(_LOSS_SCALE, _DYNAMIC)
    )
    loss_scale_window: int = option(
        1000,
        "Steps without overflow after which the dynamic loss scale is doubled.",
        minimum=1,
        needs=(_LOSS_SCALE, _DYNAMIC),
    )
    hysteresis: int = option(
        2,
        "Overflows since the dynamic loss scale last grew after which it is halved.",
        minimum=1,
        needs=(_LOSS_SCALE, _DYNAMIC),
    )
    recompute: str = option(
        "none",
        "Recompute policy of the device, such as none, selective or full.",
        metavar="NAME",
        on_resume=FREE,
    )
    recompute_method: str | None = option(
        None,
        "Layers that a policy for whole layers recomputes: all, in groups with one checkpoint each "
        "(uniform), or only the first ones (block); default: uniform.",
        choices=("uniform", "block"),
        on_resume=FREE,
        needs=_RECOMPUTE,
    )
    recompute_num_layers: int = option(
        1,
        "Layers in each group (uniform), or number of layers to recompute (block).",
        minimum=1,
        on_resume=FREE,
        needs=_RECOMPUTE,
    )
    ops: tuple[str, ...] = option(
        (),
        "Preferred kernels as `op=id,id`; the first that supports the case is used.",
        metavar="OP=ID",
        on_resume=DROPOUT,
    )
    strict_ops: bool = option(
        False, "Fail if an op would use the core's reference kernel.", on_resume=FREE
    )
    deterministic: bool = option(
        False, "Use only kernels that declare themselves deterministic.", on_resume=DROPOUT
    )
    num_threads: int | None = option(
        None,
        "CPU threads of each process; default: torch's.",
        minimum=1,
        maximum=MAX_THREADS,
        on_resume=FREE,
    )
    flush_subnormals: bool = option(
        True,
        "Compute on the CPU with zero in place of subnormal numbers (float32: below 1.2e-38), with "
        "which processors are many times slower.",
        on_resume=FREE,
    )
