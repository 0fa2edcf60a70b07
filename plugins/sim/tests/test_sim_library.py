"""The examples of the library on two simulated devices: the losses of two processes on the CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from suite.warm import WarmPopen

from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.store import local_run_env

RUN = Path(__file__).with_name("library_run.py")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples/library"
TEXT = "To be, or not to be, that is the question:\n" * 40
OPTIONS: dict[str, dict[str, Any]] = {
    "bare_loop": {"epochs": 1},
    "character_gpt": {"text": TEXT, "steps": 4, "length": 32},
    "convolution": {"epochs": 1},
    "finetune_llama": {"text": TEXT, "steps": 4, "length": 32},
}
LIMIT_SECONDS = 100


def losses(name: str, device: str, environment: dict[str, str], folder: Path) -> list[list[float]]:
    """Return the losses of each of two ranks on a device."""
    file, together = folder / device, local_run_env()
    command = [sys.executable, str(RUN), name, json.dumps(OPTIONS[name]), str(file)]
    processes = [
        WarmPopen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={
                **environment,
                **together,
                **RankInfo(rank, rank, 2, 2).to_env(),
                "LMCORE_DEVICE": device,
            },
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=LIMIT_SECONDS)
            assert process.returncode == 0, output
            assert "UserWarning" not in output
    finally:
        for process in processes:
            process.kill()
    found = [json.loads(Path(f"{file}{rank}").read_text("utf-8")) for rank in range(2)]
    assert [kind for kind, _ in found] == [device] * 2
    return [values for _, values in found]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_losses_are_those_of_the_cpu(
    name: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """Two processes, each with a device, to 1e-5 in float32."""
    if name == "finetune_llama" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    expected = losses(name, "cpu", environment, tmp_path)
    found = losses(name, "sim", environment, tmp_path)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5, rel=0)
    assert all(len(series) > 3 and series[-1] < series[0] for series in found)


def test_every_example_is_tried() -> None:
    """An example that is added is tried here, too."""
    assert sorted(OPTIONS) == sorted(path.stem for path in EXAMPLES.glob("*.py"))
