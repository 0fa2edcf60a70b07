"""Whole runs with named validation sets."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from lmcore.data.prepare.plain_text import prepare_text
from lmcore.data.tokenizer import build_tokenizer

STEPS = "--train-iters 6 --eval-interval 2 --eval-iters 2 --save-interval 2"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Prefixes of two data sets, and of one with fewer tokens than a sample."""
    folder = tmp_path_factory.mktemp("sets")
    text = (resources.files("lmcore.data") / "bundled/shakespeare.txt").read_text("utf-8")
    tokenizer = build_tokenizer("ByteTokenizer", vocab_file=None, merge_file=None, vocab_size=None)
    for name, part in {"a": text[8000:11000], "b": text[20000:22000], "short": "To be"}.items():
        (folder / f"{name}.txt").write_text(part, "utf-8")
        prepare_text(folder / f"{name}.txt", tokenizer, folder / name, document_characters=256)
    return {name: str(folder / f"{name}_text_document") for name in ("a", "b", "short")}


def losses(run: Any, name: str) -> list[float]:
    return [row["valid_sets"][name]["loss"] for row in run.rows if "valid_sets" in row]


def test_losses_of_sets(train: Any, data: dict[str, str]) -> None:
    """They are beside the validation of `--split`, and the rest of the run is as without them."""
    sets, split = f"--valid-data a={data['a']} b={data['b']}", "--split 80,20,0"
    run = train("sets", f"{STEPS} {split} {sets}")
    assert run.status == 0, run.err
    assert run.curve() == train("plain", f"{STEPS} {split}").curve()
    assert len(losses(run, "a")) == 3
    assert losses(run, "a") != losses(run, "b")
    assert run.summary["valid_sets"] == run.rows[-1]["valid_sets"]
    assert f"valid     b: {data['b']}: 2," in run.err
    assert " validation on b at iteration 4 | lm loss value: " in run.err
    (events,) = (run.directory / "tensorboard").iterdir()
    assert events.read_bytes().count(b"valid/b/perplexity") == 3
    load = f"--load {run.directory}/checkpoints/iter_0000002"
    resumed = train("resumed", f"{STEPS} {split} {sets} {load}")
    assert "settings differ" not in resumed.err
    assert resumed.rows[-1]["valid_sets"] == run.rows[-1]["valid_sets"]


def test_names_of_ranges(train: Any, data: dict[str, str], data_prefix: str) -> None:
    """Several names of ranges are sets, too; the first one's loss is the run's."""
    own = f"--train-data-path {data_prefix}"
    steps = STEPS.replace("--save-interval 2", "")
    alone = train("alone", f"{steps} {own} --valid-data-path {data['a']}", None)
    by_name = train("sets", f"{steps} {own} --valid-data a={data['a']} b={data['b']}", None)
    file = Path(data["a"]).parent / "ranges.yaml"
    ranges = [f"'en: 1 0:1 {data['a']}'", f"'b b: 1 0:1 {data['b']}'"]
    file.write_text(f"data:\n  valid_weighted_split_paths: [{', '.join(ranges)}]\n", "utf-8")
    ranged = train("ranges", f"{file} {steps} {own}", None)
    for run in (alone, by_name, ranged):
        assert run.status == 0, run.err
    assert alone.curve() == by_name.curve() == ranged.curve()
    assert losses(by_name, "b") == losses(ranged, "b b")
    assert losses(ranged, "en") == [row["valid_loss"] for row in alone.rows if "valid_loss" in row]


def test_too_short(train: Any, data: dict[str, str]) -> None:
    """A set without a whole sample is an error before the first step."""
    run = train("short", f"{STEPS} --split 1,0,0 --valid-data a={data['a']} s={data['short']}")
    assert run.status != 0
    assert "the validation set `s` of `--valid-data` has no sample" in run.err
    assert not (run.directory / "metrics.jsonl").exists()


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["--zero-stage 1", "--pipeline-model-parallel-size 2"])
def test_layouts(start: Any, finish: Any, train: Any, data: dict[str, str], layout: str) -> None:
    """Two processes give the losses of one."""
    flags = "--train-iters 2 --eval-interval 2 --eval-iters 2 --global-batch-size 4"
    flags += f" --micro-batch-size 2 --split 1,0,0 --valid-data b={data['b']}"
    alone = train("alone", flags)
    run = finish(start("divided", f"{flags} --nproc-per-node 2 {layout}"), "divided")
    assert run.status == 0, run.err
    assert losses(run, "b") == pytest.approx(losses(alone, "b"), rel=1e-5)
