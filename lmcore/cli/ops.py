"""`lmcore ops list` and `lmcore ops explain`: which kernels there are, and which one a case gets.

Both make the device and the op table as a run does, and no model; torch is loaded when a command
runs, not for its help.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError, LmcoreError, counted, suggestion
from lmcore.cli.group import run_group
from lmcore.cli.text.terminal import output_width, wrapped
from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_section
from lmcore.config.section.accelerator import plugin_off_option
from lmcore.contract.dtype import parse_dtype
from lmcore.contract.op.context import OpAttributes, attribute_options, op_context
from lmcore.contract.op.explain import explanation, kernel_rows
from lmcore.contract.op.records import (
    OpImpl,
    OpSpec,
    Resolution,
    missing_packages,
    parse_preferences,
)
from lmcore.contract.op.spec import OP_SPECS

if TYPE_CHECKING:
    from rich.console import Console

    from lmcore.contract.device import Device
    from lmcore.contract.op.table import OpTable
    from lmcore.contract.precision.policy import PrecisionPolicy

__all__ = ["ExplainSection", "ListSection", "explain", "list_ops", "run"]

_EXPLAIN_EPILOG = """\
Sizes that are not given stay open: a kernel that asks for one says so.

  lmcore ops explain attention --dtype bf16 --head-dim 128"""

_DEVICE_HELP = "Device type, as listed by `lmcore plugins`; default: detected."


@dataclass(frozen=True)
class ListSection:
    """List the ops, and the kernels for them on this machine."""

    name: tuple[str, ...] = option((), "Ops to list; default: all.")
    device: str | None = option(None, _DEVICE_HELP, metavar="TYPE")
    plugin_off: tuple[str, ...] = plugin_off_option()
    json: bool = option(False, "Print JSON.")


@dataclass(frozen=True, kw_only=True)
class ExplainSection(OpAttributes):
    """Explain which kernel an op would use, and why the others were rejected."""

    name: str = option(REQUIRED, "The op.")
    dtype: str | None = option(
        None,
        "Dtype of the op's inputs, such as bfloat16 or bf16; default: that of the device's default "
        "precision.",
        metavar="NAME",
    )
    device: str | None = option(None, _DEVICE_HELP, metavar="TYPE")
    plugin_off: tuple[str, ...] = plugin_off_option()
    ops: tuple[str, ...] = option(
        (), "Preferred kernels, as `lmcore train` takes them.", metavar="OP=ID"
    )
    strict_ops: bool = option(False, "Fail where the reference would be used.")
    deterministic: bool = option(False, "Use only kernels that declare themselves deterministic.")
    json: bool = option(False, "Print JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore ops ...` and return the exit status."""
    return run_group("ops", argv)


def list_ops(argv: list[str]) -> int:
    """Run `lmcore ops list` and return the exit status."""
    wanted = parse_section(ListSection, argv, command="lmcore ops list", positionals=["name"])
    specs = [_spec(name) for name in wanted.name] or list(OP_SPECS)
    device, _, table = _open(wanted.device, argv, {})
    if wanted.json:
        ops = [_op_as_dict(spec, table) for spec in specs]
        print(json.dumps({"device": _device_as_dict(device), "ops": ops}, indent=2))
        return 0
    console = _console()
    for number, spec in enumerate(specs):
        if number:
            console.print()
        _print_op(console, spec, table)
    kernels = sum(len(table.candidates(spec.name)) for spec in specs)
    counts = f"{counted(len(specs), 'op')}, {counted(kernels, 'kernel')} beside the references"
    console.print(f"\n{device.type} ({device.name}): {counts}", soft_wrap=True)
    return 0


def explain(argv: list[str]) -> int:
    """Run `lmcore ops explain` and return the exit status."""
    wanted = parse_section(
        ExplainSection,
        argv,
        command="lmcore ops explain",
        positionals=["name"],
        epilog=_EXPLAIN_EPILOG,
    )
    spec = _spec(wanted.name)
    _check_attributes(wanted, spec)
    dtype = None if wanted.dtype is None else parse_dtype(wanted.dtype)
    device, precision, table = _open(
        wanted.device,
        argv,
        {
            "preferences": parse_preferences(wanted.ops),
            "strict": wanted.strict_ops,
            "deterministic": wanted.deterministic,
        },
    )
    if dtype is None:
        dtype = precision.activations if spec.has_backward else precision.keep
    case = op_context(spec, device.type, dtype, asdict(wanted))
    failure: LmcoreError | None = None
    try:
        table.bind(spec.name, case)
    except LmcoreError as error:
        failure = error
    bound = next(iter(table.resolutions), None)  # none where the kernel could not be loaded
    resolution = bound or table.resolve(spec.name, case)
    if wanted.json:
        print(json.dumps(_explained_as_dict(resolution, device, table, failure), indent=2))
    else:
        _print_explained(resolution, device, table, usable=failure is None)
    if failure is not None:
        raise failure
    return 0


def _spec(name: str) -> OpSpec:
    specs = {spec.name: spec for spec in OP_SPECS}
    if name not in specs:
        raise ConfigError(f"unknown op `{name}`", hint=suggestion(name, specs))
    return specs[name]


def _check_attributes(wanted: ExplainSection, spec: OpSpec) -> None:
    """Refuse what the op does not have: no kernel of it would ever see it."""
    usual = OpAttributes()
    options = attribute_options()
    foreign = [
        options[field.name].flag
        for field in fields(OpAttributes)
        if field.name not in spec.attributes
        and getattr(wanted, field.name) != getattr(usual, field.name)
    ]
    if foreign:
        own = ", ".join(f"`{options[name].flag}`" for name in spec.attributes)
        raise ConfigError(
            f"op `{spec.name}` does not depend on `{'`, `'.join(foreign)}`",
            hint=f"leave it out; its kernels may ask for {own or 'nothing but the dtype'}",
        )


def _open(
    requested: str | None, argv: Sequence[str], options: Mapping[str, Any]
) -> tuple[Device, PrecisionPolicy, OpTable]:
    """Return the device, its default precision and the op table, as a run would have them."""
    from lmcore.cli.selection import find_plugins
    from lmcore.config.section import Config
    from lmcore.plugin import build_op_table, choose_precision, create_device, precision_policies
    from lmcore.runtime.device_choice import choose_device
    from lmcore.runtime.launch.rank import RankInfo

    plugins = find_plugins(argv)
    selection = choose_device(plugins, requested, RankInfo())
    device = create_device(plugins, selection, Config())
    precision = choose_precision(precision_policies(plugins, selection, device), None)
    return device, precision, build_op_table(plugins, selection, device, **options)


def _device_as_dict(device: Device) -> dict[str, Any]:
    return {"type": device.type, "name": device.name, "dtypes": sorted(device.dtypes)}


def _op_as_dict(spec: OpSpec, table: OpTable) -> dict[str, Any]:
    return {
        "name": spec.name,
        "summary": spec.summary,
        "schema": spec.schema,
        "gradients": list(spec.gradients),
        "tolerances": {name: asdict(one) for name, one in spec.tolerances.items()},
        "attributes": list(spec.attributes),
        "reference": spec.reference,
        "kernels": [_kernel_as_dict(impl) for impl in table.candidates(spec.name)],
    }


def _kernel_as_dict(impl: OpImpl) -> dict[str, Any]:
    missing = missing_packages(impl)
    return {
        "id": impl.id,
        "plugin": impl.plugin,
        "priority": impl.priority,
        "traits": sorted(impl.traits),
        "requires": {name: name not in missing for name in impl.requires},
        "load": impl.load,
    }


def _explained_as_dict(
    resolution: Resolution, device: Device, table: OpTable, failure: LmcoreError | None
) -> dict[str, Any]:
    return {
        **resolution.to_dict(),
        "device": _device_as_dict(device),
        "kernels": [_kernel_as_dict(impl) for impl in table.candidates(resolution.op)],
        "error": {"what": failure.what, "why": failure.why, "hint": failure.hint}
        if failure
        else None,
    }


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False)


def _print_op(console: Console, spec: OpSpec, table: OpTable) -> None:
    from rich.text import Text

    width = output_width()
    tolerances = ", ".join(
        f"{name} {one.absolute:g} + {one.relative:g}" for name, one in spec.tolerances.items()
    )
    head = Text(wrapped(f"{spec.name}: {spec.summary}", width, rest="  "))
    head.stylize("bold", 0, len(spec.name))
    console.print(head, soft_wrap=True)
    facts = (
        spec.name + spec.schema,
        f"gradients: {', '.join(spec.gradients) or 'none'}",
        f"tolerance: {tolerances}",
        f"attributes: {', '.join(spec.attributes) or 'none'}",
    )
    for line in facts:
        console.print(
            Text(wrapped(line, width, first="  ", rest="      "), style="dim"), soft_wrap=True
        )
    head_row, *rows = kernel_rows(spec.name, table)
    console.print(Text(f"  {head_row}", style="dim"), soft_wrap=True)
    for row, impl in zip(rows, [*table.candidates(spec.name), None], strict=True):
        shown = Text(f"  {row}")
        missing = missing_packages(impl) if impl is not None else []
        if missing:
            shown.append(f"  needs `{'`, `'.join(missing)}`, not installed", style="yellow")
        console.print(shown, soft_wrap=True)


def _print_explained(
    resolution: Resolution, device: Device, table: OpTable, *, usable: bool
) -> None:
    from rich.text import Text

    console, width = _console(), output_width()
    styles = {"chosen": "bold green" if usable else "bold red", "dim": "dim"}

    def wrap(text: str, first: str, rest: str) -> str:
        return wrapped(text, width, first=first, rest=rest)

    for line, part in explanation(resolution, table, device.dtypes, usable=usable, wrap=wrap):
        shown = Text(line, style=styles.get(part, ""))
        if part == "head":
            shown.stylize("bold", 0, len(resolution.op))
        console.print(shown, soft_wrap=True)
