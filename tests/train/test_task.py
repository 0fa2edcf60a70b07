"""Whole runs with a head for a task: fine-tuned, resumed, continued in another layout, refused."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changed_flags import changed
from few_words import COLORS, WORDS

from lmcore.checkpoint import read_manifest
from lmcore.cli.main import main
from lmcore.data.tokenizer import Tokenizer
from lmcore.families.build import create_model
from lmcore.families.saved_shape import read_shape

LENGTH = "--train-iters 24 --global-batch-size 8 --lr 1e-2 --save-interval 12 --eval-interval 12"
RANK = ["-m", "lmcore.cli.main"]
CLOSE = 1e-5


@pytest.fixture(scope="session")
def files(vocabulary: Path) -> Path:
    """Return a folder with tables of pairs, whose class is a color, and of questions."""
    drawn = np.random.default_rng(3)

    def words(count: int) -> str:
        return " ".join(drawn.choice(WORDS, count))

    folder = vocabulary.parent
    for name, count in {"train": 90, "valid": 19}.items():
        with (folder / f"{name}.csv").open("w", newline="") as stream:
            table = csv.writer(stream)
            table.writerow(["id", "first", "second", "color", "plain"])
            for number in range(count):
                color = COLORS[number % 3]
                first, second = words(int(drawn.integers(1, 14))), words(3)
                table.writerow([number, f"{color} {first}", second, f"is {color}", color])
        with (folder / f"{name}.jsonl").open("w") as stream:
            for number in range(count):
                choices = [words(2) for _ in range(2 + number % 2)]
                gold = int(drawn.integers(0, len(choices)))
                choices[gold] += " red"
                row = {"query": words(3), "options": choices, "gold": gold}
                stream.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture
def classify(files: Path, bert: Any) -> str:
    """Return the flags of a classification on the tiny BERT, without the length."""
    return (
        f"--load {bert.directory} --use-checkpoint-args --finetune --task classification"
        f" --task-data {files}/train.csv --task-valid-data {files}/valid.csv"
        " --task-text first second --task-label color"
    )


CHOOSE = (
    "--tokenizer-type ByteTokenizer --seq-length 48 --task multiple-choice --task-text query"
    " --task-choices options --task-label gold --task-data {files}/train.jsonl"
    " --task-valid-data {files}/valid.jsonl"
)


def head_of(run: Any) -> Any:
    """Return the model of a run's last checkpoint, in evaluation mode."""
    from lmcore.contract import OP_SPECS, OpTable
    from lmcore.families.op_binding import OpBinding

    manifest = read_manifest(run.directory / "checkpoints/iter_0000024")
    shape = read_shape(manifest.model_shape, run.directory)
    model = create_model(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    weights = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, value in run.saved().items():
            if name in weights:
                weights[name].copy_(value)
    return model.eval()


def test_classifier(
    train: Any, classify: str, bert: Any, files: Path, tokenizer: Tokenizer, assert_same: Any
) -> None:
    """It starts with the layers' weights, learns, validates on every row once, resumes bitwise."""
    whole = train("whole", f"{classify} {LENGTH}", None)
    assert whole.status == 0, whole.err
    assert "`classifier` of the head for classification: new, with initial values" in whole.err
    assert "`masked_head`, `order_head` of the checkpoint: left out" in whole.err
    assert "task      classification, 3 classes: is black" not in whole.err
    assert "task      classification, 3 classes: is blue, is green, is red" in whole.err
    assert "valid     " in whole.err
    assert "of 90 rows are longer than the `--seq-length` of 16 tokens and cut" in whole.err
    assert "| classification loss: " in whole.err
    assert "lmcore generate" not in whole.out
    assert "perplexity" not in whole.out
    assert "PPL" not in whole.err
    assert whole.summary["valid_perplexity"] is None
    assert whole.summary["valid_classification_accuracy"] > 0.6
    # Each row of the validation by itself, without padding.
    model, names = head_of(whole), ["is blue", "is green", "is red"]
    losses, right = [], 0
    with (files / "valid.csv").open() as stream:
        for row in csv.DictReader(stream):
            a, b = tokenizer.encode(row["first"]), tokenizer.encode(row["second"])
            while len(a) + len(b) > 13:
                (a if len(a) > len(b) else b).pop()
            tokens = torch.tensor([[2, *a, 3, *b, 3]])
            types = torch.tensor([[0] * (len(a) + 2) + [1] * (len(b) + 1)])
            with torch.no_grad():
                logits = model.task_logits(model.hidden(tokens, types), torch.tensor([0]))
            label = names.index(row["color"])
            losses.append(-logits.log_softmax(-1)[0, label].item())
            right += int(logits.argmax()) == label
    assert len(losses) == 19
    assert whole.summary["valid_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert whole.summary["valid_classification_accuracy"] == pytest.approx(right / 19)
    middle = f"{whole.directory}/checkpoints/iter_0000012"
    again = classify.replace(f"--load {bert.directory}", f"--load {middle}")
    more = train("more", f"{again.replace(' --finetune', '')} {LENGTH}", None)
    assert more.status == 0, more.err
    assert more.curve() == whole.curve()[12:]
    assert_same(more.saved(), whole.saved())


def test_weights_of_the_checkpoint(train: Any, classify: str, bert: Any) -> None:
    """Without steps that change them, the layers and the pooler are the checkpoint's."""
    run = train("run", f"{classify} --train-iters 1 --lr 1e-30 --min-lr 0 --eval-iters 0", None)
    assert run.status == 0, run.err
    before, now = bert.saved(), run.saved()
    shared = [name for name in now if name.startswith("model.") and name in before]
    assert "model.pooler.weight" in shared
    assert {name for name in now if name.startswith("model.")} - set(shared) == {
        "model.classifier.weight",
        "model.classifier.bias",
    }
    for name in shared:
        torch.testing.assert_close(now[name], before[name], rtol=1e-6, atol=1e-12)
    assert now["model.classifier.weight"].std() > 0


def test_further_tuning(train: Any, classify: str, bert: Any, capsys: Any) -> None:
    """A head with the same classes is loaded; with other classes it gets initial values."""
    flags = f"{classify} --train-iters 1 --lr 1e-30 --min-lr 0 --eval-iters 0"
    first = train("first", flags, None)
    flags = flags.replace(f"--load {bert.directory}", f"--load {first.directory}")
    same = train("same", flags + " --seed 5", None)
    assert same.status == 0, same.err
    assert "initial values" not in same.err
    for name, value in first.saved().items():
        if name.startswith("model."):
            torch.testing.assert_close(same.saved()[name], value, rtol=1e-6, atol=1e-12)
    other = train("other", flags.replace("task-label color", "task-label second"), None)
    assert other.status != 0, "validation has classes that training lacks"
    assert "is unknown" in other.err
    named = "--task-labels ocean sky fire"
    wrong = train("wrong", f"{flags} {named}", None)
    assert "the class `is red` is unknown" in wrong.err
    order = train("order", f"{flags} --task-labels".replace(" --seed 5", ""), None)
    assert order.status != 0
    assert main(["checkpoint", "inspect", str(first.directory)]) == 0
    assert "classification" in capsys.readouterr().out


def test_unfit_checkpoints(train: Any, classify: str, bert: Any, files: Path) -> None:
    """A run cannot continue a pretraining with a head, nor text be generated by it."""
    plain = classify.replace(" --finetune", "")
    run = train("run", f"{plain} --train-iters 4 --eval-iters 0", None)
    assert run.status != 0
    assert "task: checkpoint absent, model classification" in run.err
    choose = CHOOSE.format(files=files)
    made = train("made", f"{choose} --train-iters 1 --eval-iters 0", None)
    assert made.status == 0, made.err
    assert main(["generate", "--load", str(made.directory), "--prompt", "a"]) != 0


TASK_CHANGES = {
    "task": ("", "--task multiple-choice --task-choices second"),
    "task_data": ("", "--task-data {files}/valid.csv"),
    "task_text": ("", "--task-text first"),
    "task_label": ("", "--task-label second"),
    "task_labels": (
        "--task-label plain --task-labels red blue green",
        "--task-labels green blue red",
    ),
    "task_choices": ("choose", "--task-choices options query"),
    "task_choice_tokens": ("choose", "--task-choice-tokens 3"),
    "task_valid_data": ("", "--task-valid-data {files}/train.csv"),
}
"""Setting -> what the first run has beside the flags of a classification, and the change."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "task_data" else pytest.mark.full)
        for name in TASK_CHANGES
    ],
)
def test_a_changed_task(train: Any, train_once: Any, classify: str, files: Path, name: str) -> None:
    """A changed task is refused when a run resumes; other data for validation is named."""
    further, change = TASK_CHANGES[name]
    base = f"{classify} --train-iters 4 --save-interval 2 --eval-iters 0"
    if further == "choose":
        base, further = f"{CHOOSE} --train-iters 4 --save-interval 2 --eval-iters 0", ""
    base = changed(base, further).format(files=files)
    saved = train_once(base, None)
    assert saved.status == 0, saved.err
    load = f"--load {saved.directory}/checkpoints/iter_0000002"
    base = re.sub(r"--load \S+", "", base).replace(" --finetune", "")
    run = train("changed", changed(f"{base} {load}", change.format(files=files)), None)
    if name == "task_valid_data":
        assert run.status == 0, run.err
        assert "settings differ from the checkpoint's: `task_valid_data`" in run.err
        return
    assert run.status != 0
    assert "error: " in run.err
    assert not (run.directory / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--task classification", "`--task classification` has no data"),
        ("--task-data {files}/train.csv", "`--task-data {files}/train.csv` needs `--task`"),
        ("{task} --task-data no.csv", "`--task-data no.csv`: no such file"),
        ("{task} {data} --task-text a b c", "`--task-text a b c` names 3 columns"),
        ("{task} {data} --context-parallel-size 2", "cannot be combined with `{task}`"),
        ("{task} {data} --eod-mask-loss", "`--eod-mask-loss` cannot be combined"),
        ("{task} {data} --data-path x", "`--data-path x` and `{data}` exclude each other"),
        ("{task} {data} --task-labels a a", "are not two or more different names"),
        ("{task} {data}", "train.csv` line 1: there is no column `text`"),
        ("{task} {data} --task-text first --optimizer sophia", "`--optimizer sophia` is not"),
    ],
)
def test_refused(train: Any, files: Path, flags: str, message: str) -> None:
    """Settings that do not fit are named before anything is trained."""
    known = {
        "files": files,
        "task": "--task classification",
        "data": f"--task-data {files}/train.csv",
    }
    column = " --task-label color" if "--task-text first" in flags else ""
    run = train("run", flags.format(**known) + column, None)
    assert run.status != 0
    assert message.format(**known) in run.err
    assert not (run.directory / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--task-data no.csv", "`--task-data no.csv`: no such file"),
        ("--task-data {files}", "`--task-data {files}`: is a directory"),
        ("--task-data {files}/train.csv --task-valid-data no.csv", "no.csv`: no such file"),
    ],
)
def test_a_missing_file_is_one_error(train: Any, files: Path, flags: str, message: str) -> None:
    """The rules report it; the reader of the rows has nothing to add."""
    columns = "--task classification --task-text first --task-label color"
    run = train("run", f"{columns} {flags.format(files=files)}", None)
    assert run.status == 2
    assert message.format(files=files) in run.err
    assert run.err.count("error: ") == 1


@pytest.mark.parametrize("model", ["", "--untie-embeddings-and-output-weights"])
def test_multiple_choice_with_a_decoder(
    train: Any, train_once: Any, files: Path, model: str, assert_same: Any
) -> None:
    """A GPT learns to choose, without its untied head; the run resumes bitwise."""
    base = train_once(f"--train-iters 1 --seq-length 48 {model}".rstrip())
    choose = CHOOSE.format(files=files)
    load = f"--load {base.directory} --use-checkpoint-args"
    whole = train("whole", f"{choose} {load} --finetune {LENGTH} --log-interval 12", None)
    assert whole.status == 0, whole.err
    assert ("`output_embedding` of the checkpoint: left out" in whole.err) == bool(model)
    assert "task      multiple-choice, 3 choices" in whole.err
    assert whole.rows[-1]["loss"] < whole.rows[0]["loss"]
    assert 0 <= whole.summary["valid_multiple_choice_accuracy"] <= 1
    load = f"--load {whole.directory}/checkpoints/iter_0000012 --use-checkpoint-args"
    more = train("more", f"{choose} {load} {LENGTH}", None)
    assert more.status == 0, more.err
    assert more.curve() == whole.curve()[12:]
    assert_same(more.saved(), whole.saved())


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    ["--tensor-model-parallel-size 2", pytest.param("--zero-stage 3", marks=pytest.mark.full)],
)
def test_another_layout_continues(train: Any, as_ranks: Any, classify: str, layout: str) -> None:
    """Two processes continue the checkpoint of one, and validate the same rows."""
    whole = train("whole", f"{classify} {LENGTH}", None)
    assert whole.status == 0, whole.err
    load = classify.split(" --use", maxsplit=1)[0]
    middle = f"--load {whole.directory}/checkpoints/iter_0000012"
    flags = classify.replace(load, middle).replace(" --finetune", "")
    ranks = as_ranks("ranks", f"{flags} {LENGTH} {layout}", [RANK, RANK])
    assert ranks.status == 0, ranks.err
    for name in ("loss", "valid_loss", "valid_classification_accuracy"):
        wanted = [row[name] for row in whole.rows[12:] if name in row]
        found = [row[name] for row in ranks.rows if name in row]
        assert found == pytest.approx(wanted, rel=CLOSE)


def test_regression(
    train: Any, classify: str, bert: Any, files: Path, tokenizer: Tokenizer
) -> None:
    """A number is learned; the loss is the mean squared error of every row."""
    for name in ("train", "valid"):
        with (files / f"{name}.csv").open() as stream:
            rows = list(csv.DictReader(stream))
        lines = [
            {"text": row["first"], "score": COLORS.index(row["plain"]) * 1.5 - 1} for row in rows
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (files / f"numbers-{name}.jsonl").write_text(text)
    flags = (
        f"--load {bert.directory} --use-checkpoint-args --finetune --task regression --task-data"
        f" {files}/numbers-train.jsonl --task-valid-data {files}/numbers-valid.jsonl"
        f" --task-label score {LENGTH}"
    )
    run = train("run", flags, None)
    assert run.status == 0, run.err
    assert "task      regression\n" in run.err
    assert "valid_regression_accuracy" not in run.summary
    model, errors = head_of(run), []
    for line in (files / "numbers-valid.jsonl").read_text().splitlines():
        row = json.loads(line)
        tokens = torch.tensor([[2, *tokenizer.encode(row["text"])[:14], 3]])
        with torch.no_grad():
            states = model.hidden(tokens, torch.zeros_like(tokens))
            number = model.task_logits(states, torch.tensor([0])).item()
        errors.append((number - row["score"]) ** 2)
    assert run.summary["valid_loss"] == pytest.approx(np.mean(errors), rel=1e-4)
    assert run.summary["valid_loss"] < 0.5, "the mean alone has 1.5"
    bad = (files / "numbers-train.jsonl").read_text().replace("0.5", "NaN", 1)
    (files / "bad.jsonl").write_text(bad)
    wrong = train("wrong", flags.replace("numbers-train", "bad"), None)
    assert "bad.jsonl` line 2: the label, column `score`, is `NaN`, not a number" in wrong.err
