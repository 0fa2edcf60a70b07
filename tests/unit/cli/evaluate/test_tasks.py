"""Tasks that `lmcore evaluate` is asked for: a checkpoint's flag, and the list."""

from __future__ import annotations

import pytest

from lmcore.base.errors import ConfigError
from lmcore.cli.evaluate import run


@pytest.mark.parametrize(
    "line,message,hint",
    [
        ("--task GLUE --load X", "there is no task `GLUE`", ""),
        (
            "--task wikitext103_stream --task-data D --load X",
            "`--load X`: a checkpoint is given without a flag",
            "lmcore evaluate X --task wikitext103_stream",
        ),
        ("--task mnli --load=X", "`--load X`: a checkpoint", "lmcore evaluate X --task mnli"),
        ("--text a.txt --load X", "`--load X`: a checkpoint", "lmcore evaluate X"),
    ],
)
def test_a_checkpoint_by_a_flag(line: str, message: str, hint: str) -> None:
    """An unknown task comes first; of a known one the hint has the command without the flag."""
    with pytest.raises(ConfigError) as caught:
        run(line.split())
    assert caught.value.what.startswith(message)
    assert hint in str(caught.value.hint)


def test_each_name_has_a_space_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (stream,) = [line for line in lines if line.startswith("wikitext103_stream")]
    assert stream.split()[:2] == ["wikitext103_stream", "Perplexity"]
    (patterns,) = [line for line in lines if "hellaswag_val*.jsonl" in line]
    assert "files: hellaswag_val*.jsonl, hellaswag*.jsonl, of the release" in patterns
