"""The report that `benchmarks/xpu.py` writes to be sent: all of the results, nothing private."""

from __future__ import annotations

import getpass
import importlib
import json
import platform
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """What imports a script of the folder of benchmarks."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == BENCHMARKS:
            del sys.modules[name]


RESULTS = {
    "date": "2026-11-21",
    "versions": {"torch": "2.13.0+xpu"},
    "what": {"name": "Intel(R) Arc(TM) B580 Graphics", "facts": {"driver": "1.6"}},
    "conformance": {"status": 1, "reached": ["L0", "L1"], "failed": ["train.processes"]},
    "tests": {"status": 0, "tail": "...\n=== 421 passed in 18.30s ==="},
    "curves": {"within": True},
    "speed.gpt2-124m": {
        "lmcore": {
            "tokens_per_second": 20000.0,
            "mfu": 0.31,
            "first_step_seconds": 12.0,
            "peak_memory_bytes": 5 << 30,
        },
        "bare": {"seconds": 0.4},
    },
    "speed.gpt2-345m": {"lmcore": {"failed": "status 1: out of memory"}},
    "speed.gpt-1.7b": {"lmcore": {"left_out": "it needs 40 GiB, there are 12"}},
}


def test_the_report_has_every_result(scripts, tmp_path):
    """Device, versions, levels, failed checks, and a row for each model, measured or not."""
    suite = scripts("device_suite")
    asked = suite.Suite("xpu", "bf16", None, scripts("xpu").CASES)
    shown = scripts("device_report").write_report(asked, RESULTS, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == RESULTS
    page = (tmp_path / "report.md").read_text()
    assert page in shown
    for text in (
        "# lmcore on `xpu`: Intel(R) Arc(TM) B580 Graphics",
        "2026-11-21; torch 2.13.0+xpu",
        "| conformance | levels reached: L0, L1; failed: train.processes |",
        "| tests | 421 passed in 18.30s |",
        "| gpt2-124m | 20,000 | 31.0% |  | 0.98 |",
        "| gpt2-345m | status 1: out of memory |",
        "| gpt-1.7b | it needs 40 GiB, there are 12 |",
    ):
        assert text in page, page


def test_the_report_names_nobody(scripts, tmp_path, monkeypatch):
    """Names of host and user, the home folder and those of the installation are taken out."""
    monkeypatch.setattr(platform, "node", lambda: "nid001234")
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe")
    monkeypatch.setenv("HOME", "/lus/home/jdoe")
    text = f"/lus/home/jdoe/runs on nid001234 as jdoe: {sys.prefix}/bin, {Path.cwd()}/x, doer"
    cleaned = scripts("device_report").without_names({"a": [text], "jdoe": 1})
    assert cleaned == {"a": ["~/runs on HOST as USER: PREFIX/bin, ./x, doer"], "USER": 1}


def test_a_device_of_little_memory_leaves_models_out(scripts, tmp_path, monkeypatch):
    """What a model needs is compared with what the device has, before anything is started."""
    suite = scripts("device_suite")
    asked = suite.Suite("xpu", "bf16", None, scripts("xpu").CASES)
    runner = suite.Runner(asked, tmp_path, 100)
    runner.results["what"] = {"memory": 4 << 30}
    monkeypatch.setattr(runner, "answer", lambda *_, **__: {"flops": 1e12})
    suite.speed(runner)
    rows = [value for name, value in runner.results.items() if name.startswith("speed.")]
    assert len(rows) == 3
    assert all("left_out" in row["lmcore"] for row in rows)
