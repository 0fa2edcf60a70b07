"""`lmcore data corpora`: the texts of lmcore, and the files of the corpora that a file names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.cli.data.corpora import run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a corpora file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LMCORE_CORPORA", raising=False)
    Path("a.jsonl").write_text('{"text": "a"}\n', "utf-8")
    Path("corpora.yaml").write_text("gone: b*.gz\nweb:\n  path: a.jsonl\n  summary: Pages.\n")


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Each name has its files and their size, or the reason why there are none."""
    assert run([]) == 0
    out = capsys.readouterr().out
    assert "shakespeare\n  Scenes" in out
    assert "gone\n  no file matches `b*.gz`, of corpora.yaml:1: b*.gz\n" in out
    assert "web\n  Pages.\n  1 file, 14 bytes, of corpora.yaml:2: a.jsonl\n" in out
    assert out.endswith("next: lmcore train --train-data web\n")


def test_other_sources(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The option comes before the variable, and the variable before the working directory."""
    Path("else.yaml").write_text("mine: a.jsonl\n", "utf-8")
    monkeypatch.setenv("LMCORE_CORPORA", "else.yaml")
    run(["--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row.get("files")) for row in rows] == [("shakespeare", None), ("mine", 1)]
    run(["--json", "--corpora", "x=a.jsonl"])
    assert json.loads(capsys.readouterr().out)[-1]["name"] == "x"
    with pytest.raises(ConfigError, match="cannot read the corpora file"):
        run(["--corpora", "no.yaml"])
