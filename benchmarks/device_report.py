"""Output of `device_suite.py` at its end: a table, and a report that may leave the machine.

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from device_loops import PEERS, shape_of

if TYPE_CHECKING:
    from device_run import Case, Suite

__all__ = ["write_report"]


def write_report(suite: Suite, results: Mapping[str, Any], out: Path) -> str:
    """Write OUT/report.json and OUT/report.md, without what is private; return the latter."""
    results = without_names(results)
    text = json.dumps(results, indent=1) + "\n"
    (out / "report.json").write_text(text, encoding="utf-8")
    parts = [_head(suite, results), _kernels(results), _loops(suite, results)]
    page = "\n\n".join([*filter(None, parts), table(suite, results)]) + "\n"
    (out / "report.md").write_text(page, encoding="utf-8")
    return f"{page}\nto send: {out / 'report.json'} and {out / 'report.md'}"


def _kernels(results: Mapping[str, Any]) -> str:
    """Return the table of Triton's kernels as their script has printed it, as far as it came."""
    lines = results.get("triton kernels", {}).get("tail", "").splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


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
    """Return what a report must not have, longest first, with its replacement."""
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
    if note := results.get("note"):
        lines += ["", str(note)]
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
    if found := results.get("curves"):
        lines.append(f"| loss curves | {found.get('failed') or _curves(found)} |")
    if found := results.get("matmul"):
        rate = found.get("failed") or f"{found['flops'] / 1e12:,.4g} TFLOP/s"
        lines.append(f"| largest product | {rate} |")
    if found := results.get("graph"):
        lines.append(f"| steps from a record | {found.get('left_out') or _graph(found)} |")
    for name in ("doctor", "plugins", "kernels", "triton kernels", "profile"):
        if found := results.get(name):
            ended = {0: "done", None: "out of time"}.get(found.get("status"), "failed")
            lines.append(f"| {name} | {found.get('failed') or ended} |")
    return "\n".join(lines)


def _graph(found: Mapping[str, Any]) -> str:
    if failed := found.get("failed"):
        return str(failed)
    parts = []
    for size, one in found["samples"].items():
        result = one.get("failed") or f"{one['ratio']:.2f} times as fast"
        parts.append(f"{size} at a time {result[:120]}")
    return f"{found['model']}, {', '.join(parts)}"


def _curves(found: Mapping[str, Any]) -> str:
    verdict = "within" if found["within"] else "NOT within"
    return (
        f"means of ten losses of the device and of the CPU in float32 are at most "
        f"{found['furthest_of_ten']:.4f} apart, {verdict} {found.get('limit', 0)}; last "
        f"{found['last']:.3f}"
    )


def table(suite: Suite, results: Mapping[str, Any]) -> str:
    """Return the speed table in Markdown, with what each goal asks."""
    ceiling = results.get("matmul", {}).get("flops")
    heads = ("model", "tok/s", "MFU", "of largest product", "/ bare", "/ peer", "first step, cold")
    heads += ("first step, warm", "GiB", "goals")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in suite.cases:
        found = results.get(f"speed.{case.model}") or {}
        ours = found.get("lmcore", {"failed": "not run"})
        if why := ours.get("failed") or ours.get("left_out"):
            lines.append(f"| {case.model} | {why[:120]} | | | | | | | | |")
            continue
        lines.append(_row(suite, case, found, ours, ceiling))
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
    peers = {name: ratio for name in PEERS if (ratio := over(name)) is not None}
    again = found.get("restart", {}).get("seconds")
    measured = {
        "tokens_per_second": rate,
        "mfu": mfu,
        "ratio_of_peer": min(peers.values(), default=None),
        "ratio_of_bare": over("bare"),
        "warm_start_seconds": again,
    }
    cells = [
        case.model,
        f"{rate:,.0f}",
        _percent(mfu),
        _percent(flops / ceiling if ceiling else None),
        _ratio(over("bare")),
        ", ".join(f"{name} {ratio:.2f}" for name, ratio in peers.items()),
        f"{ours['first_step_seconds']:.1f} s",
        "" if again is None else f"{again:.1f} s",
        f"{(ours['peak_memory_bytes'] or 0) / 2**30:.1f}",
        "; ".join(_verdicts(suite, case, measured)),
    ]
    return f"| {' | '.join(cells)} |"


def _verdicts(suite: Suite, case: Case, measured: Mapping[str, float | None]) -> Iterator[str]:
    """Yield each goal with what became of it."""
    for name, goal in {**case.goals, **suite.least}.items():
        yield f"{name} >= {goal:g}: {_verdict(measured[name], goal, 1)}"
    for name, goal in suite.most.items():
        yield f"{name} <= {goal:g}: {_verdict(measured[name], goal, -1)}"


def _verdict(value: float | None, goal: float, sign: int) -> str:
    if value is None:
        return "not measured"
    return "met" if sign * value >= sign * goal else "missed"


def _loops(suite: Suite, results: Mapping[str, Any]) -> str:
    """Return what became of the loops beside lmcore that were not measured."""
    lines = []
    for case in suite.cases:
        for name, value in (results.get(f"speed.{case.model}") or {}).items():
            if why := value.get("missing") or (name != "lmcore" and value.get("failed")):
                lines.append(f"- {case.model}, {name}: {why[-200:]}")
    return "\n".join(lines)


def _flops(shape: Any) -> float:
    """Return the model FLOPs of a sample, forward and backward, as lmcore's MFU counts them."""
    from lmcore.config.derived.model_math import model_shape
    from lmcore.config.section import ModelSection
    from lmcore.model.family import family_of

    section = ModelSection(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        seq_length=shape.seq_length,
        **shape.values,
    )
    whole = model_shape(section, shape.vocab_size)
    return family_of(whole).forward_flops(whole, shape.seq_length).of_training()


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
