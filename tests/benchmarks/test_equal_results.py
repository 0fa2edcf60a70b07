"""The comparison of two versions' results: equal runs pass it, and a changed result is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "equal_results.py"
pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the script on one configuration."""
    command = [sys.executable, str(SCRIPT), *map(str, arguments), "--only", "fp32"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_equal_runs_and_a_changed_result(tmp_path: Path) -> None:
    """Recorded and resumed runs are equal; a changed loss and changed tensors are reported."""
    before, after = tmp_path / "before", tmp_path / "after"
    for command in (("record", before), ("record", after), ("resume", before)):
        done = run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    assert run("compare", before, after).returncode == 0
    for step in (6, 12):  # a version that writes more into a manifest
        manifest = after / "fp32" / "checkpoints" / f"iter_{step:07}" / "manifest.json"
        content = json.loads(manifest.read_text(encoding="utf-8"))
        content["meta"]["new"] = 1
        manifest.write_text(json.dumps(content), encoding="utf-8")
    assert run("compare", before, after).returncode == 0
    path = after / "fp32" / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[3] = json.dumps(json.loads(lines[3]) | {"loss": 1.0})
    path.write_text("\n".join(lines), encoding="utf-8")
    done = run("compare", before, after)
    assert done.returncode == 1
    assert "losses differ" in done.stdout
    assert "'step': 4" in done.stdout
    path.write_bytes((before / "fp32" / "metrics.jsonl").read_bytes())
    checkpoints = after / "fp32" / "checkpoints"
    shutil.rmtree(checkpoints / "iter_0000012")
    shutil.copytree(checkpoints / "iter_0000006", checkpoints / "iter_0000012")
    done = run("compare", before, after)
    assert done.returncode == 1
    assert "checkpoint 12: " in done.stdout
    assert "tensors entries differ: " in done.stdout
