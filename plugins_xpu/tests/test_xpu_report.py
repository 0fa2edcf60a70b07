"""The report that `benchmarks/xpu.py` writes to be sent: all of the results, nothing private."""

from __future__ import annotations

import getpass
import importlib
import json
import platform
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """Function that imports a script of the folder of benchmarks."""
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
    "curves": {"within": True, "furthest_of_ten": 0.001, "last": 3.0, "limit": 0.02},
    "speed.gpt2-124m": {
        "lmcore": {
            "tokens_per_second": 20000.0,
            "mfu": 0.31,
            "first_step_seconds": 12.0,
            "peak_memory_bytes": 5 << 30,
        },
        "restart": {"seconds": 9.5},
        "bare": {"seconds": 0.4},
        "transformers": {"seconds": 0.41},
        "accelerate": {"seconds": 0.5},
        "fabric": {"missing": "No module named 'lightning_fabric'"},
    },
    "graph": {
        "model": "gpt2-124m",
        "samples": {"1": {"ratio": 1.536}, "4": {"failed": "status 1: cannot be recorded"}},
    },
    "speed.gpt2-345m": {"lmcore": {"failed": "status 1: out of memory"}},
    "speed.gpt-1.7b": {"lmcore": {"left_out": "it needs 40 GiB, there are 12"}},
}


def test_the_report_has_every_result(scripts, tmp_path):
    """Device, versions, levels, failed checks, and a row for each model, measured or not."""
    suite = scripts("device_suite")
    bounds = {"least": {"ratio_of_bare": 0.99}, "most": {"warm_start_seconds": 5.0}}
    planned = suite.Suite("xpu", "bf16", None, scripts("xpu").CASES, **bounds)
    shown = scripts("device_report").write_report(planned, RESULTS, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == RESULTS
    page = (tmp_path / "report.md").read_text()
    assert page in shown
    for text in (
        "# lmcore on `xpu`: Intel(R) Arc(TM) B580 Graphics",
        "2026-11-21; torch 2.13.0+xpu",
        "| conformance | levels reached: L0, L1; failed: train.processes |",
        "| tests | 421 passed in 18.30s |",
        "0.0010 apart, within 0.02",
        "| gpt2-124m, 1 at a time 1.54 times as fast, 4 at a time status 1: cannot be recorded |",
        "| gpt2-124m | 20,000 | 31.0% |  | 0.98 | transformers 1.00, accelerate 1.22 |",
        "| 12.0 s | 9.5 s | 5.0 | ratio_of_peer >= 1: met; ratio_of_bare >= 0.99: missed; ",
        "warm_start_seconds <= 5: missed |",
        "- gpt2-124m, fabric: No module named 'lightning_fabric'",
        "| gpt2-345m | status 1: out of memory |",
        "| gpt-1.7b | it needs 40 GiB, there are 12 |",
    ):
        assert text in page, page


def test_the_report_names_nobody(scripts, tmp_path, monkeypatch):
    """Names of host and user, and folders of home and installation, are taken out."""
    monkeypatch.setattr(platform, "node", lambda: "nid001234")
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe")
    monkeypatch.setenv("HOME", "/lus/home/jdoe")
    text = f"/lus/home/jdoe/runs on nid001234 as jdoe: {sys.prefix}/bin, {Path.cwd()}/x, doer"
    cleaned = scripts("device_report").without_names({"a": [text], "jdoe": 1})
    assert cleaned == {"a": ["~/runs on HOST as USER: PREFIX/bin, ./x, doer"], "USER": 1}


def test_a_device_of_little_memory_leaves_models_out(scripts, tmp_path, monkeypatch):
    """A model's needs are compared with the device's memory before anything is started."""
    suite = scripts("device_suite")
    planned = suite.Suite("xpu", "bf16", None, scripts("xpu").CASES)
    with scripts("device_run").Runner(planned, tmp_path, 100) as runner:
        runner.results["what"] = {"memory": 4 << 30}
        monkeypatch.setattr(runner, "answer", lambda *_, **__: {"flops": 1e12})
        scripts("device_speed").speed(runner)
    rows = [value for name, value in runner.results.items() if name.startswith("speed.")]
    assert len(rows) == len(planned.cases)
    assert all("left_out" in row["lmcore"] for row in rows)


def test_the_time_that_ends_leaves_out_contenders(scripts, tmp_path, monkeypatch):
    """Every model is measured by one contender before the next one comes to the first of them."""
    cases = scripts("xpu").CASES
    planned = scripts("device_suite").Suite("xpu", "bf16", None, cases)
    speed = scripts("device_speed")
    order = []
    monkeypatch.setattr(
        speed, "_measured", lambda _, case, name: order.append((name, case.model)) or {}
    )
    with scripts("device_run").Runner(planned, tmp_path, 100, ["lmcore", "bare"]) as runner:
        monkeypatch.setattr(runner, "answer", lambda *_, **__: {"flops": 1e12})
        speed.speed(runner)
    assert order == [(name, case.model) for name in ("lmcore", "bare") for case in cases]


def test_a_part_that_takes_too_long_is_ended_with_all_it_started(scripts, tmp_path):
    """The output of a stopped part is kept; its child process does not keep the device."""
    planned = scripts("device_suite").Suite("xpu", "bf16", None, ())
    pid = tmp_path / "pid"
    script = f"echo begun; sleep 600 & echo $! >{pid}; wait"
    with scripts("device_run").Runner(planned, tmp_path / "out", 100) as runner:
        status, text = runner.process(["sh", "-c", script], "slow", seconds=1.0)
        assert (status, text) == (None, "begun\n")
        end = time.monotonic() + 30
        while runs(int(pid.read_text())) and time.monotonic() < end:
            time.sleep(0.02)
        assert not runs(int(pid.read_text()))
    assert (tmp_path / "out" / "logs.tar.gz").stat().st_size > 0


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
