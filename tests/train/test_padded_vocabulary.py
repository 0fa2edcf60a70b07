"""`--pad-vocab-size-to`: rows of the vocabulary, in the run, its checkpoints and conversions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcore.checkpoint import find_checkpoint, read_manifest
from lmcore.cli.main import main


def flags_of(more: str = "") -> str:
    """Return the flags of a run; the multiple of other tiny runs, 8, does not divide 300."""
    return f"--train-iters 4 --make-vocab-size-divisible-by 1 --pad-vocab-size-to 300 {more}"


def rows(directory: Path | str) -> int:
    """Return the rows of the embedding in the newest checkpoint of a run."""
    manifest = read_manifest(find_checkpoint(Path(directory)))
    count: int = manifest.tensors["model.token_embedding.weight"].shape[0]
    assert manifest.model_shape["padded_vocab_size"] == count
    return count


def test_rows_of_a_run(train_once: Any) -> None:
    """The embedding has exactly these rows, and they change no loss."""
    run, usual = train_once(flags_of()), train_once("--train-iters 4")
    assert (rows(run.directory), rows(usual.directory)) == (300, 264)
    assert "vocabulary 257 padded to 300" in run.err
    losses = [row["loss"] for row in usual.rows]
    assert [row["loss"] for row in run.rows] == pytest.approx(losses, rel=1e-6)
    assert "\n  pad_vocab_size_to: 300 " in (run.directory / "config.yaml").read_text()


def test_a_run_that_continues(
    train: Any, train_once: Any, arguments: Callable[[str, str], list[str]]
) -> None:
    """It keeps the rows: with all settings, with the settings of the model, or with the flag."""
    whole = train_once(flags_of())
    for way in ("continue", "checkpoint-args", "flag"):
        first = train(way, flags_of("--exit-interval 2"))
        load = f"--load {first.directory}"
        if way == "continue":
            assert main(["train", "--continue", str(first.directory), "--exit-interval", "9"]) == 0
        elif way == "flag":
            assert train(way, f"{flags_of()} {load}").status == 0
        else:
            argv = arguments(way, f"{load} --use-checkpoint-args --train-iters 4")
            at = argv.index("--make-vocab-size-divisible-by")
            assert main(argv[:at] + argv[at + 2 :]) == 0
        assert rows(first.directory) == 300
        assert first.curve() == whole.curve()


def test_conversions_keep_the_rows(train_once: Any, tmp_path: Path) -> None:
    """Megatron's checkpoint has the same rows, and so has lmcore's that is made of it."""
    run = train_once(flags_of())
    megatron, back, smaller = (str(tmp_path / name) for name in ("megatron", "back", "smaller"))
    assert main(["checkpoint", "convert", str(run.directory), megatron, "--to", "megatron"]) == 0
    assert main(["checkpoint", "convert", megatron, back, "--to", "lmcore"]) == 0
    assert rows(back) == 300
    edit = ["checkpoint", "edit", str(run.directory), smaller, "--vocab-size", "280"]
    assert main(edit) == 0
    settings = read_manifest(find_checkpoint(Path(smaller))).meta["config"]["config"]["model"]
    assert settings["pad_vocab_size_to"] is None
    assert rows(smaller) == 280


@pytest.mark.distributed
def test_on_two_processes(train_once: Any, start: Any, finish: Any) -> None:
    """Tensor parallelism divides exactly these rows."""
    alone = train_once(flags_of())
    flags = flags_of("--nproc-per-node 2 --tensor-model-parallel-size 2")
    run = finish(start("two", flags), "two")
    assert run.status == 0, run.err
    assert rows(run.directory) == 300
    losses = [row["loss"] for row in alone.rows]
    assert [row["loss"] for row in run.rows] == pytest.approx(losses, rel=1e-5)
