"""Checks of the records that a plugin's hooks return: their fields, names, availability.

Part of `lmcore plugin check`; `lmcore_conformance.plugin_check.trial` calls the hooks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lmcore.base.errors import ConfigError, LmcoreError, PluginError, nearest
from lmcore.config.option import options_of
from lmcore.contract.dtype import dtype_name, parse_dtype
from lmcore.contract.probe import Check, CheckStatus, PluginInfo
from lmcore.plugin.record import PluginRecord, located
from lmcore.runtime.launch.job.kinds import JOBS
from lmcore_conformance.plugin_check.torch_functions import torch_problems

if TYPE_CHECKING:
    from lmcore.contract.communication import CommBackend
    from lmcore.contract.device import Device
    from lmcore.contract.precision.policy import PrecisionPolicy
    from lmcore.contract.recompute import RecomputePolicy

__all__ = [
    "call_hook",
    "check_backends",
    "check_device",
    "check_named",
    "check_precisions",
    "check_recompute",
    "field_problems",
    "listed",
    "offer",
    "resource_problems",
]

Described = Mapping[str, Any]
T = TypeVar("T")

_KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "None": (type(None),),
    "tuple": (tuple, list),
    "frozenset": (frozenset, set),
    "Mapping": (Mapping,),
}
"""Types of the values of fields with these annotations; other annotations are not checked."""


def call_hook(record: PluginRecord, hook: str, **arguments: Any) -> Any:
    """Return the result of a plugin's hook.

    Raises:
        PluginError: It raised any exception, an `LmcoreError` included.
    """
    try:
        return record.call(hook, **arguments)
    except LmcoreError as error:
        # What was not meant for people comes wrapped, with itself as the reason.
        unmeant = error.what.endswith(f"raised in `{hook}`") and error.why
        raise PluginError(f"it raised {error.why if unmeant else _message(error)}") from error
    except SystemExit as error:
        raise PluginError(f"it ended the process with status {error.code}") from error


def _message(error: LmcoreError) -> str:
    return f"{type(error).__name__}: {error.what}" + (f" ({error.why})" if error.why else "")


def listed(record: PluginRecord, hook: str, kind: type[T], **arguments: Any) -> list[T]:
    """Return the offers of a hook.

    Raises:
        PluginError: It raised, or returned something else than a sequence of *kind*.
    """
    found = call_hook(record, hook, **arguments)
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise PluginError(
            f"it returned `{type(found).__name__}`, not a list of `{kind.__name__}`: {found!r:.200}"
        )
    for item in found:
        if not isinstance(item, kind):
            raise PluginError(
                f"its list has `{type(item).__name__}`, not `{kind.__name__}`: {item!r:.200}"
            )
    return list(found)


def field_problems(record: Any, contract: Described) -> Iterator[str]:
    """Yield which fields of a record are of a wrong kind, or unknown to a version of the contract.

    A field that the version does not have counts where it is given, not where it has its default,
    and so does one that an earlier version of the plugin's range lacks (`contract["earlier"]`).
    """
    name = type(record).__name__
    described = contract["types"].get(name)
    if described is None:
        yield f"version {contract['api']} of the contract has no `{name}`"
        return
    known = {field["name"]: field["type"] for field in described["fields"]}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name not in known:
            if not _is_default(field, value):
                yield (
                    f"`{name}.{field.name}` is given, and version {contract['api']} of the "
                    "contract does not have it"
                )
        elif not _fits(value, known[field.name]):
            yield f"`{name}.{field.name}` is {value!r:.80}, and `{known[field.name]}` is wanted"
        elif not _is_default(field, value):
            yield from _earlier_problems(name, field.name, contract)


def _earlier_problems(name: str, field: str, contract: Described) -> Iterator[str]:
    """Yield the first of the earlier versions whose record lacks a field that is given."""
    for earlier in contract.get("earlier", ()):
        described = earlier["types"].get(name)
        if described and field not in [one["name"] for one in described["fields"]]:
            yield (
                f"`{name}.{field}` is given, and version {earlier['api']} of the contract, which "
                "`PluginInfo.api` includes, does not have it"
            )
            return


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return value is field.default or value == field.default


def _fits(value: Any, annotation: str) -> bool:
    """Return True if a value may have the annotated type, or if that is not known."""
    parts = [re.sub(r"\[.*", "", part).strip() for part in _alternatives(annotation)]
    if all(part in _KINDS or part == "Callable" for part in parts):
        return any(_is_kind(value, part) for part in parts)
    return True


def _alternatives(annotation: str) -> list[str]:
    """Return the parts of a union; brackets may contain other unions."""
    parts, depth, start = [], 0, 0
    for place, sign in enumerate(annotation):
        depth += (sign == "[") - (sign == "]")
        if sign == "|" and depth == 0:
            parts.append(annotation[start:place])
            start = place + 1
    return [*parts, annotation[start:]]


def _is_kind(value: Any, part: str) -> bool:
    if part == "Callable":
        return callable(value)
    wrong_bool = isinstance(value, bool) and part != "bool"
    return isinstance(value, _KINDS[part]) and not wrong_bool


def resource_problems(info: PluginInfo) -> Iterator[str]:
    """Yield the kinds of jobs in `PluginInfo.device_resources` that name no devices."""
    kinds = [
        name
        for name, kind in JOBS.items()
        if "device_resource" in [option.name for option in options_of(kind.section)]
    ]
    for kind in info.device_resources:
        if kind not in kinds:
            close = nearest(kind, kinds)
            meant = f"; did you mean `{close}`?" if close else ""
            yield (
                f"`PluginInfo.device_resources` has `{kind}`, and only these kinds of jobs request "
                f"devices by name: {', '.join(f'`{one}`' for one in kinds)}{meant}"
            )


def check_device(device: Device, contract: Described) -> Iterator[Check]:
    """Yield whether a device's record is right, and its functions work."""
    problems = [
        *field_problems(device, contract),
        *_dtype_problems(device),
        *torch_problems(device, contract.get("torch", {})),
    ]
    problems += [
        f"`{name}` {problem}"
        for name, problem in (
            ("describe", _raised(device.describe)),
            ("set_current", _raised(device.set_current)),
            ("synchronize", _raised(device.synchronize)),
            ("set_rng_state", _raised(lambda: device.set_rng_state(device.get_rng_state()))),
            ("memory_stats", _memory_problem(device)),
            ("health", _answer_problem(device.health_problem)),
            ("compilations", _answer_problem(lambda: _compilations_problem(device), "returned")),
            ("step_boundary", _raised(device.step_boundary)),
            ("compile_backend", _backend_problem(device)),
        )
        if problem
    ]
    hook = "lmcore_create_device"
    yield from (Check(hook, CheckStatus.FAILED, problem) for problem in problems)
    if not problems:
        yield Check(hook, CheckStatus.OK, f"`{device.type}` {device.index}: {device.name}")


def _dtype_problems(device: Device) -> Iterator[str]:
    """Yield the dtypes that torch does not call so: lmcore would not find that the device has them.

    A wrong name otherwise only shows as a precision that the device seems to lack.
    """
    import torch

    dtypes: object = device.dtypes
    if not isinstance(dtypes, frozenset | set):  # `field_problems` reports it
        return
    known = {dtype_name(one) for one in vars(torch).values() if isinstance(one, torch.dtype)}
    for name in sorted(dtypes - known, key=str):
        try:
            close = parse_dtype(str(name))
        except ConfigError:
            close = nearest(str(name), known) or ""
        meant = f"; did you mean `{close}`?" if close else ""
        yield f"`Device.dtypes` has {name!r:.80}, which is no name of a dtype of torch's{meant}"


def _raised(function: Callable[[], Any]) -> str | None:
    try:
        function()
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return f"raised {located(error)}"
    return None


def _answer_problem(
    ask: Callable[[], str | None], words: str = "reports a fault of a device that is present:"
) -> str | None:
    """Return what is wrong with an answer that the core checks as well; *words* precede it."""
    try:
        found = ask()
    except LmcoreError as error:
        return f"is wrong: {error.what_and_why}"
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return f"raised {located(error)}"
    return None if found is None else f"{words} {found}"


def _compilations_problem(device: Device) -> str | None:
    found: Any = device.compiled_so_far()
    if found is None:
        return None
    fits = isinstance(found.count, int) and isinstance(found.seconds, int | float)
    return None if fits and min(found.count, found.seconds) >= 0 else f"{found!r:.80}"


def _backend_problem(device: Device) -> str | None:
    if not isinstance(device.compile_backend, str):
        return None
    import torch

    known = torch.compiler.list_backends(exclude_tags=())
    if device.compile_backend in known:
        return None
    close = nearest(device.compile_backend, known)
    meant = f"; did you mean `{close}`?" if close else ""
    return f"`{device.compile_backend}` is no backend of `torch.compile` here{meant}"


def _memory_problem(device: Device) -> str | None:
    from lmcore.contract.memory_stats import MemoryStats

    if device.memory_stats is None:
        return None
    try:
        found: object = device.memory_stats()
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return f"raised {located(error)}"
    return None if isinstance(found, MemoryStats) else f"returned {found!r:.80}, no `MemoryStats`"


def check_named(hook: str, offered: Sequence[Any], contract: Described) -> Iterator[Check]:
    """Yield the problems of records that have a name and may be unavailable."""
    for record in offered:
        for problem in field_problems(record, contract):
            yield Check(hook, CheckStatus.FAILED, problem)
    names = [record.name for record in offered]
    for name in sorted({name for name in names if names.count(name) > 1}, key=str):
        yield Check(hook, CheckStatus.FAILED, f"it offers `{name}` {names.count(name)} times")
    for record in offered:
        wrong = _availability_problem(record) if callable(record.available) else None
        if wrong:
            yield Check(hook, CheckStatus.FAILED, f"`{record.name}`: {wrong}")


def _availability_problem(record: Any) -> str | None:
    try:
        found = record.available()
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return f"`available` raised {located(error)}"
    if found is None or (isinstance(found, str) and found):
        return None
    return f"`available` returned {found!r:.80}, neither None nor a reason"


def check_backends(
    backends: Sequence[CommBackend], device: Device, contract: Described
) -> Iterator[Check]:
    """Yield whether communication backends are right, and which can be used here."""
    hook = "lmcore_comm_backends"
    problems = list(check_named(hook, backends, contract))
    problems += [
        Check(hook, CheckStatus.FAILED, f"`{backend.name}` is for `{backend.device_type}`")
        for backend in backends
        if backend.device_type != device.type
    ]
    yield from problems or [offer(hook, backends)]


def check_precisions(
    policies: Sequence[PrecisionPolicy], device: Device, contract: Described
) -> Iterator[Check]:
    """Yield whether precision policies are right, and in force if they can be used."""
    hook = "lmcore_precision_policies"
    problems = list(check_named(hook, policies, contract))
    usable = [] if problems else [policy for policy in policies if policy.available() is None]
    for policy in usable:
        if policy.compute in device.dtypes:
            found = _raised(lambda policy=policy: policy.verify(device))  # type: ignore[misc]
            if found:
                problems.append(Check(hook, CheckStatus.FAILED, f"`{policy.name}` {found}"))
    top = max((policy.priority for policy in usable), default=0)
    rivals = [policy.name for policy in usable if policy.priority == top]
    if len(rivals) > 1:
        names = " and ".join(f"`{name}`" for name in rivals)
        detail = f"{names} both have the highest priority, {top}: neither is the default"
        problems.append(Check(hook, CheckStatus.FAILED, detail))
    yield from problems or [offer(hook, policies)]


def check_recompute(
    policies: Sequence[RecomputePolicy], contract: Described, *, brings_device: bool
) -> Iterator[Check]:
    """Yield the checks of recompute policies; a device's plugin offers `none`."""
    hook = "lmcore_recompute_policies"
    problems = list(check_named(hook, policies, contract))
    if brings_device and "none" not in [policy.name for policy in policies]:
        detail = "`none` is missing, which every run without `--recompute` asks for"
        problems.append(Check(hook, CheckStatus.FAILED, detail))
    yield from problems or [offer(hook, policies)]


def offer(hook: str, offered: Sequence[Any]) -> Check:
    """Return the line on the right offers; an unavailable one has its reason."""
    shown = []
    for record in offered:
        reason = record.available()
        shown.append(f"`{record.name}`" + (f" (not here: {reason})" if reason else ""))
    return Check(hook, CheckStatus.OK, ", ".join(shown) or "it offers none")
