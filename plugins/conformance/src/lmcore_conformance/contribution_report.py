"""Contributions of each plugin in the report: what was tried, and what a run never binds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmcore_conformance.contributions import NOTHING, POLICIES
from lmcore_conformance.result import Result, Status

__all__ = ["contribution_lines", "described"]


def described(
    brought: Mapping[str, Any], results: Mapping[str, Result], *, device_only: bool = False
) -> dict[str, Any]:
    """Return a plugin with its contributions; a kernel is tried if a check of its op was made.

    Args:
        brought: Contributions of the plugin, from `contributions`.
        results: Results of the checks, by id.
        device_only: True if nothing but the device of the plugin was used.
    """
    if device_only:
        brought = {**brought, **NOTHING}
    ended = {Status.PASSED, Status.FAILED}
    made = {name for name, result in results.items() if result.status in ended}
    tried_ops = {name.split(".")[1] for name in made if name.startswith("ops.")}
    brings = {kind: brought[kind] for kind in ("device", *POLICIES) if brought[kind]}
    kernels = []
    for kernel in brought["kernels"]:
        tried = bool(kernel["cases"]) and kernel["op"] in tried_ops
        kernels.append({**kernel, "tried": tried})
    identity = {name: brought[name] for name in ("name", "distribution", "version")}
    return identity | {"brings": brings | ({"kernels": kernels} if kernels else {})}


def contribution_lines(plugins: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the contributions of each plugin, then its kernels that no run binds.

    Args:
        plugins: Plugins that took part, from `described`.
    """
    bringing = [plugin for plugin in plugins if plugin["brings"]]
    if bringing:
        yield from ("", "brought by:")
    for plugin in bringing:
        yield f"  {plugin['name']} ({plugin['distribution']} {plugin['version']})"
        for kind, names in _names(plugin["brings"]).items():
            yield f"    {kind}: {', '.join(names)}"
    notes = [
        f"  {kernel['op']}={kernel['id']} of {plugin['name']}: {_state(kernel)}: {kernel['reason']}"
        for plugin in bringing
        for kernel in plugin["brings"].get("kernels", ())
        if kernel["reason"]
    ]
    if notes:
        yield from ("", "kernels that were not tried, or that no run binds:", *notes)


def _state(kernel: Mapping[str, Any]) -> str:
    if kernel["cases"]:
        return "never bound" if kernel["tried"] else "never bound, and not tried"
    return "not tried"


def _names(brings: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of what was brought, by kind; a kernel that was not tried is left out."""
    found = {"device": [brings["device"]] if "device" in brings else []}
    found["kernels"] = [
        f"{kernel['op']}={kernel['id']}" for kernel in brings.get("kernels", ()) if kernel["tried"]
    ]
    for kind in POLICIES:
        found[kind.replace("_", " ")] = [
            f"{offer['name']} (unavailable: {offer['reason']})"
            if offer["reason"]
            else offer["name"]
            for offer in brings.get(kind, ())
        ]
    return {kind: names for kind, names in found.items() if names}
