"""Requirements that a declaration can close: abilities that a device may lack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcore.contract import Problem
    from lmcore_conformance.bench import Bench

__all__ = ["REQUIREMENTS", "Requirement"]


@dataclass(frozen=True)
class Requirement:
    """An ability of a device that checks need.

    Attributes:
        summary: the ability, in words.
        offered: True if the device's records offer it; None if only its checks can show that.
        ability: The attribute of `Device` that it is, if it is one.
        reason: Returns why it is missing, if the device's record has no reason.
        flag: Option of a run that needs it, and that is refused without it.
    """

    summary: str
    offered: Callable[[Bench], bool] | None = None
    ability: str = ""
    reason: Callable[[Bench], str] | None = None
    flag: str = ""

    def why_missing(self, bench: Bench) -> str | None:
        """Return why the device does not offer it; None if it does, or if that is not known."""
        if self.offered is None or self.offered(bench):
            return None
        reason = bench.device.missing.get(self.ability, "")
        reason = self.reason(bench) if self.reason else reason
        return f"the device does not offer {self.summary}" + (f" ({reason})" if reason else "")

    def why_wrongly_closed(self, name: str, bench: Bench) -> str | None:
        """Return why it must not be declared as closed by *name*; None if it may be."""
        if self.offered is None or not self.offered(bench):
            return None
        if not self.flag:
            return f"`{name}` is closed, and the device offers {self.summary}"
        return (
            f"`{name}` is closed, and a run with `{self.flag}` is not refused: it needs "
            f'{self.summary}; give the device the reason, by `missing={{"{name}": ...}}`'
        )


def _ability(summary: str, name: str) -> Requirement:
    def offered(bench: Bench) -> bool:
        return getattr(bench.device, name) is not None

    return Requirement(f"{summary}, by `{name}`", offered, name)


def _setting(summary: str, name: str) -> Requirement:
    """Return an ability without a function, for which a run asks by a setting of its name."""
    flag = f"--{name}"

    def why(bench: Bench) -> str:
        return "; ".join(one.why or one.what for one in _problems_of_flag(bench, flag))

    return Requirement(summary, lambda b: not _problems_of_flag(b, flag), name, why, flag)


@lru_cache(maxsize=8)
def _problems_of_flag(bench: Bench, flag: str) -> list[Problem]:
    """Return the problems that device and plugins have with a run with *flag*, and not without."""
    from lmcore.config.load import load_config
    from lmcore.plugin import validate_config
    from lmcore.plugin.registrations import plugin_sections

    plugins = bench.plugins
    sections = plugin_sections(plugins)
    without, found = (
        validate_config(
            plugins, bench.selection, bench.device, load_config(flags, plugins=sections).config
        )
        for flags in ([], [flag])
    )
    return [problem for problem in found if problem not in without]


def _dtype(name: str) -> Callable[[Bench], bool]:
    return lambda bench: name in bench.device.dtypes


def _recompute(*names: str) -> Callable[[Bench], bool]:
    return lambda bench: any(
        policy.name in names and policy.available() is None for policy in bench.recompute_policies
    )


def _mixed(bench: Bench) -> bool:
    return any(
        (policy.compute != policy.keep or bench.subject) and policy.available() is None
        for policy in bench.precision_policies
    )


def _backend(bench: Bench) -> bool:
    return any(backend.available() is None for backend in bench.backends)


def _averages(bench: Bench) -> bool:
    """Return True if the backend that a run uses claims to average."""
    from lmcore.plugin import choose_comm_backend

    usable = [backend for backend in bench.backends if backend.available() is None]
    own = [backend for backend in usable if backend.device_type == bench.device.type]
    return bool(own) and choose_comm_backend(own).supports_average


def _no_backend(bench: Bench) -> str:
    reasons = [f"`{backend.name}`: {backend.available()}" for backend in bench.backends]
    return "; ".join(reasons) or "its plugin brings none, and torch has none for this device type"


REQUIREMENTS = MappingProxyType(
    {
        "memory_stats": _ability("bytes in use", "memory_stats"),
        "peak_memory": _ability("a memory peak that can be reset", "reset_peak_memory"),
        "empty_cache": _ability("release of cached memory", "empty_cache"),
        "out_of_memory": Requirement("an exception for an allocation that is too large"),
        "pin_memory": _ability("pinned host memory", "pin_memory"),
        "streams": _ability("streams", "new_stream"),
        "events": _ability("events", "new_event"),
        "peak_flops": _ability("peak rate of matrix products", "peak_flops"),
        "host_apart": Requirement("memory and random generator separate from the host's"),
        "float64": Requirement("matrix products in float64", _dtype("float64")),
        "bfloat16": Requirement("matrix products in bfloat16", _dtype("bfloat16")),
        "float16": Requirement("matrix products in float16", _dtype("float16")),
        "mixed_precision": Requirement(
            "a precision policy that computes in another dtype than that of the weights", _mixed
        ),
        "attention_precision": Requirement("attention in the dtype of each precision policy"),
        "recompute": Requirement(
            "the recompute policies `selective` and `full`", _recompute("selective", "full")
        ),
        "offload": Requirement(
            "the recompute policies `offload` and `full-offload`",
            _recompute("offload", "full-offload"),
        ),
        "deterministic": _setting(
            "bitwise repeatable training with `--deterministic`", "deterministic"
        ),
        "convolution": Requirement("torch's two-dimensional convolutions"),
        "distributed": Requirement("a communication backend", _backend, reason=_no_backend),
        "all_to_all": Requirement("the collective `all_to_all`"),
        "reduce_scatter": Requirement("the collective `reduce_scatter`"),
        "gather_scatter": Requirement("the collectives `gather`, `scatter` and `reduce`"),
        "barrier": Requirement("the collective `barrier`"),
        "send_recv": Requirement("sends from one process to another"),
        "average": Requirement(
            "collectives that average, by `CommBackend.supports_average`", _averages
        ),
        "ddp": Requirement("torch's `DistributedDataParallel`"),
        "fsdp": Requirement("torch's `fully_shard`"),
        "compile": _setting("`torch.compile`", "compile"),
        "graph_capture": _ability("work that is captured and replayed", "new_graph"),
        "constant_projection": _ability("projections by constant weights", "constant_projection"),
        "next_token_attention": _ability(
            "attention of new tokens over a cache", "next_token_attention"
        ),
        "profiler": Requirement("events of the device in torch's profiler"),
        "autocast": Requirement("torch's autocast"),
    }
)
"""By the name that `conformance.toml` uses."""
