"""Consistency checks: settings, devices, versions and kernels are the same on all ranks.

A run whose ranks differ in them would not fail, but train another model, slowly or wrongly.  So it
stops on every rank, with the values of all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import DeviceError, LmcoreError, RunError
from lmcore.plugin import verify
from lmcore.runtime.launch.rank import named_ranks
from lmcore.runtime.process.rendezvous import Rendezvous

if TYPE_CHECKING:
    from lmcore.contract.op.table import OpTable
    from lmcore.plugin import PluginSet, Selection

__all__ = ["check_device", "check_equal", "check_kernels", "check_versions"]

_MAX_TEXT = 400
_NOT_USED = "not used"
_MAX_DIFFERENCES = 5


def check_equal(
    rendezvous: Rendezvous, subject: str, value: Any, *, hint: str | None = None
) -> None:
    """Stop the run on every rank unless all give the same JSON *value*; all ranks must call it.

    Args:
        rendezvous: Connection of the processes.
        subject: Name of the value for messages, such as "the version of lmcore".
        value: JSON value of this rank; of mappings only the keys that differ are shown.
        hint: Hint for a difference.

    Raises:
        RunError: The values differ; with the ranks that have each.
    """
    values = rendezvous.gather(value, subject)
    lines = _differences(values)
    if lines:
        raise RunError(
            f"the processes of this run differ in {subject}",
            why="\n".join(lines),
            hint=hint or "run `lmcore doctor` on every host of the run and make them alike",
        )


def check_device(rendezvous: Rendezvous, selection: Selection, plugins: PluginSet) -> None:
    """Stop the run on every rank unless all ranks use the same device and can see it.

    Args:
        rendezvous: Connection of the processes.
        selection: The launcher's decision, as this process received it.
        plugins: Plugins that `discover` found in this process.

    Raises:
        DeviceError: The ranks have different decisions, or a rank would not have made the
            launcher's; with the evidence of both.
    """
    complaint: dict[str, str | None] | None = None
    try:
        verify(selection, plugins)
    except LmcoreError as error:
        complaint = {"what": error.what, "why": error.why, "hint": error.hint}
    replies = rendezvous.gather(
        {
            "device": selection.probe.device_type,
            "plugin": f"{selection.plugin} ({selection.distribution} {selection.version})",
            "evidence": selection.probe.evidence,
            "complaint": complaint,
        },
        "the device that every rank uses",
    )
    _stop_if_chosen_differently(replies)
    complaints = [reply["complaint"] for reply in replies]
    unable = [rank for rank, complaint in enumerate(complaints) if complaint is not None]
    if not unable:
        return
    lines = []
    for ranks, reason in _folded(complaints):
        if reason is not None:
            lines += [f"{named_ranks(ranks)}: {reason['what']}"]
            lines += [f"  {line}" for line in (reason["why"] or "").splitlines()]
    raise DeviceError(
        f"{named_ranks(unable)} cannot use device `{selection.probe.device_type}`, which the "
        "launcher chose",
        why="\n".join(lines),
        hint=complaints[unable[0]]["hint"],
    )


def _stop_if_chosen_differently(replies: Sequence[Mapping[str, Any]]) -> None:
    choices = _folded([{"device": reply["device"], "plugin": reply["plugin"]} for reply in replies])
    if len(choices) == 1:
        return
    lines = []
    for ranks, choice in choices:
        lines.append(f"{named_ranks(ranks)}: `{choice['device']}` of plugin {choice['plugin']}")
        # Hosts differ in serial numbers and free memory; the first rank's evidence is enough.
        lines += [f"  {line}" for line in replies[ranks[0]]["evidence"]]
    raise DeviceError(
        "the processes of this run use different devices",
        why="\n".join(lines),
        hint="start all of them with the same `--device`, and make `lmcore plugins` alike on "
        "every host",
    )


def check_versions(rendezvous: Rendezvous, selection: Selection, plugins: PluginSet) -> None:
    """Stop the run on every rank unless lmcore, torch and the plugins of the run are the same.

    Raises:
        RunError: Versions differ; with the ranks that have each.
    """
    versions = {f"package {name}": _version(name) for name in ("lmcore", "torch")}
    for participant in plugins.participants(selection.plugin):
        versions[f"plugin {participant.name}"] = f"{participant.distribution} {participant.version}"
    check_equal(
        rendezvous,
        "the versions of their software",
        versions,
        hint="install the same versions on every host of the run",
    )


def check_kernels(rendezvous: Rendezvous, table: OpTable, *, parts: bool = False) -> None:
    """Stop the run on every rank unless all bound the same kernels; after the model is built.

    Only fingerprints are exchanged if they are equal.

    Args:
        rendezvous: Connection of the processes.
        table: Op table of this rank, with the kernels that its model bound.
        parts: True if ranks have different parts of the model, and need not have all kernels.

    Raises:
        RunError: The ops that differ, which ranks run what, and why they run nothing better.
    """
    subject = "the kernels that their model runs"
    if len(set(rendezvous.gather(table.fingerprint(), subject))) == 1:
        return
    differences = _kernel_differences(rendezvous.gather(_kernels(table), subject), parts=parts)
    if not differences:
        return
    lines = _cut(differences)
    raise RunError(
        f"the processes of this run differ in {subject}",
        why="\n".join(lines),
        hint="`lmcore ops explain` on each host says why; `--ops` chooses the same for all",
    )


def _kernels(table: OpTable) -> dict[str, tuple[str, str]]:
    """Return the chosen kernel and the reasons against better ones, by op and case."""
    found = {}
    for resolution in table.resolutions:
        case = [resolution.context.device_type, resolution.context.dtype]
        case += [f"{key} {value}" for key, value in sorted(resolution.context.attributes.items())]
        reasons = [f"not `{name}`: {reason}" for name, reason in resolution.rejected]
        choice = f"`{resolution.chosen}` of `{resolution.plugin}`"
        found[f"op `{resolution.op}` ({', '.join(case)})"] = (choice, "; ".join(reasons))
    return found


def _kernel_differences(
    values: Sequence[Mapping[str, Sequence[str]]], *, parts: bool
) -> list[list[str]]:
    """Return the lines of each case in which ranks run different kernels.

    Reasons are not compared, as they may have paths of a host; the first rank's are shown.
    """
    found = []
    for case in dict.fromkeys(case for value in values for case in value):
        choices = [value.get(case, (_NOT_USED, "")) for value in values]
        groups = _folded([choice for choice, _ in choices])
        kernels = {choice for _, choice in groups} - ({_NOT_USED} if parts else set())
        if len(kernels) > 1:
            lines = [f"{case}:"]
            for ranks, choice in groups:
                reasons = choices[ranks[0]][1]
                lines.append(_cut_text(f"  {named_ranks(ranks)}: {choice}; {reasons}".rstrip("; ")))
            found.append(lines)
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "run from its sources"


def _folded(values: Sequence[Any]) -> list[tuple[list[int], Any]]:
    """Return each distinct value once, with the ranks that have it."""
    groups: dict[str, tuple[list[int], Any]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(json.dumps(value, sort_keys=True), ([], value))[0].append(rank)
    return list(groups.values())


def _differences(values: Sequence[Any]) -> list[str]:
    """Return lines with the ranks that have each value; none if all values are the same."""
    groups = _folded(values)
    if len(groups) == 1:
        return []
    if not all(isinstance(value, Mapping) for value in values):
        return [f"{named_ranks(ranks)}: {_shown(value)}" for ranks, value in groups]
    found = []
    for key in dict.fromkeys(key for value in values for key in value):
        parts = _folded([value.get(key) for value in values])
        if len(parts) > 1:
            lines = [f"  {named_ranks(ranks)}: {_shown(part)}" for ranks, part in parts]
            found.append([f"{key}:", *lines])
    return _cut(found)


def _cut(differences: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of the first differences, and how many more there are."""
    lines = [line for difference in differences[:_MAX_DIFFERENCES] for line in difference]
    more = len(differences) - _MAX_DIFFERENCES
    return [*lines, f"and {more} more"] if more > 0 else lines


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return _cut_text(value if isinstance(value, str) else json.dumps(value, sort_keys=True))


def _cut_text(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
