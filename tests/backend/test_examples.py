"""The examples of the library on every accelerator that is present: the losses of plain torch."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
from example_loops import CASES, EXAMPLES
from layouts.results import LIMITS, common_folder, once
from suite import warm
from suite.warm import WarmPopen

from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.store import local_run_env

PROGRAM = Path(sys.modules["example_loops"].__file__ or "")
RUNNABLE = [
    case for case, (name, _, _) in CASES.items()
    if not name.endswith("llama") or importlib.util.find_spec("transformers") is not None
]  # fmt: skip
ELSEWHERE = {"abs": 1e-5, "rel": 0}
"""Limit of the difference from the host's float32 losses on another device."""
KERNELS = {"abs": 1e-4, "rel": 0}
"""The same with other kernels in the model."""
LIMIT_SECONDS = 100

Losses = dict[str, tuple[str, list[float]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Losses]]:
    """Return a function that runs all cases on some processes, and returns the losses of each."""
    if len(RUNNABLE) == len(CASES):
        warm.preload("transformers.models.llama.modeling_llama")

    def make(device: str, size: int, *, plain: bool = False) -> list[Losses]:
        kind = "plain" if plain else device
        folder = common_folder(tmp_path_factory, f"examples-{kind}-{size}")
        with once(folder) as is_first:
            if is_first:
                run_ranks(device, size, folder, plain=plain)
        files = [folder / f"{rank}.json" for rank in range(size)]
        return [json.loads(file.read_text("utf-8")) for file in files]

    return make


def run_ranks(device: str, size: int, folder: Path, *, plain: bool) -> None:
    """Write the losses of all cases to a file of each rank."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LMCORE_")}
    paths = [str(PROGRAM.parent), *filter(None, [kept.get("PYTHONPATH")])]
    common = {
        **kept,
        **local_run_env(),
        "PYTHONPATH": os.pathsep.join(paths),
        "LMCORE_DEVICE": device,
        "LMCORE_SIM_MISSING_WAIT": "error",  # a stream that does not wait for another one
        "PLAIN": "1" if plain else "",
    }
    processes = [
        WarmPopen(
            [sys.executable, str(PROGRAM), str(folder), *RUNNABLE],
            stdout=PIPE,
            stderr=STDOUT,
            text=True,
            cwd=folder,
            env=common | RankInfo(rank, rank, size, size).to_env(),
        )
        for rank in range(size)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=LIMIT_SECONDS)
            assert process.returncode == 0, output
            assert "UserWarning" not in output
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("loop", CASES)
def test_losses_are_those_of_plain_torch(
    accelerator: Any, run: Callable[..., list[Losses]], loop: str, size: int
) -> None:
    """Bit for bit in one process on the host, within the layouts' limit in two."""
    if loop not in RUNNABLE:
        pytest.skip("transformers is not installed")
    on_host = accelerator.device.type == "cpu"
    count = accelerator.selection.probe.count
    if size > count and not on_host:
        pytest.skip(f"needs {size} devices, and there is {count}")
    expected = run("cpu", size, plain=True)
    found = run(accelerator.selection.plugin, size)
    for theirs, ours in zip(expected, found, strict=True):
        (_, right), (kind, losses) = theirs[loop], ours[loop]
        assert kind == accelerator.device.type
        assert len(losses) > 3
        assert losses[-1] < losses[0]
        if "kernels" in loop:
            assert losses == pytest.approx(right, **KERNELS)
        elif not on_host:
            assert losses == pytest.approx(right, **ELSEWHERE)
        elif size == 1:
            assert losses == right
        else:
            assert losses == pytest.approx(right, rel=LIMITS["fp32"].loss, abs=0)


def test_every_example_is_tried() -> None:
    """An example that is added is tried here, too."""
    scripts = {
        path.relative_to(EXAMPLES).with_suffix("").as_posix()
        for path in EXAMPLES.rglob("*.py")
        if not path.stem.endswith("_before")
    }
    assert {name for name, _, _ in CASES.values()} == scripts
