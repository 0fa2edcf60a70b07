"""`lmcore evaluate --finetune`: whole runs on made data, which learn, continue and are scored."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from few_words import WORDS

from lmcore.cli.main import main

MNLI_COLUMNS = (
    *("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"),
    *("sentence1_parse", "sentence2_parse", "sentence1", "sentence2", "label1", "gold_label"),
)
COLOR_OF = {"contradiction": "black", "entailment": "red", "neutral": "green"}
TRAINING = (
    "--num-threads 1 --sample-tokens 0 --progress plain --cpu-peak-seconds 0 --log-interval 12"
)
FLAGS = "--global-batch-size 8 --micro-batch-size 4 --lr 1e-2 --num-threads 1 --device cpu"


@dataclass(frozen=True)
class Call:
    """A command that ended."""

    status: int
    out: str
    err: str


def evaluate(words: Sequence[str]) -> Call:
    """Run `lmcore evaluate` in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    further = ["--", *TRAINING.split()] if "--finetune" in words and "--" not in words else []
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["evaluate", *map(str, words), *further])
    texts = []
    for stream in (out, err):  # with a buffer, to which the launcher of processes writes
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return Call(status, *texts)


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with MNLI's files, whose labels are colors, and STS-B's."""
    folder, drawn = tmp_path_factory.mktemp("glue"), np.random.default_rng(5)

    def words(count: int) -> str:
        return " ".join(drawn.choice(WORDS, count))

    (folder / "MNLI").mkdir()
    for name, count in {"train": 96, "dev_matched": 22, "dev_mismatched": 15}.items():
        lines = ["\t".join(MNLI_COLUMNS)]
        for number in range(count):
            label = list(COLOR_OF)[number % 3]
            first = f'{COLOR_OF[label]} "{words(int(drawn.integers(1, 10)))}'
            second = f"{COLOR_OF[label]} {words(2)}"
            lines.append("\t".join([str(number), *"1234567", first, second, "x", label]))
        (folder / f"MNLI/{name}.tsv").write_text("\n".join(lines) + "\n")
    (folder / "STS-B").mkdir()
    columns = "index genre filename year old_index source1 source2 sentence1 sentence2 score"
    for name, count in {"train": 96, "dev": 20}.items():
        lines = [columns.replace(" ", "\t")]
        for number in range(count):
            red = number % 4
            second = f"{'red ' * red}{words(4 - red)}".strip()
            lines.append("\t".join([str(number), *"123456", words(3), second, f"{1.25 * red}"]))
        (folder / f"STS-B/{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def flags(bert: Any, glue: Path, save: Path, task: str = "mnli", **changes: str) -> list[str]:
    """Return the words of a fine-tuning; *changes* replace or add options."""
    found = [str(bert.directory), "--task", task, "--finetune", "--task-data", str(glue)]
    found += ["--save", str(save), *FLAGS.split()]
    for name, value in {"epochs": "4", **changes}.items():
        found += [f"--{name.replace('_', '-')}", *value.split()]
    return found


@pytest.fixture(scope="module")
def tuned(bert: Any, glue: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Call]:
    """Return the directory of a fine-tuning on MNLI with two seeds, and what it printed."""
    save = tmp_path_factory.mktemp("tuned") / "mnli"
    call = evaluate(flags(bert, glue, save, seeds="1 2"))
    assert call.status == 0, call.err
    return save, call


def test_a_task_is_learned(tuned: tuple[Path, Call]) -> None:
    """The best checkpoint of each seed is kept, with counts by file, and mean and spread."""
    save, call = tuned
    report = json.loads((save / "results.json").read_text())
    values = []
    for seed in ("1", "2"):
        one = report["seeds"][seed]
        files = one["valid"]["files"]
        assert {name: part["examples"] for name, part in files.items()} == {
            "dev_matched.tsv": 22,
            "dev_mismatched.tsv": 15,
        }
        right = sum(part["correct"] for part in files.values())
        assert one["valid"]["correct"] == right
        assert one["valid"]["metrics"]["acc"]["value"] == pytest.approx(right / 37)
        values.append(right / 37)
        accuracies = {step: one["acc"]["value"] for step, one in one["validations"].items()}
        assert list(accuracies) == ["12", "24", "36", "48"]
        assert accuracies[str(one["step"])] == max(accuracies.values())
        kept = list((save / f"seed-{seed}" / "checkpoints").glob("iter_*"))
        assert kept == [Path(one["checkpoint"])]
        rows = (save / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(row).get("valid_classification_accuracy") for row in rows]
        assert [value for value in found if value is not None] == pytest.approx(
            [*accuracies.values()]
        ), "training reports the same"
    assert min(values) > 0.8, "chance is a third"
    mean = report["mean"]["valid"]["acc"]
    assert mean["value"] == pytest.approx(np.mean(values))
    assert mean["error"] == pytest.approx(np.std(values, ddof=1))
    assert (save / "best").resolve() == (save / f"seed-{report['best_seed']}").resolve()
    assert "mean of 2" in call.out
    assert "all files" in call.out


PUBLISHED = {
    # Megatron's README, but for paths, sizes of the model, and the length of the runs.
    "RACE": (
        "--task RACE {common} --train-data {data}/train/middle --valid-data {data}/dev/middle "
        "{data}/dev/high {extension} --epochs 3 --micro-batch-size 4 --lr 1.0e-5 "
        "--lr-warmup-fraction 0.06"
    ),
    "MNLI": (
        "--task MNLI {common} --train-data {data}/train.tsv --valid-data {data}/dev_matched.tsv "
        "{data}/dev_mismatched.tsv {extension} --epochs 5 --micro-batch-size 8 --lr 5.0e-5 "
        "--lr-warmup-fraction 0.065"
    ),
}
EXTENSION = (
    "--pretrained-checkpoint {bert} --activations-checkpoint-method uniform --save-interval 10000 "
    "--save {save} --log-interval 100 --eval-interval 1000 --eval-iters 10 "
    "--weight-decay 1.0e-1 --tokenizer-type BertWordPieceLowerCase"
)


@pytest.mark.full
@pytest.mark.parametrize("task", ["RACE", "MNLI"])
def test_the_command_line_of_megatron(
    bert: Any, vocabulary: Path, glue: Path, race_files: Path, tmp_path: Path, task: str
) -> None:
    """The published arguments of its `tasks/main.py` train and score a head as they are."""
    shape = json.loads(
        next((bert.directory / "checkpoints").glob("iter_*/manifest.json")).read_text()
    )["model_shape"]
    common = (
        f"--num-layers {shape['num_layers']} --hidden-size {shape['hidden_size']} "
        f"--num-attention-heads {shape['num_attention_heads']} --seq-length 16 "
        f"--max-position-embeddings {shape['max_position_embeddings']} --fp16 "
        f"--vocab-file {vocabulary}"
    )
    extension = EXTENSION.format(bert=bert.directory, save=tmp_path / "out")
    data = race_files / "RACE" if task == "RACE" else glue / "MNLI"
    words = PUBLISHED[task].format(common=common, data=data, extension=extension)
    call = evaluate([*words.split(), "--device", "cpu"])
    assert call.status == 0, call.err
    report = json.loads((tmp_path / "out/results.json").read_text())
    (one,) = report["seeds"].values()
    names = {
        "RACE": {"dev/middle", "dev/high"},
        "MNLI": {"dev_matched.tsv", "dev_mismatched.tsv"},
    }
    assert one["valid"]["files"].keys() == names[task]
    assert 0 <= one["valid"]["metrics"]["acc"]["value"] <= 1
    assert "`--save-interval 10000` changes nothing here: checkpoints are saved at" in call.err
    assert "`--eval-iters 10` changes nothing here" in call.err
    assert "`--eval-interval 1000` is more than the " in call.err
    settings = json.loads((tmp_path / "out/settings.json").read_text())
    assert "--fp16" in settings["training"]


def test_a_trained_head_is_scored(
    tuned: tuple[Path, Call], glue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its accuracy is the recorded one; examples have what is predicted; cuts are said."""
    save, _ = tuned
    known = json.loads((save / "results.json").read_text())["seeds"]["2"]["valid"]
    run = save / "seed-2"
    words = [str(run), "--task", "mnli", "--device", "cpu", "--num-threads", "1"]
    words += ["--examples", str(tmp_path / "a.jsonl"), "--json", "--task-data"]
    call = evaluate([*words, str(glue)])
    assert call.status == 0, call.err
    found = json.loads(call.out)[str(run)]["mnli"]
    parts = found.pop("parts")
    assert found | {"seconds": 0} == known | {"seconds": 0}
    assert {"valid": found} == parts
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(lines) == 37
    assert sum(one["label"] == one["predicted"] for one in lines) == known["correct"]
    order = ["contradiction", "entailment", "neutral"]
    assert all(order[np.argmax(one["outputs"])] == one["predicted"] for one in lines)
    # Other passes, and a model of the CPU in another precision, predict the same.
    small = evaluate([*words, str(glue), "--batch-tokens", "20", "--limit", "9"])
    assert json.loads(small.out)[str(run)]["mnli"]["examples"] == 18
    both = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    for one in both:
        (same,) = [
            other
            for other in lines
            if (other["file"], other["example"]) == (one["file"], one["example"])
        ]
        assert one["outputs"] == pytest.approx(same["outputs"], abs=1e-5)
    short = evaluate([*words, str(glue), "--seq-length", "10"])
    assert "are longer than the 10 tokens of a sequence and cut" in short.err
    test = evaluate([*words, f"mnli={glue / 'MNLI/train.tsv'}"])
    assert test.status == 0
    assert "is training data: scores on it say little" in test.err
    (tmp_path / "copy.tsv").write_bytes((glue / "MNLI/train.tsv").read_bytes())
    copied = evaluate([*words, f"mnli={tmp_path / 'copy.tsv'}", "--limit", "3"])
    assert f"copy.tsv` has the content of `{glue}/MNLI/train.tsv`, which is training" in copied.err
    (glue / "MNLI/unlabelled.tsv").write_text("sentence1\tsentence2\nred\tred a\n")
    words[words.index("--json")] = "--batch-tokens=64"
    plain = evaluate([*words, f"mnli={glue / 'MNLI/unlabelled.tsv'}"])
    assert plain.status == 0, plain.err
    assert f"`unlabelled.tsv`: without labels; the predictions are in `{tmp_path / 'a.jsonl'}`" in (
        plain.out
    )
    assert len(plain.out.splitlines()) == 1, "a table without rows is shown"
    (line,) = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert (line["label"], line["predicted"]) == (None, "entailment")


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("count", [2, 3])
def test_replicas_score_a_trained_head(
    tuned: tuple[Path, Call], glue: Path, tmp_path: Path, count: int
) -> None:
    """Replicas have the outputs of one process, bit by bit; a wrong file ends all of them."""
    words = [*map(str, tuned[0].glob("seed-*")), "--task", "mnli", "--device", "cpu"]
    words += ["--num-threads", "1", "--batch-tokens", "64", "--task-data", str(glue)]
    found = []
    for number in (1, count):
        place = tmp_path / str(number)
        place.mkdir()
        files = ["--examples", str(place / "a.jsonl"), "--output", str(place / "a.json")]
        call = evaluate([*words, *files, "--nproc-per-node", str(number)])
        assert call.status == 0, call.err
        report = json.loads((place / "a.json").read_text())
        metrics = [tasks["mnli"]["metrics"] for tasks in report.values()]
        found.append((metrics, (place / "a.jsonl").read_text()))
    assert found[0] == found[1]
    assert len(found[0][1].splitlines()) == 2 * 37
    empty = tmp_path / "empty.tsv"
    empty.touch()
    wrong = evaluate([*words, f"mnli={empty}", "--nproc-per-node", str(count)])
    assert wrong.status == 1
    assert "empty.tsv` is empty" in wrong.err
    assert "Traceback" not in wrong.err


def test_a_stopped_fine_tuning_continues(
    tuned: tuple[Path, Call],
    bert: Any,
    glue: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same command has the results of one without a stop; what is complete is not repeated."""
    from lmcore.cli import train
    from lmcore.cli.evaluate.runs import TunedRun

    whole = json.loads((tuned[0] / "results.json").read_text())["seeds"]
    words, run, calls = flags(bert, glue, tmp_path / "a", seeds="2"), train.run, []
    monkeypatch.setattr(train, "run", lambda argv: run([*argv, "--exit-interval", "24"]))
    stopped = evaluate(words)
    assert stopped.status != 0
    assert "is not complete; the same command continues it" in stopped.err
    assert not (tmp_path / "a/results.json").exists()

    def counted(argv: list[str]) -> int:
        calls.append(argv[:2])
        return run(argv)

    monkeypatch.setattr(train, "run", counted)
    scores = TunedRun._scores

    for number, status in {signal.SIGINT: 130, signal.SIGTERM: 143}.items():
        stop = functools.partial(os.kill, os.getpid(), number)
        monkeypatch.setattr(TunedRun, "_scores", lambda _self, stop=stop: stop())
        ended = evaluate(words)
        assert ended.status == status
        assert "is not complete; the same command continues it" in ended.err
    monkeypatch.setattr(TunedRun, "_scores", scores)
    done = evaluate(words)
    assert done.status == 0, done.err
    assert calls == [["--continue", str(tmp_path / "a/seed-2")]] * 3
    found = json.loads((tmp_path / "a/results.json").read_text())["seeds"]["2"]
    assert found["validations"] == whole["2"]["validations"]
    assert found["step"] == whole["2"]["step"]
    again = evaluate(words)
    assert again.status == 0
    assert len(calls) == 3
    dev = glue / "MNLI/dev_matched.tsv"
    before = dev.read_bytes()
    dev.write_bytes(before.replace(b"the", b"THE"))
    changed = evaluate(words)
    dev.write_bytes(before)
    assert changed.status != 0
    assert f"has a fine-tuning on other content of `{dev}`" in changed.err
    assert "choose another directory for `--save`" in changed.err
    assert "SHA-256 was " in changed.err
    other = evaluate(flags(bert, glue, tmp_path / "a", seeds="2", epochs="5"))
    assert other.status != 0
    assert "why: `epochs` was 4.0, and is 5.0" in other.err
    more = evaluate(flags(bert, glue, tmp_path / "a", seeds="2 1"))
    assert more.status == 0, more.err
    assert len(calls) == 4
    found = json.loads((tmp_path / "a/results.json").read_text())["seeds"]["1"]
    assert found["validations"] == whole["1"]["validations"]


@pytest.mark.full
def test_a_regression_with_a_decoder(train_once: Any, glue: Path, tmp_path: Path) -> None:
    """STS-B is learned by a GPT; the mean squared error is the loss of training."""
    gpt = train_once("--train-iters 1 --seq-length 48")
    words = flags(gpt, glue, tmp_path / "a", "stsb", epochs="3")
    call = evaluate([*words, "--json", "--examples", str(tmp_path / "b.jsonl")])
    assert call.status == 0, call.err
    report = json.loads(call.out)
    one = report["seeds"]["1234"]
    assert one["valid"]["metrics"]["pearson"]["value"] is not None
    assert "correct" not in one["valid"]
    rows = (tmp_path / "a/seed-1234/metrics.jsonl").read_text().splitlines()
    losses = [row["valid_loss"] for row in map(json.loads, rows) if "valid_loss" in row]
    errors = [step["mse"]["value"] for step in one["validations"].values()]
    assert errors == pytest.approx(losses, rel=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    error = np.mean([(line["label"] - line["predicted"]) ** 2 for line in lines])
    assert error == pytest.approx(one["valid"]["metrics"]["mse"]["value"])


@pytest.fixture(scope="module")
def race_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the layout of RACE's release."""
    place, drawn = tmp_path_factory.mktemp("race"), np.random.default_rng(6)
    for part, count in {"train": 24, "dev": 6, "test": 5}.items():
        for level in ("middle", "high"):
            folder = place / "RACE" / part / level
            folder.mkdir(parents=True)
            for number in range(count):
                gold = int(drawn.integers(0, 4))
                options = [" ".join(drawn.choice(WORDS, 2)) for _ in range(4)]
                options[gold] = f"red {options[gold]}"
                article = {
                    "article": "the house is old .",
                    "questions": ["a tree is _ ."],
                    "options": [options],
                    "answers": ["ABCD"[gold]],
                }
                (folder / f"{number}.txt").write_text(json.dumps(article))
    return place


def test_race(bert: Any, race_files: Path, tmp_path: Path) -> None:
    """Folders of the release, by level; the test is scored with the best checkpoint."""
    words = flags(bert, race_files, tmp_path / "a", "race", epochs="2", seq_length="16")
    call = evaluate(words)
    assert call.status == 0, call.err
    one = json.loads((tmp_path / "a/results.json").read_text())["seeds"]["1234"]
    assert {name: part["examples"] for name, part in one["test"]["files"].items()} == {
        "test/high": 5,
        "test/middle": 5,
    }
    run = str(tmp_path / "a/seed-1234")
    for name, total in {"race": 22, "race_high": 11}.items():
        scored = evaluate([run, "--task", name, "--task-data", str(race_files), "--json"])
        assert scored.status == 0, scored.err
        found = json.loads(scored.out)[run][name]
        assert found["examples"] == total
    assert {part: record["examples"] for part, record in found["parts"].items()} == {
        "valid": 6,
        "test": 5,
    }
    table = evaluate([run, "--task", "race", "--task-data", str(race_files)]).out.splitlines()
    assert table[0].split()[:3] == ["task", "part", "file"]
    assert [tuple(row.split()[1:4]) for row in table[1:]] == [
        ("valid", "dev/middle", "6"),
        ("valid", "dev/high", "6"),
        ("valid", "all", "files"),
        ("test", "test/middle", "5"),
        ("test", "test/high", "5"),
        ("test", "all", "files"),
    ]
    wrong = evaluate([run, "--task", "mnli", "--task-data", str(tmp_path)])
    assert wrong.status != 0


def test_refusals(tuned: tuple[Path, Call], bert: Any, glue: Path, tmp_path: Path) -> None:
    """Mistakes are named before anything is trained."""
    run, data = str(tuned[0] / "seed-1"), ["--task-data", str(glue)]
    tune = flags(bert, glue, tmp_path / "a")
    bad = glue.parent / "bad.tsv"
    lines = (glue / "MNLI/train.tsv").read_text().splitlines()
    bad.write_text("\n".join([*lines[:3], lines[3].replace("neutral", "-")]) + "\n")
    lacks = glue.parent / "lacks.tsv"
    lacks.write_text(lines[0].replace("sentence2\t", "second\t") + "\n" + lines[1] + "\n")
    (glue.parent / "empty.tsv").write_text("")
    cases = {
        "the task `mnli` needs a head that is trained for it": [
            str(bert.directory),
            *("--task", "mnli"),
            *data,
        ],
        "give the best one: `": [str(tuned[0]), "--task", "mnli", *data],
        "no such directory: `none`": ["none", "--task", "mnli", *data],
        "it cannot be scored on the task `lambada`": [run, "--task", "lambada", *data],
        "the head of `": [run, "--task", "stsb", *data],
        "the classes of `": [run, "--task", "mrpc", "--task-data", f"mrpc={glue}/MNLI/train.tsv"],
        "`--epochs` needs `--finetune`": [run, "--task", "mnli", *data, "--epochs", "3"],
        "`--finetune` trains one task": [word if word != "mnli" else "mnli,rte" for word in tune],
        "it is scored without training": [word if word != "mnli" else "lambada" for word in tune],
        "has no training data of the task `rte`": flags(bert, glue, tmp_path / "b", "rte"),
        "needs `--save DIR`": [one for one in tune if one not in {"--save", str(tmp_path / "a")}],
        "line 4 of": [*tune, "--train-data", str(bad)],
        "names no column `sentence2`": [*tune, "--valid-data", str(lacks)],
        "is empty": [*tune, "--train-data", str(glue.parent / "empty.tsv")],
        "`--seq-length` cannot be given after `--`": [*tune, "--", "--seq-length", "12"],
        "leave it out: checkpoints are saved at each validation": [
            *(*tune, "--", "--save-interval", "9"),
        ],
        "a head is scored by whole models": [
            *(run, "--task", "mnli", *data),
            *("--tensor-model-parallel-size", "2"),
        ],
    }
    for message, words in cases.items():
        call = evaluate(words)
        assert call.status != 0, message
        assert message in call.err, call.err
        assert "Traceback" not in call.err
        assert not (tmp_path / "a/seed-1234/metrics.jsonl").exists()
    tune = flags(bert, glue, tmp_path / "a", valid_data=f"{glue}/MNLI/train.tsv", epochs="0.1")
    same = evaluate([*tune, "--eval-interval", "500"])
    assert "train.tsv` is training data" in same.err
    assert "`--eval-interval 500` is more than the 2 steps of the run" in same.err


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2", "-- --zero-stage 1"])
def test_training_on_two_processes(
    tuned: tuple[Path, Call], bert: Any, glue: Path, tmp_path: Path, layout: str
) -> None:
    """Two processes train, one scores: the accuracies are as in training."""
    own, _, further = layout.partition("-- ")
    words = flags(bert, glue, tmp_path / "a", seeds="2", nproc_per_node="2")
    words = [*words, *own.split(), "--json", "--", *TRAINING.split(), *further.split()]
    call = evaluate(words)
    assert call.status == 0, call.err
    one = json.loads(call.out)["seeds"]["2"]
    rows = (tmp_path / "a/seed-2/metrics.jsonl").read_text().splitlines()
    found = [json.loads(row).get("valid_classification_accuracy") for row in rows]
    accuracies = [step["acc"]["value"] for step in one["validations"].values()]
    assert [value for value in found if value is not None] == pytest.approx(accuracies)
    assert accuracies[-1] > 0.8
