"""Record of the plugins that take part in a run, and of what each brings to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcore import hookspecs
from lmcore.data.prepare.named_text import BUNDLED, named_texts
from lmcore.data.tokenizer.build import registered_types, tokenizer_types

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.plugin import PluginRecord, PluginSet
    from lmcore.runtime.runtime import Runtime

__all__ = ["plugins_of_run"]

_HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("lmcore_"))


def plugins_of_run(
    plan: RunPlan, runtime: Runtime, plugins: PluginSet, tokenizer: str
) -> list[dict[str, Any]]:
    """Return each plugin that takes part, with version and contributions, as JSON values.

    The device's plugin is the first; the other plugins bring no device.  A kernel counts if it is
    bound, a policy if it is chosen.

    Args:
        plan: The run.
        runtime: Device, policies and kernels, which are bound.
        plugins: Plugins that the launcher found.
        tokenizer: Type of the run's tokenizer.
    """
    registered = _registered(plan, plugins, tokenizer)
    return [
        {
            "name": record.name,
            "distribution": record.distribution,
            "version": record.version,
            "hooks": [name for name in _HOOKS if record.implements(name)],
            "brings": _brought(record, runtime) | registered.get(record.name, {}),
        }
        for record in plugins.participants(runtime.selection.plugin)
    ]


def _brought(record: PluginRecord, runtime: Runtime) -> dict[str, Any]:
    """Return device, kernels by op, backend and policies of a plugin; what it lacks is left out."""
    kernels: dict[str, list[str]] = {}
    for bound in runtime.ops.resolutions:
        if bound.plugin == record.name and bound.chosen not in kernels.get(bound.op, ()):
            kernels.setdefault(bound.op, []).append(bound.chosen)
    offers = {
        "comm_backend": runtime.processes.backend if runtime.processes else None,
        "precision": runtime.precision,
        "recompute": runtime.recompute,
        "checkpoint_stager": runtime.stager,
    }
    is_device_plugin = record.name == runtime.selection.plugin
    return {
        **({"device": runtime.device.type} if is_device_plugin else {}),
        **({"kernels": kernels} if kernels else {}),
        **{
            kind: offer.name
            for kind, offer in offers.items()
            if offer is not None and offer.plugin == record.name
        },
    }


def _registered(plan: RunPlan, plugins: PluginSet, tokenizer: str) -> dict[str, dict[str, Any]]:
    """Return, by plugin, the tokenizer and the texts of the run that it registered."""
    found: dict[str, dict[str, Any]] = {}
    if tokenizer not in tokenizer_types():
        owner = registered_types(plugins).plugins.get(tokenizer)
        if owner is not None:
            found[owner.name] = {"tokenizer": tokenizer}
    names = {
        source.name
        for blend in plan.sources.blends()
        for source in blend.sources
        if source.corpus and source.name != BUNDLED
    }
    owners = named_texts(plugins).plugins if names else {}
    for name in sorted(names & owners.keys()):
        found.setdefault(owners[name].name, {}).setdefault("corpora", []).append(name)
    return found
