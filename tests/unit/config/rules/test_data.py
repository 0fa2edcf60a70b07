"""Rules for the data sources of a run; all problems come at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore.config.load import load_config
from lmcore.config.validate import problems_of


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets `a`, `b` and `c`, and `foreign`, which does not say what made it."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c", "foreign"):
        for suffix in (".bin", ".idx", ".meta.json"):
            Path(name + suffix).touch()
    Path("foreign.meta.json").unlink()


def found(*argv: str) -> list[str]:
    return [one.what for one in problems_of(load_config(list(argv)), world_size=1)]


@pytest.mark.parametrize(
    "line",
    [
        "--data-path a",
        "--data-path a b",
        "--data-path a.bin b.idx",
        "--data-path 0.3 a 0.7 b",
        "--data-path 1 a",
        "--train-data-path a --valid-data-path 1 b 2 c",
        "--train-data-path a --eval-iters 0",
        "--train-data-path a --eval-interval 0",
        "--train-data shakespeare",
        "--train-data shakespeare --valid-data-path b --test-data-path c",
        "--data-path a foreign --tokenizer-type ByteTokenizer",
    ],
)
def test_sound_settings(line: str) -> None:
    """Every way to name sources."""
    assert found(*line.split()) == []


@pytest.mark.parametrize(
    "line, problems",
    [
        ("--data-path a --train-data-path b --valid-data-path c",
         ["`--data-path a` and `--train-data-path b` exclude each other"]),
        ("--train-data-path a --valid-data-path b --valid-data x",
         ["`--valid-data x` and `--valid-data-path b` exclude each other"]),
        ("--data-path a --valid-data-path b",
         ["`--valid-data-path b` needs separate training data"]),
        ("--test-data x", ["`--test-data x` needs separate training data"]),
        ("--train-data-path a",
         ["`--train-data-path a` leaves no validation data"]),
        ("--train-data-path a --valid-data-path b --split 9,1,0",
         ["`--split 9,1,0` cannot be combined with `--train-data-path a`"]),
        ("--train-data shakespeare --valid-data shakespeare --split 9,1,0",
         ["`--split 9,1,0` cannot be combined with `--valid-data shakespeare`"]),
        ("--task classification --task-data a.bin --valid-data-path b",
         ["`--valid-data-path b` cannot be combined with `--task-data a.bin`"]),
        ("--task classification --task-data a.bin --test-data-path b",
         ["`--test-data-path b` cannot be combined with `--task-data a.bin`"]),
        ("--data-path 0 a 1 b", ["`--data-path`: the weight of `a` is 0"]),
        ("--data-path 1 a 1 x", ["`--data-path 1 a 1 x`: no such dataset: `x`"]),
        ("--data-path a a", ["`--data-path a a` names `a` twice"]),
        ("--data-file-list nowhere", ["`--data-file-list nowhere`: no such file"]),
        ("--data-path a foreign",
         ["`--data-path a foreign` has no record of its tokenizer: `foreign`"]),
        ("--change-blend --load x --dataloader-type cyclic --data-path a",
         ["`--change-blend` cannot be combined with `--dataloader-type cyclic`"]),
        ("--change-blend --data-path a", ["`--change-blend` needs `--load`"]),
    ],
)  # fmt: skip
def test_problems(line: str, problems: list[str]) -> None:
    """Each is named as it was written."""
    assert found(*line.split()) == problems


def test_all_at_once() -> None:
    """Problems of training's and validation's sources come together."""
    words = ["--train-data-path", "x", "--valid-data-path", "y", "--split", "9,1,0"]
    assert len(found(*words)) == 3


def test_all_weights_at_once() -> None:
    """Every weight and range that cannot be read is named, of every option."""
    *first, last = found(
        *("--train-data-path", "0", "a", "-1", "b", "1", "c"),
        *("--valid-weighted-split-paths", "V: x 0:1 a, 1 1:0 b, 1 0:1 c"),
    )
    assert first == [
        "`--train-data-path`: the weight of `a` is 0",
        "`--train-data-path`: the weight of `b` is -1",
        "`--valid-weighted-split-paths`: `x` is not a weight, for `a`",
    ]
    assert "the range `1:0` of `b` is empty" in last


def test_weights_and_data_sets_at_once() -> None:
    """A bad weight does not hide that a dataset is missing or named twice."""
    assert found(*["--data-path", "0.5", "a", "0", "a.bin", "1", "x"]) == [
        "`--data-path`: the weight of `a.bin` is 0",
        "`--data-path 0.5 a 0 a.bin 1 x`: no such dataset: `x`",
        "`--data-path 0.5 a 0 a.bin 1 x` names `a` twice",
    ]


def test_missing_data_come_first() -> None:
    """Missing validation data is reported after problems of the data itself."""
    assert found("--train-data-path", "x")[0] == "`--train-data-path x`: no such dataset"
    assert found("--data-path", "x", "--split", "1,0,0")[0] == "`--data-path x`: no such dataset"


def test_ranges_that_overlap() -> None:
    """Validation on documents of training is refused."""
    (what,) = found(
        *("--train-weighted-split-paths", "T: 1 0:0.9 a"),
        *("--valid-weighted-split-paths", "V: 1 0.8:1 a"),
    )
    assert what.endswith("have documents of `a` in common")
