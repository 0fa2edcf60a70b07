"""`lmcore evaluate` on several replicas: the results of one process, and the end by an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmcore.checkpoint import save_checkpoint
from lmcore.contract import OP_SPECS, OpTable
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.data.tokenizer.saved import save_tokenizer
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape

pytestmark = pytest.mark.distributed

SHAPE = ModelShape(2, 24, 4, 40, 64, 384, init_method_std=0.3)
FAILING = """
import os, sys
from lmcore.base.errors import RunError
from lmcore.evaluation.likelihood import Likelihoods
from lmcore.cli.main import main

compute = Likelihoods.compute

def fail(self, passes):
    if os.environ["RANK"] == "1":
        raise RunError("this replica is broken")
    return compute(self, passes)

Likelihoods.compute = fail
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with random weights, and files of tasks."""
    folder = tmp_path_factory.mktemp("evaluate")
    model = GPT(SHAPE, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    model.initialize(3)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    save_checkpoint(folder / "run/checkpoints", 5, tensors, {}, model_shape=SHAPE.to_dict())
    save_tokenizer(ByteTokenizer(), folder / "run/tokenizer")
    rows = [
        {"query": f"Is it {number}" + "?" * (number % 20), "choices": ["yes", "no"], "gold": 0}
        for number in range(60)
    ]
    (folder / "openbook_qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "book.txt").write_text("All is well that ends well. " * 100)
    return folder


def evaluate(folder: Path, command: list[str], *flags: str) -> tuple[int, str, str]:
    argv = ["evaluate", str(folder / "run"), "--device", "cpu", "--precision", "fp32", *flags]
    ended = subprocess.run(
        [sys.executable, *command, *argv],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


def scores(folder: Path, path: Path, *flags: str) -> dict[str, Any]:
    more = ["--task", "openbookqa", "--task-data", str(folder), "--text", str(folder / "book.txt")]
    more += ["--stride", "16", "--examples", f"{path}l", "--output", str(path)]
    status, _, errors = evaluate(folder, ["-m", "lmcore"], *more, *flags)
    assert status == 0, errors
    (found,) = json.loads(path.read_text()).values()
    assert not path.with_name(f"{path.name}.part").exists()
    lines = [json.loads(line) for line in Path(f"{path}l").read_text().splitlines()]
    return {"metrics": {name: one["metrics"] for name, one in found.items()}, "lines": lines}


def test_replicas_have_the_results_of_one_process(run: Path, tmp_path: Path) -> None:
    """Metrics and each log-probability, bit by bit."""
    alone = scores(run, tmp_path / "1.json")
    assert scores(run, tmp_path / "3.json", "--nproc-per-node", "3") == alone


@pytest.mark.full
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_replicas_of_divided_models(run: Path, tmp_path: Path, axis: str) -> None:
    """Two replicas of two processes have the results of one replica."""
    sizes = (f"--{axis}-model-parallel-size", "2", "--nproc-per-node")
    alone = scores(run, tmp_path / "2.json", *sizes, "2")
    assert scores(run, tmp_path / "4.json", *sizes, "4") == alone


def test_an_error_ends_all(run: Path, tmp_path: Path) -> None:
    """The message is of the replica that failed; what was found before is kept."""
    part = tmp_path / "a.json.part"
    part.write_text(before := '{"key": "a", "results": [[0, -1.0, true, 1]]}\n')
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    flags = ("--text", str(run / "book.txt"), "--output", str(tmp_path / "a.json"))
    status, _, errors = evaluate(run, command, *flags)
    assert status
    assert "this replica is broken" in errors
    assert "rank 1 stopped the run" in errors
    assert part.read_text().startswith(before)
    assert "the same command continues" in errors


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_a_signal_says_how_to_continue(run: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The name of the signal and its status, as in one process, and no hidden file."""
    (run / "long.txt").write_text("All is well that ends well. " * 20_000)
    output, part = tmp_path / "a.json", tmp_path / "a.json.part"
    words = ["evaluate", str(run / "run"), "--device", "cpu", "--nproc-per-node", "2"]
    words += ["--text", str(run / "long.txt"), "--stride", "2", "--output", str(output)]
    words += ["--examples", str(tmp_path / "b.jsonl")]
    with subprocess.Popen(
        [sys.executable, "-m", "lmcore", *words],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number, errors
    word = "terminated" if number == signal.SIGTERM else "interrupted"
    line = f"{word}\n\nthe same command continues, with the results in `{part}`\n"
    assert errors.endswith(line)
    assert errors.count("the same command continues") == 1
    assert list(tmp_path.iterdir()) == [part], "a hidden file is left"


def test_processes_that_do_not_fit(run: Path) -> None:
    flags = ("--tensor-model-parallel-size", "2", "--nproc-per-node", "3", "--text", "a.txt")
    (run / "a.txt").write_text("a")
    status, _, errors = evaluate(run, ["-m", "lmcore"], *flags[:-1], str(run / "a.txt"))
    assert status
    assert "`--nproc-per-node 3` contradicts `--tensor-model-parallel-size`" in errors
