"""Runs of `lmcore` on PJRT's CPU client, with the losses of the CPU; `tox -e xla` runs this."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.usefixtures("pjrt"), pytest.mark.timeout(900)]

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 4 "
    "--global-batch-size 8 --eval-iters 2 --sample-tokens 0 --precision fp32 --progress none "
    "--no-tensorboard --train-iters 6"
)


def lmcore(*arguments: str, device: str = "xla") -> str:
    """Run a command of lmcore and return its standard output."""
    env = {**os.environ, "PJRT_DEVICE": "CPU", "LMCORE_DEVICE": device}
    command = [sys.executable, "-m", "lmcore.cli.main", *arguments]
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(folder: Path, *more: str, device: str = "xla") -> list[float]:
    """Train the small model; return the loss of each step."""
    lmcore("train", *SMALL.split(), "--save", str(folder), *more, device=device)
    rows = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, rows) if "loss" in row]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, pjrt) -> tuple[Path, list[float]]:
    """A run of six steps, with dropout, and its losses."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, train(folder, "--hidden-dropout", "0.1")


def test_losses_are_those_of_the_cpu(tmp_path):
    found, expected = (train(tmp_path / name, device=name) for name in ("xla", "cpu"))
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] < found[0]


def test_a_resumed_run_has_the_losses_of_a_whole_one(whole, tmp_path):
    """Bit for bit, dropout included: a checkpoint is written at a boundary."""
    _, losses = whole
    dropout = ("--hidden-dropout", "0.1")
    train(tmp_path / "run", *dropout, "--exit-interval", "3", "--save-interval", "3")
    found = train(tmp_path / "run", *dropout, "--load", str(tmp_path / "run"))
    assert found[-3:] == losses[-3:]


def test_two_processes_have_the_losses_of_one(tmp_path):
    """Connected by gloo, as PJRT's CPU client does not connect them."""
    one, two = (train(tmp_path / count, "--nproc-per-node", count) for count in "12")
    assert two == pytest.approx(one, rel=1e-5)


def test_a_model_generates(whole):
    folder, _ = whole
    words = ("generate", "--load", str(folder), "--prompt", "once", "--tokens", "8", "--greedy")
    assert lmcore(*words) == lmcore(*words, device="cpu")


LOOP = """
import lmcore, torch

torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
samples = [(torch.randn(8), i % 3) for i in range(64)]
with lmcore.start(precision="fp32") as rt:
    model, optimizer = rt.prepare(model, optimizer)
    for x, y in rt.loader(torch.utils.data.DataLoader(samples, batch_size=16)):
        with rt.autocast():
            loss = torch.nn.functional.cross_entropy(model(x), y)
        rt.backward(loss)
        rt.step(optimizer, clip=1.0)
        print(loss.item())
"""


def test_an_own_loop_has_the_losses_of_the_cpu(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP, encoding="utf-8")
    found, expected = (
        [float(line) for line in lmcore("run", str(tmp_path / "loop.py"), device=one).split()]
        for one in ("xla", "cpu")
    )
    assert len(found) == 4
    assert found == pytest.approx(expected, rel=1e-5)
