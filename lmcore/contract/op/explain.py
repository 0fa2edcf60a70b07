"""Explanation of the choice of a kernel: the case, the kernel, and the reason against each other.

`lmcore ops explain` prints it, and `OpCalls.explain` returns it.  Torch-free.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from lmcore.contract.op.context import attribute_options
from lmcore.contract.op.records import REFERENCE, OpContext, Resolution

if TYPE_CHECKING:
    from lmcore.contract.op.table import OpTable

__all__ = ["Line", "Wrap", "explanation", "kernel_rows"]

Line = tuple[str, str]
"""Line of text, and its part in the explanation: "head", "chosen", "dim" or ""."""

Wrap = Callable[[str, str, str], str]
"""Function that wraps a text; arguments: text, prefix of the first line, prefix of other lines."""


def _filled(text: str, first: str, rest: str) -> str:
    return textwrap.fill(
        text, 120, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def explanation(
    resolution: Resolution,
    table: OpTable,
    dtypes: Collection[str],
    *,
    usable: bool = True,
    wrap: Wrap = _filled,
) -> Iterator[Line]:
    """Yield the lines that explain a choice.

    Args:
        resolution: The choice.
        table: Op table that made it.
        dtypes: Names of the dtypes that the device computes in.
        usable: False if the chosen kernel cannot be loaded, or `--strict-ops` refuses it.
        wrap: Function that wraps long lines.
    """
    case = resolution.context
    yield f"{resolution.op} on {case.device_type}, {case.dtype}", "head"
    for line in _case_lines(resolution, table, dtypes):
        yield wrap(line, "  ", "    "), ""
    yield "", ""
    reasons = dict(resolution.rejected)
    head_row, *rows = kernel_rows(resolution.op, table)
    yield f"  {head_row}", "dim"
    names = [*(impl.id for impl in table.candidates(resolution.op)), REFERENCE]
    for row, name in zip(rows, names, strict=True):
        chosen = name == resolution.chosen
        yield f"{'*' if chosen else ' '} {row}", "chosen" if chosen else ""
        text = _why_chosen(resolution, usable=usable) if chosen else reasons[name]
        yield wrap(text, " " * 6, " " * 6), "" if chosen else "dim"


def kernel_rows(op: str, table: OpTable) -> list[str]:
    """Return a line of headings, one for each kernel in their order, and the reference's."""
    cells = [("kernel", "plugin", "priority", "traits")]
    cells += [
        (impl.id, impl.plugin, str(impl.priority), ", ".join(sorted(impl.traits)))
        for impl in table.candidates(op)
    ]
    cells.append((REFERENCE, "lmcore", "", "reference implementation"))
    widths = [max(len(row[at]) for row in cells) for at in range(4)]
    return [
        f"{name:<{widths[0]}}  {plugin:<{widths[1]}}  {priority:>{widths[2]}}  {traits}".rstrip()
        for name, plugin, priority, traits in cells
    ]


def _case_lines(resolution: Resolution, table: OpTable, dtypes: Collection[str]) -> list[str]:
    """Return the attributes of the case, and the attributes without a value."""
    case: OpContext = resolution.context
    names = table.specs[resolution.op].attributes
    given = ", ".join(
        f"{name} {_value_text(case.attributes[name])}" for name in names if name in case.attributes
    )
    # A case without a bias does not name it: cases of earlier versions stay the same.
    silent = {"score_bias", "score_bias_gradient"}
    left_open = [name for name in names if name not in silent | case.attributes.keys()]
    lines = [given] if given else []
    if left_open:
        flags = ", ".join(attribute_options()[name].flag for name in left_open)
        lines.append(f"not specified: {flags}")
    if case.dtype not in dtypes:
        lines.append(f"device `{case.device_type}` does not compute in {case.dtype}")
    return lines


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _why_chosen(resolution: Resolution, *, usable: bool) -> str:
    if not usable and resolution.chosen == REFERENCE:
        return "no kernel supports this case, and --strict-ops refuses the reference"
    if not usable:
        return "would be chosen, and cannot be used"
    return {
        "preference": "chosen: preferred by --ops",
        "priority": "chosen: highest priority among the kernels that support this case",
        "tie": "chosen: of equal priority with another that supports this case, and goes first",
    }.get(resolution.source, "chosen: no kernel supports this case")
