"""Generate the reference of the conformance suite: its checks, and our plugins' levels.

    python docs/generate_conformance.py                  # writes docs/reference/conformance.md
    python docs/generate_conformance.py --record FILE    # first keeps a report, as JSON

`plugins/conformance/tests/test_reference_page.py` compares what this makes with the file.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcore_conformance import SUITE_VERSION
from lmcore_conformance.contribution_report import contribution_lines
from lmcore_conformance.registry import LEVELS, Check, all_checks
from lmcore_conformance.requirements import REQUIREMENTS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reference/conformance.md"
RESULTS = ROOT / "plugins/conformance/results"
PLUGINS = ("cpu", "sim", "cuda", "xpu")
_NOTE = "<!-- Made by `python docs/generate_conformance.py`; do not edit. -->"

_ABOUT = f"""\
`lmcore-conformance` tests everything that a run needs of an accelerator plugin. This page describes
version {SUITE_VERSION}.

```sh
python -m pytest --pyargs lmcore_conformance --accelerator mychip
```

Every check belongs to a level. A level is reached if each of its checks has passed or is a gap
that is declared for one of its requirements; it is reached in part if an author declares a check
itself as a gap. A level whose checks are all gaps is not claimed. The report has the share of
checks that are claimed, so that a plugin that passes by claiming nothing is recognised.

A run on a device also binds the kernels, communication backends and policies of installed plugins
without a device; these are tried with the device, and the report names the plugin of each.
`--accelerator mychip --with myops` tries exactly these two plugins, and `--plugin myops` the offers
of a plugin without a device alone, on each device that is present. Levels whose checks touch
nothing of such a plugin are not applicable; a level is reached if the checks that apply have
passed. [How to check a plugin](../how-to/check-a-plugin.md#try-what-is-bound) lists the checks of
each kind of offer.

`--shapes-of NAME` adds checks of the ops at the shapes of your own configuration: a preset, a run
directory or a settings file. The sizes are those of one rank and one micro-batch, in the precision
of the run. Kernels compute the whole call; some rows of the result, and all gradients, are compared
with float64. On the CPU this takes minutes.

```sh
python -m pytest --pyargs lmcore_conformance --accelerator mychip --shapes-of llama-1b -k shapes
```

A check that crashes or hangs fails with its position in the code, and the other checks continue in
a new process. A check hangs if its main thread stays in the same functions for 20 seconds;
`--patience` multiplies the limit for a slow device. [The suite's
README](../../plugins/conformance/README.md) has the options, the exit status and how a plugin's own
tests use the suite."""

_ABOUT_REQUIREMENTS = """\
Abilities that a device may lack. An author declares a missing ability in `conformance.toml`, with
the reason, as `[closed]` (missing) or `[depends]` (depends on the hardware). An ability that is
neither offered nor declared is a failure, and so is a closed ability that is offered.

A check can be closed by its id as well, in quotes: `"device.serialization" = "the reason"` under
`[closed]`. Its level is then reached in part. [How to check a
plugin](../how-to/check-a-plugin.md#declare-what-is-missing) has an example."""

_ABOUT_LEVELS = {
    "L0": "In separate processes, without torch until the device is created; `--levels L0` needs "
    "no device. `lmcore plugin check` makes the same checks.",
    "L1": "The device without a model; if there are several devices, the first and the last one.",
    "L2": "Every kernel of the plugin and every reference on the device, in every dtype of the "
    "device, compared with the reference in float64 on the host, with the op's "
    "[tolerances](ops.md). Head dims and widths of published models, and wider rows, are tried in "
    "the first dtype and one half precision, calls of over 16,384 rows and 2^22 elements "
    "in float32 and bfloat16.",
    "L3": "A GPT of two layers, trained by the core; and loops of a user's own on the "
    "[library](library.md), small forms of the [examples](../../examples/library).",
    "L4": "Two processes, each with its own device (on one host or two).",
    "L5": "Features that are optional for a run.",
}

_ABOUT_PROVES = """\
A level is a statement about one device type, one machine and the versions in the report's head:
other generations of the hardware, drivers and versions of torch need a run of their own."""

_PROVES = {
    "L0": (
        (
            "The plugin can be found, imported without torch and called; each hook returns "
            "what the contract requires, and leaves the process and torch as they are; it imports "
            "only public names of lmcore."
        ),
        ("Numbers: nothing is computed. Hooks of a device that is absent here."),
    ),
    "L1": (
        (
            "On the first and on the last device: tensors survive copies, products in every "
            "claimed dtype are right, random numbers are repeatable and have the right "
            "distribution, memory figures follow the tensors, and each kind of wait waits."
        ),
        (
            "Faults that depend on time, heat or long use; memory beyond what the checks "
            "allocate; an error of order that is rarer than the repetitions; peak rates and "
            "names of devices, which are only plausible."
        ),
    ),
    "L2": (
        (
            "Each kernel that was tried agrees with its reference in float64, forward and "
            "backward, for small, odd, empty, strided and large arguments, and hides no NaN."
        ),
        (
            "Arguments that no check has, such as a model's exact sizes without `--shapes-of`; "
            "kernels that reject every case (`ops.reached` names them); speed."
        ),
    ),
    "L3": (
        (
            "The core trains a small GPT on one device with the losses of the host, in every "
            "precision that is offered, with all products in the promised dtype; "
            "recomputation, checkpoints and resumed runs are right bit for bit. Loops that the "
            "core has never seen (a bare loop, a transformer, a convolution network) have the "
            "losses of plain torch, so that the examples of the library run."
        ),
        (
            "Convergence of a large model; long sequences; the hours after step 20; ops of torch "
            "that these models lack."
        ),
    ),
    "L4": (
        (
            "Two processes exchange tensors rightly and train in each layout with the steps "
            "of one process, by `lmcore train` and in a user's own loop; a missed collective ends "
            "the run."
        ),
        (
            "More than two ranks; several hosts, unless the run had them; bandwidth, and "
            "faults of a network."
        ),
    ),
    "L5": (
        ("The features that are offered work for a small model."),
        ("Gains: a graph that is right, or a profiler that shows something, need not be fast."),
    ),
}

_ABOUT_FAITH = """\
No level proves good faith: the plugin runs in the process of its checks, and a plugin that
recognises the suite can behave differently in a run. Speed is measured by `benchmarks/`, not by
the suite."""

_ABOUT_PLUGINS = """\
Results of the last recorded runs, with their versions. Checks that were not run are not claimed."""


def page() -> str:
    """Return the whole reference."""
    checks = all_checks()
    rows = [(f"{level} {name}", *_PROVES[level]) for level, name in LEVELS.items()]
    proves = _table(("level", "it proves", "it cannot prove"), rows)
    parts = ["# Conformance", _NOTE, _ABOUT]
    parts += ["## What a level proves", _ABOUT_PROVES, proves, _ABOUT_FAITH]
    parts.append((RESULTS / "wrong_plugins.md").read_text(encoding="utf-8").strip())
    parts += ["## Levels of our plugins", _ABOUT_PLUGINS]
    parts += [_plugin(name) for name in PLUGINS]
    parts += ["## Requirements", _ABOUT_REQUIREMENTS, _requirements(checks)]
    optional = [one for one in all_checks("--shapes-of") if one.option]
    for level, name in LEVELS.items():
        own = [one for one in checks if one.level == level]
        more = [one for one in optional if one.level == level]
        also = f", and {len(more)} with `--shapes-of`" if more else ""
        parts.append(f"## {level} {name}\n\n{_ABOUT_LEVELS[level]} {len(own)} checks{also}.")
        own += more
        rows = [
            (f"`{one.id}`", one.title, one.reason, ", ".join(f"`{r}`" for r in one.requires))
            for one in own
        ]
        parts.append(_table(("check", "behaviour", "reason", "requires"), rows))
    return "\n\n".join(parts) + "\n"


def _plugin(name: str) -> str:
    file = RESULTS / f"{name}.json"
    reasons = tomllib.loads((RESULTS / "not_run.toml").read_text(encoding="utf-8"))
    if not file.is_file():
        return f"### `{name}`\n\nNot run: {reasons[name]}."
    found = json.loads(file.read_text(encoding="utf-8"))
    versions, plugin = found["versions"], found["plugin"]
    about = (
        f"{found['date']}, {found['machine']}; {plugin['distribution']} {plugin['version']}, suite "
        f"{versions['suite']}, lmcore {versions['lmcore']}, torch {versions['torch']}, "
        f"Python {versions['python']}."
    )
    rows = []
    for one in found["levels"]:
        figures = (one[part] for part in ("checks", "passed", "failed", "gaps", "not_run"))
        level = f"{one['level']} {one['name']}"
        claimed = "" if one["not_run"] == one["checks"] else f"{one['claimed']:.0%}"
        rows.append((level, *map(str, figures), claimed, one["verdict"]))
    head = ("level", "checks", "passed", "failed", "gaps", "not run", "claimed", "verdict")
    parts = [f"### `{name}`", about, _table(head, rows)]
    brought = list(contribution_lines(found.get("plugins", ())))
    if brought:
        parts.append("\n".join(["```text", *brought[1:], "```"]))
    parts += [
        f"{one['level']} is {one['verdict']}: {_codes(one['left'])} not run."
        for one in found["levels"]
        if one.get("left")
    ]
    if name in reasons:
        parts.append(f"What was not run: {reasons[name]}.")
    if found["gaps"]:
        rows = [(f"`{gap}`", reason) for gap, reason in sorted(found["gaps"].items())]
        parts.append(_table(("declared", "reason"), rows))
    if found["failed"]:
        rows = [(f"`{check}`", detail) for check, detail in found["failed"].items()]
        parts.append(_table(("failed", "what was found"), rows))
    parts.append(f"> {found['badge']}")
    return "\n\n".join(parts)


def _codes(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _requirements(checks: Sequence[Check]) -> str:
    rows = []
    for name, one in REQUIREMENTS.items():
        count = sum(name in check.requires for check in checks)
        rows.append((f"`{name}`", one.summary, str(count)))
    return _table(("requirement", "ability", "checks"), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("-" for _ in head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def trimmed(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return of a report what the page shows."""
    kept = {name: report[name] for name in ("plugin", "versions", "date", "machine", "levels")}
    failed = {one["id"]: one["detail"] for one in report["checks"] if one["status"] == "failed"}
    more = {"gaps": report["gaps"], "failed": failed, "badge": report["badge"]}
    return {**kept, **more, "plugins": report["plugins"]}


def main() -> None:
    """Record a report, if one is given, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.record:
        report = json.loads(given.record.read_text(encoding="utf-8"))
        file = RESULTS / f"{report['plugin']['name']}.json"
        file.write_text(json.dumps(trimmed(report), indent=2) + "\n", encoding="utf-8")
        print(f"wrote {file.relative_to(ROOT)}")
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
