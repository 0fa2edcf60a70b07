"""Whole runs of a family that only the tests have, whose samples and loss are not a GPT's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from layouts import encoder_model

from lmcore.checkpoint import read_manifest
from lmcore.model.family import families

SCRIPT = [str(Path(__file__).with_name("encoder.py"))]
FLAGS = (
    "--position-embedding-type none --micro-batch-size 2 --global-batch-size 8 --train-iters 6"
    " --lr 1e-2 --eval-interval 3 --eval-iters 1 --split 8,1,1 --sample-tokens 4 --save-interval 3"
)
CLOSE = 2e-6


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registers the family for the test."""
    registry = families()
    before = dict(registry)
    encoder_model.register()
    yield
    registry.clear()
    registry.update(before)


@pytest.mark.usefixtures("encoder")
def test_training_and_resuming(train: Any, assert_same: Any, capsys: Any) -> None:
    """It trains, validates and tests; what the summary counts is its own; resuming is bitwise."""
    whole = train("whole", FLAGS)
    assert whole.status == 0, whole.err
    assert whole.rows[-1]["loss"] < whole.rows[0]["loss"] - 0.1
    assert {"valid_loss", "grad_norm"} <= whole.rows[2].keys()
    assert whole.summary["test_loss"] is not None
    weights = {name: x for name, x in whole.saved().items() if name.startswith("model.")}
    assert "model.types.weight" in weights
    count = sum(tensor.numel() for tensor in weights.values())
    assert whole.summary["parameter_count"] == count
    assert f"model     Encoder, {count:,} parameters: 2 layers" in whole.err
    config = read_manifest(whole.directory / "checkpoints/iter_0000006").meta["config"]
    assert config["derived"]["flops_per_step"] == 6 * 8 * 16 * count
    assert "lmcore generate" not in whole.out, "it cannot generate text"
    more = train("more", f"{FLAGS} --load {whole.directory}/checkpoints/iter_0000003")
    assert more.status == 0, more.err
    assert more.curve() == whole.curve()[3:]
    assert_same(more.saved(), whole.saved())


@pytest.mark.usefixtures("encoder")
def test_unsupported_options(train: Any) -> None:
    """Options that the family has no part for are refused by name, before anything is trained."""
    for option, flag in {
        "--reset-attention-mask": "--reset-attention-mask",
        "--optimizer sophia": "--optimizer sophia",
    }.items():
        run = train("run", f"{FLAGS} {option}")
        assert run.status != 0
        assert f"`{flag}` is not supported by Encoder models" in run.err
        assert not (run.directory / "metrics.jsonl").exists()


@pytest.mark.usefixtures("encoder")
def test_generation_is_refused(train: Any, capsys: Any) -> None:
    """`lmcore generate` says that the family cannot, and a GPT cannot continue its checkpoint."""
    from lmcore.cli.main import main

    run = train("run", FLAGS)
    assert main(["generate", "--load", str(run.directory), "--prompt", "A", "--device", "cpu"]) != 0
    assert "the Encoder model of" in capsys.readouterr().err
    flags = FLAGS.replace("--position-embedding-type none", "")
    other = train("other", f"{flags} --load {run.directory}")
    assert other.status != 0
    assert "position_embedding_type" in other.err


@pytest.mark.distributed
@pytest.mark.parametrize("more", ["", "--zero-stage 3"])
def test_data_parallelism(train: Any, as_ranks: Any, encoder: None, more: str) -> None:
    """Two processes take the steps of one, and continue its checkpoint."""
    whole = train("whole", FLAGS)
    flags = f"{FLAGS} {more}"
    run = as_ranks("ranks", flags, [SCRIPT, SCRIPT])
    assert run.status == 0, run.err
    for name in ("loss", "grad_norm"):
        wanted = pytest.approx([row[name] for row in whole.rows], rel=CLOSE)
        assert [row[name] for row in run.rows] == wanted
    load = f"--load {whole.directory}/checkpoints/iter_0000003"
    again = as_ranks("again", f"{flags} {load}", [SCRIPT, SCRIPT])
    assert again.status == 0, again.err
    wanted = pytest.approx([row["loss"] for row in whole.rows[3:]], rel=CLOSE)
    assert [row["loss"] for row in again.rows] == wanted
