"""The settings and the jobs of `examples/argonne_llama`, which its scripts do not run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lmcore.cli.main import main
from lmcore.config.derived.model_math import model_shape
from lmcore.config.load import load_config
from lmcore.model.family import parameters_of
from lmcore.model.parameters import parameter_count

FOLDER = Path(__file__).resolve().parents[2] / "examples/argonne_llama"
SETTINGS = [str(FOLDER / "model-7b.yaml"), str(FOLDER / "training.yaml")]
VOCABULARY = 32000


def test_the_model_is_theirs() -> None:
    """The parameters are as many as by hand: Llama 2's sizes with 8 groups of keys and values."""
    config = load_config(SETTINGS).config
    hidden, inner, layers, narrow = 4096, 11008, 32, 1024
    block = 2 * hidden * hidden + 2 * hidden * narrow + 3 * hidden * inner + 2 * hidden
    by_hand = 2 * VOCABULARY * hidden + layers * block + hidden
    table = parameters_of(model_shape(config.model, VOCABULARY, config))
    assert parameter_count(table) == by_hand == 5_933_109_248
    assert f"{by_hand:,}" in (FOLDER / "model-7b.yaml").read_text(encoding="utf-8")
    batch = config.training.global_batch_size
    assert batch is not None
    assert config.training.train_iters is not None
    assert config.training.train_iters * batch * config.model.seq_length == pytest.approx(
        1e10, 0.01
    )
    assert [batch % (each << power) for each in (12, 4) for power in range(8)] == [0] * 16


@pytest.mark.parametrize("name, processes", [("aurora", 12), ("polaris", 4)])
def test_jobs(
    name: str, processes: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Both profiles give a job that starts a process for each device of each node."""
    run = [*SETTINGS, "--save", str(tmp_path / "run")]
    words = ["--profile", str(FOLDER / f"{name}.yaml"), "--nodes", "4", "train", *run]
    assert main(["launch", "pbs", *words]) == 0
    job = capsys.readouterr().out
    count = 4 * processes
    assert f"--env WORLD_SIZE={count} -n {count} -ppn {processes} " in job
    lines = [line for line in job.splitlines() if line.startswith("#PBS")]
    assert len(lines) == len(set(lines))
    assert [line for line in lines if line.startswith("#PBS -l select=4")]
    assert ["--pmi=pmix" in job, ":system=polaris" in job] == [name == "aurora", name == "polaris"]
    subprocess.run(["bash", "-n", "/dev/stdin"], input=job, text=True, check=True)
