"""The sample report in the tutorial, compared with the checks of the suite."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lmcore_conformance.declaration import FILE_NAME, read_declaration
from lmcore_conformance.new_plugin.template import NewPlugin
from lmcore_conformance.new_plugin.template import render as files_of
from lmcore_conformance.registry import all_checks
from lmcore_conformance.report import make_report, render
from lmcore_conformance.result import Result, Status

ROOT = Path(__file__).resolve().parents[4]
TUTORIAL = ROOT / "docs" / "tutorial" / "write-a-plugin.md"


def test_the_sample_report_has_the_suites_numbers(tmp_path: Path) -> None:
    """The trial's declaration closes the stated number of checks, and all others pass."""
    files = files_of(NewPlugin("mychip", "cpu", "torch", "MIT", "Nobody", 2026))
    (text,) = (text for path, text in files.items() if path.endswith(FILE_NAME))
    (tmp_path / FILE_NAME).write_text(text, encoding="utf-8")
    checks = all_checks()
    declaration = read_declaration(tmp_path / FILE_NAME, checks)
    results = {
        check.id: Result(
            check.id, Status.GAP if declaration.why_closed(check) else Status.PASSED, "gloo"
        )
        for check in checks
    }
    record = SimpleNamespace(distribution="lmcore-mychip", version="0.1.0")
    target: Any = SimpleNamespace(name="mychip", record=record, device_type="cpu", alone=False)
    report = make_report(target, declaration, checks, results)
    lines = render(report)
    start = next(at for at, line in enumerate(lines) if line.startswith("level "))
    table = lines[start : lines.index("", start)]
    gaps = lines[lines.index("declared gaps:") :][:4]
    passed, skipped = (
        sum(level[key] for level in report.to_dict()["levels"]) for key in ("passed", "gaps")
    )
    page = TUTORIAL.read_text(encoding="utf-8")
    assert "\n".join(table) + "\n" in page
    assert "\n".join(gaps) + "\n" in page
    end = f"= {passed} passed, {skipped} skipped in ... ="
    assert re.search(rf"^{re.escape(report.badge)}\n=+{re.escape(end)}=+$", page, re.MULTILINE)
