"""Contributions of each plugin under test: what it offers to runs on the device.

`contributions` runs in the process that creates the device; `touched` names the checks that a
plugin's contributions are part of, for a plugin without a device that is tried alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcore.contract import OpImpl
    from lmcore.contract.op.table import OpTable
    from lmcore.plugin import PluginRecord
    from lmcore_conformance.bench import Bench

__all__ = ["NOTHING", "POLICIES", "contributions", "touched", "usable_offers"]

POLICIES = ("comm_backends", "precision_policies", "recompute_policies", "checkpoint_stagers")
"""Kinds of contributions besides kernels."""

NOTHING: Mapping[str, Sequence[Any]] = dict.fromkeys(("kernels", *POLICIES), ())
"""Contributions of a plugin that offers nothing."""

_TRAINED = ("train.resume", "train.command")
_TOUCHED: Mapping[str, Sequence[str]] = {
    "kernels": (
        *("ops.reached", "train.curve", "train.micro-batches", "train.repeat", *_TRAINED),
        *("extras.compile", "loop.kernels"),
    ),
    "comm_backends": (
        *("distributed.*", "parallel.*", "train.processes", "loop.processes", "loop.sharded"),
    ),
    "precision_policies": (
        *("train.precision-in-force", "train.mixed-precision", "loop.mixed-precision"),
        "device.settings",
        *_TRAINED,
    ),
    "recompute_policies": ("train.recompute-own", "device.settings"),
    "checkpoint_stagers": ("device.stagers", "device.settings", "train.async-save", *_TRAINED),
}
"""Checks that each kind of contribution is part of; the checks of a kernel's op come on top."""

_ALWAYS = ("contract.*", "device.offers-twice")
_OF_A_DEVICE = ("contract.probe", "contract.probe-initialises-nothing")


def touched(brought: Mapping[str, Any], ids: Iterable[str]) -> list[str]:
    """Return the checks that the contributions of a plugin without a device are part of.

    Args:
        brought: Contributions of the plugin, from `contributions`.
        ids: Ids of all checks.
    """
    kinds = usable_offers(brought)
    patterns = [*_ALWAYS, *(pattern for kind in kinds for pattern in _TOUCHED[kind])]
    patterns += [f"ops.{kernel['op']}.*" for kernel in brought["kernels"] if kernel["cases"]]
    return [
        name
        for name in ids
        if name not in _OF_A_DEVICE and any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def usable_offers(brought: Mapping[str, Any]) -> list[str]:
    """Return the kinds of contributions that can be tried on the device."""
    kinds = ["kernels"] if any(kernel["cases"] for kernel in brought["kernels"]) else []
    return kinds + [
        kind for kind in POLICIES if any(not offer["reason"] for offer in brought[kind])
    ]


def contributions(bench: Bench) -> list[dict[str, Any]]:
    """Return what each plugin that takes part offers on the device, as JSON values.

    The core's own policies belong to no plugin.  A kernel has `cases`, the number of cases of this
    suite that it does, `bound`, the number of those for which a run binds it, and a reason if
    either is 0.
    """
    from lmcore.plugin import (
        build_op_table,
        checkpoint_stagers,
        comm_backends,
        precision_policies,
        recompute_policies,
    )

    arguments = (bench.plugins, bench.selection, bench.device)
    offers: dict[str, Sequence[Any]] = {
        "comm_backends": [
            offer for offer in comm_backends(*arguments) if offer.device_type == bench.device.type
        ],
        "precision_policies": precision_policies(*arguments),
        "recompute_policies": recompute_policies(*arguments),
        "checkpoint_stagers": checkpoint_stagers(*arguments),
    }
    table = build_op_table(*arguments)
    return [
        {
            "name": record.name,
            "distribution": record.distribution,
            "version": record.version,
            "device": bench.device.type if record.name == bench.selection.plugin else "",
            "kernels": list(_kernels(bench, table, record)),
            **{
                kind: [
                    {"name": offer.name, "reason": offer.available() or ""}
                    for offer in found
                    if offer.plugin == record.name
                ]
                for kind, found in offers.items()
            },
        }
        for record in bench.plugins.participants(bench.selection.plugin)
    ]


def _kernels(bench: Bench, table: OpTable, record: PluginRecord) -> Iterator[dict[str, Any]]:
    from lmcore.contract.op.records import missing_packages

    for impl in table.impls:
        if impl.plugin != record.name:
            continue
        lacking = missing_packages(impl)
        found = (
            (0, 0, f"needs `{'`, `'.join(lacking)}`, not installed")
            if lacking
            else _cases(bench, table, impl)
        )
        names = ("cases", "bound", "reason")
        yield {"op": impl.op, "id": impl.id, **dict(zip(names, found, strict=True))}


def _cases(bench: Bench, table: OpTable, impl: OpImpl) -> tuple[int, int, str]:
    """Return how many cases a kernel does, for how many it is bound, and a reason if one is 0."""
    from lmcore.contract.op.context import op_context
    from lmcore_conformance.op.call import SPECS, Kernel, dtypes_of
    from lmcore_conformance.op.case import CASES

    kernel = Kernel(impl.op, impl.id, impl)
    attributes = [case.attributes for case in CASES.get(impl.op, ())] or [{}]
    done, bound, why_not_done, why_not_bound = 0, 0, "", ""
    for dtype in dtypes_of(bench):
        for case in attributes:
            choices = [
                table.resolve(
                    impl.op,
                    op_context(
                        SPECS[impl.op], bench.device.type, dtype, {**case, "compile": compiled}
                    ),
                )
                for compiled in (False, True)
            ]
            reason = dict(choices[0].rejected).get(impl.id, "")
            try:
                does = kernel.does(bench.device.type, dtype, case)
            except Exception as error:  # noqa: BLE001 - a kernel's function may raise anything
                does, reason = False, f"its `supports` raised {type(error).__name__}: {error}"
            done += does
            bound += any(choice.chosen == impl.id for choice in choices)
            if does:
                why_not_bound = why_not_bound or reason
            else:
                why_not_done = why_not_done or reason
    if not done:
        return 0, 0, why_not_done
    return done, bound, "" if bound else why_not_bound
