"""What `device_suite.py` shows when it is done: a table, and a report that may leave the machine.

The report has what was measured and what failed, with versions, device and date.  Names of the
machine and of its user, and the paths of what is installed there, are taken out of it.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import platform
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from device_loops import shape_of

if TYPE_CHECKING:
    from device_suite import Case, Suite

__all__ = ["write_report"]


def write_report(suite: Suite, results: Mapping[str, Any], out: Path) -> str:
    """Write OUT/report.json and OUT/report.md, without what is private; return the latter."""
    results = without_names(results)
    text = json.dumps(results, indent=1) + "\n"
    (out / "report.json").write_text(text, encoding="utf-8")
    page = f"{_head(suite, results)}\n\n{table(suite, results)}\n"
    (out / "report.md").write_text(page, encoding="utf-8")
    return f"{page}\nto send: {out / 'report.json'} and {out / 'report.md'}"


def without_names(value: Any) -> Any:
    """Return *value* without names of this machine, its user and its folders, in all its texts."""
    if isinstance(value, Mapping):
        return {without_names(key): without_names(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_names(one) for one in value]
    if not isinstance(value, str):
        return value
    for text, instead in _private():
        value = re.sub(rf"(?<!\w){re.escape(text)}(?!\w)", instead, value)
    return value


def _private() -> list[tuple[str, str]]:
    """Return what a report must not have, longest first, and what stands for it."""
    folders = {
        str(Path.cwd()): ".",
        str(Path(__file__).resolve().parents[1]): ".",
        sys.prefix: "PREFIX",
        tempfile.gettempdir(): "TMP",
        str(Path.home()): "~",
    }
    names = {platform.node(): "HOST"}
    with contextlib.suppress(KeyError, OSError):  # a container may have no name for its user
        names[getpass.getuser()] = "USER"
    found = {text: instead for text, instead in (folders | names).items() if len(text) > 2}
    return sorted(found.items(), key=lambda one: -len(one[0]))


def _head(suite: Suite, results: Mapping[str, Any]) -> str:
    """Return the lines before the table: what ran on what, and whether it passed."""
    what = results.get("what", {})
    versions = ", ".join(f"{name} {one}" for name, one in results.get("versions", {}).items())
    lines = [f"# lmcore on `{suite.device}`: {what.get('name', 'device unknown')}", ""]
    lines += [f"{results.get('date', '')}; {versions}"]
    if facts := what.get("facts"):
        lines += ["", f"device: {json.dumps(facts)}"]
    lines += ["", "| part | result |", "| - | - |"]
    found = results.get("conformance")
    if found:
        reached = ", ".join(found.get("reached") or []) or "none"
        failed = ", ".join(found.get("failed", []))
        failed = f"failed: {failed}" if failed else "no check failed"
        lines.append(f"| conformance | levels reached: {reached}; {failed} |")
    if found := results.get("tests"):
        last = found["tail"].strip().splitlines()[-1] if found["tail"].strip() else ""
        lines.append(f"| tests | {last.strip('= ') or found['status']} |")
    for name in ("curves", "matmul", "doctor", "plugins"):
        if (found := results.get(name)) is not None:
            short = {key: one for key, one in found.items() if key != "tail"}
            lines.append(f"| {name} | {json.dumps(short)} |")
    return "\n".join(lines)


def table(suite: Suite, results: Mapping[str, Any]) -> str:
    """Return the speed table in Markdown, with what each goal asks."""
    ceiling = results.get("matmul", {}).get("flops")
    lines = ["| model | tok/s | MFU | of matmul | / bare | / peer | first step | GiB | goals |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for case in suite.cases:
        found = results.get(f"speed.{case.model}")
        ours = found["lmcore"] if found else {"failed": "not run"}
        if why := ours.get("failed") or ours.get("left_out"):
            lines.append(f"| {case.model} | {why[:120]} | | | | | | | |")
            continue
        lines.append(_row(suite, case, found or {}, ours, ceiling))
    return "\n".join(lines)


def _row(
    suite: Suite,
    case: Case,
    found: Mapping[str, Any],
    ours: Mapping[str, Any],
    ceiling: float | None,
) -> str:
    shape = shape_of(case.model, case.micro_batch_size)
    rate = ours["tokens_per_second"]

    def over(name: str) -> float | None:
        seconds = found.get(name, {}).get("seconds")
        return rate * seconds / shape.tokens if seconds else None

    flops = _flops(shape) * rate / shape.seq_length
    mfu = flops / suite.peak if suite.peak else ours["mfu"]
    measured = {"tokens_per_second": rate, "mfu": mfu, "ratio_of_peer": over("transformers")}
    verdicts = []
    for name, goal in case.goals.items():
        value = measured[name]
        met = "not measured" if value is None else "met" if value >= goal else "missed"
        verdicts.append(f"{name} >= {goal:g}: {met}")
    cells = [
        case.model,
        f"{rate:,.0f}",
        _percent(mfu),
        _percent(flops / ceiling if ceiling else None),
        _ratio(over("bare")),
        _ratio(over("transformers")),
        f"{ours['first_step_seconds']:.1f} s",
        f"{(ours['peak_memory_bytes'] or 0) / 2**30:.1f}",
        "; ".join(verdicts),
    ]
    return f"| {' | '.join(cells)} |"


def _flops(shape: Any) -> float:
    """Return the model FLOPs of a sample, forward and backward, as lmcore's MFU counts them."""
    from lmcore.config.section import ModelSection
    from lmcore.config.size import flops_per_step

    section = ModelSection(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        seq_length=shape.seq_length,
    )
    return flops_per_step(section, shape.vocab_size, 1)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
