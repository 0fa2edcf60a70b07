"""Scripts of `examples/`: arguments are checked before anything is written or trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def output(*words: str, folder: Path) -> tuple[int, str]:
    """Return the status of a command in *folder*, and what it prints."""
    done = subprocess.run(
        words,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "script, words, message",
    [
        ("intel_gpt_3_6b", "c4 v.json", "usage:"),
        ("intel_gpt_3_6b", "none v.json v.json v.json", "no such file: `none`"),
        ("intel_gpt_3_6b", "c4 v.json v.json v.json", "`c4/en` has no c4-train.*.json.gz"),
        ("turkish_gpt2", "c4/*.jsonl v.json v.json v.json", "no such file: `c4/*.jsonl`"),
        ("turkish_gpt2", "*.json v.json v.json valid.tsv", "no such file: `valid.tsv`"),
        ("bigscience_deepspeed", "v.json v.json v.json held.txt", "no such file: `held.txt`"),
        ("argonne_llama", "c4 epochs.txt c4 c4", "no such file: `epochs.txt`"),
        ("argonne_models", "v.json tasks", "no such file: `tasks`"),
        ("train_bpe", "v.json v.json m.txt", "no such file: `m.txt`"),
        ("train_bpe", "v.json", "usage:"),
    ],
)
def test_arguments_come_first(script: str, words: str, message: str, tmp_path: Path) -> None:
    """A missing file ends the script, which writes nothing, so that it can start again."""
    (tmp_path / "c4").mkdir()
    (tmp_path / "v.json").touch()
    run = str(EXAMPLES / f"{script}.sh")
    status, printed = output(run, "runs/a", *words.split(), folder=tmp_path)
    assert status == 2
    assert message in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c4", "v.json"]


def test_throughput_of_no_run(tmp_path: Path) -> None:
    """A run that has not begun is named."""
    script = str(EXAMPLES / "aws_slurm_kubernetes/throughput.py")
    status, printed = output(sys.executable, script, "runs/a", folder=tmp_path)
    assert status == 1
    assert printed == "runs/a has no metrics.jsonl: no run has begun there\n"
