"""A file given for a directory, and a directory for a file, are problems that name the option."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore.base.errors import LmcoreError
from lmcore.config.load import load_config
from lmcore.config.option import CORPORA, NAMED
from lmcore.config.section import run_options
from lmcore.config.validate import problems_of

KINDS = {
    option.flag: option.metavar
    for option in run_options().values()
    if option.metavar in {"FILE", "DIR"} and option.paths not in {CORPORA, NAMED}
}
"""Every option of a run that takes one file or one directory."""


@pytest.mark.parametrize("flag", KINDS)
def test_the_other_kind(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option refuses the other kind, and the message does not speak of the installation."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("folder").mkdir()
    value = "folder" if KINDS[flag] == "FILE" else "file"
    needed = {
        "--task-data": ["--task", "classification"],
        "--task-valid-data": ["--task", "classification", "--task-data", "file"],
        "--vocab-file": ["--tokenizer-type", "BertWordPieceCase"],
        "--merge-file": ["--vocab-file", "file", "--tokenizer-type", "GPT2BPETokenizer"],
        "--bert-load": ["--model-family", "ict"],
    }
    try:
        loaded = load_config([flag, value, *needed.get(flag, [])])
        found = problems_of(loaded, world_size=1)
    except LmcoreError as problem:  # DeepSpeed's file is read with the settings
        found = [problem]
    assert len(found) == 1, found
    text = found[0].render()
    assert value in text
    assert "directory" in text
    assert "reinstall" not in text


def test_a_directory_of_datasets(tmp_path: Path) -> None:
    """A directory in place of a dataset's prefix: the hint names the datasets in it."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text_document{suffix}").touch()
    (problem,) = problems_of(load_config(["--data-path", str(tmp_path)]), world_size=1)
    assert f"`{tmp_path}/text_document`" in str(problem.hint)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--model-family ict --load a --ict-load b", "found `--load a` and `--ict-load b`"),
        ("--model-family ict --bert-load a --ict-load b", "both give the run its first weights"),
        ("--model-family ict --bert-load a --load b --finetune", "both give the run its first"),
        ("--model-family bert --ict-load a", "is for `--model-family ict`"),
    ],
)
def test_two_checkpoints_to_begin_with(
    flags: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused, and so are the encoders of ICT for another family."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).mkdir()
    found: list[LmcoreError]
    try:
        found = problems_of(load_config(flags.split()), world_size=1)
    except LmcoreError as problem:
        found = [problem]
    assert any(words in one.render() for one in found), found


def test_a_resumed_run_may_name_the_bert_that_it_began_with(tmp_path: Path) -> None:
    """The command of a run continues it: `--bert-load` counts only without a checkpoint."""
    flags = f"--model-family ict --bert-load {tmp_path} --load {tmp_path}"
    assert not problems_of(load_config(flags.split()), world_size=1)
