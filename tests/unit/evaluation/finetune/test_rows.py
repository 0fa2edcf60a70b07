"""Rows of each release: columns, labels and what is refused, on made files and the shared ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.evaluation.finetune import TUNED
from lmcore.evaluation.finetune.files import (
    checksum_of,
    find_part,
    labelled_file,
    name_of,
    rows_of,
    write_rows,
)
from lmcore.evaluation.finetune.metrics import TUNED_METRICS
from lmcore.evaluation.finetune.record import TunedTask, cleaned, require_head

BY_NAME = {task.name: task for task in TUNED}
MNLI = "index promptID pairID genre s1_binary s2_binary s1_parse s2_parse sentence1 sentence2"
MADE = {
    # Task: header, row, texts, label; columns as in GLUE's release.
    "mnli": (
        f"{MNLI} label1 label2 gold_label",
        ["0", *"1234567", 'A "b c.', "d  e", "neutral", "neutral", "entailment"],
        ('A "b c.', "d e"),
        "entailment",
    ),
    "qqp": (
        "id qid1 qid2 question1 question2 is_duplicate",
        ["9", "1", "2", "Why?", "Why not?", "1"],
        ("Why?", "Why not?"),
        "1",
    ),
    "qnli": (
        "index question sentence label",
        ["0", "Who?", "He.", "not_entailment"],
        ("Who?", "He."),
        "not_entailment",
    ),
    "sst2": ("sentence label", ["a fine film ", "1"], ("a fine film",), "1"),
    "rte": (
        "index sentence1 sentence2 label",
        ["3", "It rains.", "It is wet.", "entailment"],
        ("It rains.", "It is wet."),
        "entailment",
    ),
    "mrpc": (
        "\ufeffQuality,#1 ID,#2 ID,#1 String,#2 String",
        ["0", "70", "71", "x y", "z"],
        ("x y", "z"),
        "0",
    ),
    "stsb": (
        "index genre filename year old_index source1 source2 sentence1 sentence2 score",
        ["0", *"123456", "a", "b", "3.800"],
        ("a", "b"),
        3.8,
    ),
}


def made(name: str, path: Path) -> Path:
    """Write the made table of a task."""
    header, row, *_ = MADE[name]
    columns = header.split("," if "," in header else " ")
    path.write_text("\t".join(columns) + "\n" + "\t".join(row) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", MADE)
def test_columns(name: str, tmp_path: Path) -> None:
    """The texts and the label of each release; quotes mean nothing; white space is single."""
    path = made(name, tmp_path / "train.tsv")
    (row,) = rows_of(BY_NAME[name], path)
    assert (row.texts, row.label) == MADE[name][2:]
    assert row.where == f"line 2 of `{path}`"
    compressed = tmp_path / "train.tsv.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert rows_of(BY_NAME[name], compressed)[0].texts == row.texts
    assert all(metric in TUNED_METRICS for metric in BY_NAME[name].metrics)
    assert BY_NAME[name].pair == (len(row.texts) == 2)


def test_cola(tmp_path: Path) -> None:
    """Training and validation have no header; the test has one, and no labels."""
    task = BY_NAME["cola"]
    (tmp_path / "dev.tsv").write_text("gj04\t1\t\tThe dog ran.\ncj99\t0\t*\tDog the ran.\n")
    rows = rows_of(task, tmp_path / "dev.tsv")
    assert [(row.texts[0], row.label) for row in rows] == [
        ("The dog ran.", "1"),
        ("Dog the ran.", "0"),
    ]
    assert rows[0].where.startswith("line 1 of")
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\tBill ran.\n")
    (row,) = rows_of(task, tmp_path / "test.tsv")
    assert (row.texts, row.label) == (("Bill ran.",), None)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda text: text.replace("\tentailment", "\t-"), "line 2 of"),
        (lambda text: text.replace("\tentailment", "\tEntailment"), "a label outside the set"),
        (lambda text: text.replace("sentence2\t", "second\t"), "names no column `sentence2`"),
        (lambda text: text.replace("promptID\t", "sentence1\t"), "names 2 columns `sentence1`"),
        (lambda text: text.replace("\tentailment", "\tx\tentailment"), "has 14 fields, the table"),
        (lambda text: text.splitlines()[0], "has no rows of the task `mnli`"),
        (lambda _text: "", "is empty"),
        (lambda _text: None, "there is no"),
        (lambda _text: b"a\xff\tb\n", "is not UTF-8"),
    ],
)
def test_wrong_tables(change: Any, message: str, tmp_path: Path) -> None:
    """The line is named, or the column."""
    path = made("mnli", tmp_path / "train.tsv")
    changed = change(path.read_text())
    path.unlink()
    if changed is not None:
        path.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    with pytest.raises(DataError) as caught:
        rows_of(BY_NAME["mnli"], path)
    assert message in caught.value.what


def test_a_folder_in_place_of_a_table(tmp_path: Path) -> None:
    """The hint says that a file in it is read."""
    with pytest.raises(DataError) as caught:
        rows_of(BY_NAME["mnli"], tmp_path)
    assert caught.value.why == "Is a directory"
    assert caught.value.hint == f"give a file in it, as `{tmp_path}/FILE`"


@pytest.mark.parametrize(
    "label,hint", [("-", "leave rows without"), ("", "leave rows without"), ("yes", "correct")]
)
def test_the_hint_of_a_wrong_label(tmp_path: Path, label: str, hint: str) -> None:
    """A row without a label is another mistake than one with another label."""
    path = made("mnli", tmp_path / "train.tsv")
    path.write_text(path.read_text().replace("\tentailment", f"\t{label}"))
    with pytest.raises(DataError, match="a label outside the set") as caught:
        rows_of(BY_NAME["mnli"], path)
    assert hint in str(caught.value.hint)


def test_a_table_with_commas(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("sentence,label\ngood,1\n")
    with pytest.raises(DataError, match="names no column `sentence`") as caught:
        rows_of(BY_NAME["sst2"], path)
    assert "separate the fields by tabs" in str(caught.value.hint)


def test_why_there_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("sentence\tlabel\n")
    with pytest.raises(DataError) as caught:
        rows_of(BY_NAME["sst2"], path)
    assert caught.value.why == "it has a header alone"


def test_wrong_numbers(tmp_path: Path) -> None:
    path = made("stsb", tmp_path / "train.tsv")
    path.write_text(path.read_text().replace("3.800", "nan"))
    with pytest.raises(DataError, match="has a label that is no number"):
        rows_of(BY_NAME["stsb"], path)


def test_rows_that_qqp_leaves_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows with another number of fields or an empty question are left out."""
    path = made("qqp", tmp_path / "train.tsv")
    path.write_text(path.read_text() + "7\t1\t2\tonly\n8\t1\t2\t \tb\t0\n9\t1\t2\ta\tb\t0\n")
    assert [row.label for row in rows_of(BY_NAME["qqp"], path)] == ["1", "0"]
    assert "2 rows left out" in caplog.text


def article(**changes: Any) -> dict[str, Any]:
    """Return an article of RACE with two questions."""
    return {
        "article": "One .\nTwo . Three.",
        "questions": ["He likes ___ and _ .", "Who?"],
        "options": [["a\\1", "b", "c", "d"], ["e", "f", "g", "h"]],
        "answers": ["B", "D"],
        **changes,
    }


def test_race(tmp_path: Path) -> None:
    """A choice is put into each blank, or after the question; folders are found by level."""
    for level in ("middle", "high"):
        folder = tmp_path / "RACE/dev" / level
        folder.mkdir(parents=True)
        (folder / "1.txt").write_text(json.dumps(article()))
    task = BY_NAME["race"]
    found = find_part(task, tmp_path, "valid")
    assert [name_of(path) for path in found] == ["dev/middle", "dev/high"]
    assert find_part(task, tmp_path / "RACE", "valid") == found
    assert find_part(BY_NAME["race_high"], tmp_path, "valid") == found[1:]
    assert find_part(task, tmp_path, "test", needed=False) == []
    with pytest.raises(DataError, match="has no training data of the task `race`"):
        find_part(task, tmp_path, "train")
    first, second = rows_of(task, found[0])
    assert first.texts == ("One. Two. Three.",)
    assert first.choices[0] == "He likes a\\1 and a\\1 ."
    assert (first.label, second.label) == (1, 3)
    assert second.choices == ("Who? e", "Who? f", "Who? g", "Who? h")
    path = tmp_path / "bad.txt"
    path.write_text(json.dumps(article(answers=["B", "E"])))
    with pytest.raises(DataError, match="a label outside the set"):
        rows_of(task, path)


def test_files_of_glue(tmp_path: Path) -> None:
    """In the folder of all tasks, or of this one; both files of MNLI are of the validation."""
    for name in ("train", "dev_matched", "dev_mismatched"):
        (tmp_path / "glue_data/MNLI").mkdir(parents=True, exist_ok=True)
        made("mnli", tmp_path / f"glue_data/MNLI/{name}.tsv")
    wanted = ["dev_matched.tsv", "dev_mismatched.tsv"]
    for place in ("", "glue_data", "glue_data/MNLI"):
        found = find_part(BY_NAME["mnli"], tmp_path / place, "valid")
        assert [name_of(path) for path in found] == wanted


def test_lines_for_training(tmp_path: Path) -> None:
    """Texts, choices and labels, as `lmcore train --task` reads them; no labels are refused."""
    target = tmp_path / "out.jsonl"
    mnli, race, rte = BY_NAME["mnli"], BY_NAME["race"], BY_NAME["rte"]
    files = (labelled_file(mnli, made("mnli", tmp_path / f"{name}.tsv")) for name in "ab")
    assert write_rows(files, target) == 2
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert lines == [{"text": 'A "b c.', "text2": "d e", "label": "entailment"}] * 2
    (tmp_path / "1.txt").write_text(json.dumps(article()))
    write_rows([labelled_file(race, tmp_path / "1.txt")], target)
    second = json.loads(target.read_text().splitlines()[1])
    assert (second["label"], second["choices"][3]) == (3, "Who? h")
    (tmp_path / "test.tsv").write_text("index\tsentence1\tsentence2\n0\ta\tb\n")
    with pytest.raises(DataError, match=r"test.tsv` has no labels") as caught:
        labelled_file(rte, tmp_path / "test.tsv")
    assert "names no column `label`" in str(caught.value.why)


def test_megatron_order_of_labels() -> None:
    """MNLI's labels are contradiction 0, entailment 1, neutral 2."""
    assert BY_NAME["mnli"].labels == ("contradiction", "entailment", "neutral")


@pytest.mark.parametrize(
    "name, head, labels, fits",
    [
        ("mnli", "classification", ("neutral", "contradiction", "entailment"), True),
        ("mnli", "classification", ("neutral", "no", "entailment"), False),
        ("mnli", "multiple-choice", (), False),
        ("race", "multiple-choice", (), True),
        ("stsb", "regression", (), True),
        ("sst2", "classification", ("0", "1", "2"), False),
    ],
)
def test_heads(name: str, head: str, labels: tuple[str, ...], fits: bool) -> None:
    """The classes may have another order."""
    task: TunedTask = BY_NAME[name]
    if fits:
        require_head(task, head, labels, Path("run"))
        return
    with pytest.raises(ConfigError):
        require_head(task, head, labels, Path("run"))


def test_cleaned() -> None:
    """Spaces are as by Megatron's `clean_text`."""
    assert cleaned(" a\n b . c . d .") == "a b. c. d ."


def test_shared_samples(shared_data: Path) -> None:
    """Rows of GLUE's files of all parts; 500 rows of MNLI; questions of RACE."""
    samples = shared_data / "evals/glue-format-samples"
    for name, counts in {"mnli": (3, 4, 2), "qqp": (3, 2, 1)}.items():
        task = BY_NAME[name]
        found = tuple(
            sum(len(rows_of(task, path)) for path in find_part(task, samples, part))
            for part in ("train", "valid", "test")
        )
        assert found == counts
        (test, *_) = find_part(task, samples, "test")
        assert all(row.label is None for row in rows_of(task, test))
    rows = rows_of(BY_NAME["mnli"], shared_data / "evals/mnli/dev_matched.tsv")
    assert len(rows) == 500
    assert {row.label for row in rows} <= {*BY_NAME["mnli"].labels}
    questions = rows_of(BY_NAME["race"], shared_data / "evals/race_plus/dev")
    assert len(questions) > 50
    assert all(0 <= int(row.label or 0) < len(row.choices) for row in questions)


def test_checksums(tmp_path: Path) -> None:
    """Of a file as `sha256sum` prints it; of a folder, equal for equal names and contents."""
    (tmp_path / "a.tsv").write_text("abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert checksum_of(tmp_path / "a.tsv") == known
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        for name in ("1.txt", "2.txt"):
            (tmp_path / place / name).write_text(name)
    first = checksum_of(tmp_path / "one")
    assert checksum_of(tmp_path / "two") == first
    (tmp_path / "two/2.txt").write_text("2.txT")
    assert checksum_of(tmp_path / "two") != first
    (tmp_path / "one/2.txt").rename(tmp_path / "one/3.txt")
    assert checksum_of(tmp_path / "one") != first
