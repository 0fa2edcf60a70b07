"""`lmcore data corpora`: the texts of lmcore, and the files of the corpora that a file names."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import ConfigError
from lmcore.base.lock import LockFile
from lmcore.cli.data.corpora import run
from lmcore.config.corpus import Corpus
from lmcore.data.prepare.corpus import _Preparation, prepare_corpus
from lmcore.data.prepare.corpus_cache import cache_entries
from lmcore.data.tokenizer import ByteTokenizer


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


def test_next_command_of_a_book(capsys: pytest.CaptureFixture[str]) -> None:
    """The command names the corpora that flags gave, and does not divide a single document."""
    Path("my book.txt").write_text("A whale.\n\nIt dives.\n", "utf-8")
    run(["--corpora", "book=my book.txt"])
    (printed,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("next: ")]
    words = ["--train-data", "book", "--corpora", "book=my book.txt", "--eval-iters", "0"]
    assert shlex.split(printed) == ["next:", "lmcore", "train", *words]


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


@pytest.fixture
def cache() -> Path:
    """Cache with an entry that was used 40 days ago, one of today and an interrupted one."""
    texts = {"old": "a", "new": "b", "cut": "c"}
    for name, text in texts.items():
        Path(f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n", "utf-8")
    corpora = [Corpus(name, (f"{name}.jsonl",)) for name in texts]
    made = {
        one.name: Path(prepare_corpus(one, ByteTokenizer(), Path("cache")).prefix)
        for one in corpora
    }
    (before,) = made["cut"].parent.glob("*.meta.json")
    before.unlink()
    for name in ("old", "cut"):
        os.utime(made[name].parent, (time.time() - 40 * 86400,) * 2)
    return Path("cache")


def entries(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["--cache", "cache", "--json", *flags]) == 0
    return {row["name"].partition("_")[0]: row for row in json.loads(capsys.readouterr().out)}


def test_cache_is_listed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each entry has its size, its last use, and whether its preparation came to an end."""
    assert run(["--cache", str(cache)]) == 0
    out = capsys.readouterr().out
    assert out.count("used 40 days ago") == 2
    assert out.count("used 40 days ago, its preparation was interrupted") == 1
    assert out.count("used today") == 1
    assert "cache/corpora: 3 entries, " in out
    rows = entries(capsys)
    folder = Path(rows["new"]["path"])
    assert rows["new"]["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert {name: row["complete"] for name, row in rows.items()} == {
        "old": True,
        "new": True,
        "cut": False,
    }


def test_unused_entries_are_removed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Entries are removed by their days without use, or by key alone; a run makes them again."""
    assert entries(capsys, "--prune", "--unused-days", "41") == {}
    assert entries(capsys, "--prune").keys() == {"old", "cut"}
    assert entries(capsys).keys() == {"new"}
    again = prepare_corpus(Corpus("old", ("old.jsonl",)), ByteTokenizer(), cache)
    assert Path(f"{again.prefix}.idx").is_file()
    key = entries(capsys)["new"]["key"]
    assert entries(capsys, "--prune", "--key", key[:6]).keys() == {"new"}
    assert entries(capsys).keys() == {"old"}
    assert not list(cache.rglob(".*")), "nothing is left over"


def test_use_is_recorded(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that finds an entry keeps it from being removed."""
    prepare_corpus(Corpus("old", ("old.jsonl",)), ByteTokenizer(), cache)
    assert entries(capsys, "--prune").keys() == {"cut"}


def test_what_is_being_prepared_stays(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither by its age nor by its key is an entry removed whose lock a process holds."""
    key = entries(capsys)["cut"]["key"]
    with LockFile(cache / f"corpora/{key}.lock").held() as is_held:
        assert is_held
        assert entries(capsys)["cut"]["being_prepared"]
        assert entries(capsys, "--prune").keys() == {"old"}
        with pytest.raises(ConfigError, match="it is being prepared"):
            run(["--cache", "cache", "--prune", "--key", key])
        (found,) = (one for one in cache_entries(cache / "corpora") if one.key == key)
        assert not found.remove()
    assert entries(capsys).keys() == {"new", "cut"}


def test_an_entry_is_locked_while_it_is_prepared(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--prune` during a preparation takes nothing of it."""
    original, seen = _Preparation._prepare, []

    def prepare(self: Any, files: Any) -> None:
        original(self, files)
        os.utime(self._key_folder(files), (0, 0))
        seen.append(entries(capsys, "--prune").keys())

    monkeypatch.setattr(_Preparation, "_prepare", prepare)
    Path("slow.jsonl").write_text('{"text": "slow"}\n', "utf-8")
    made = prepare_corpus(Corpus("slow", ("slow.jsonl",)), ByteTokenizer(), cache)
    assert seen == [{"old", "cut"}]
    assert Path(f"{made.prefix}.idx").is_file()


@pytest.mark.parametrize(
    "flags,what",
    [
        (["--cache", "nowhere"], "`nowhere` has no prepared corpora"),
        (["--prune"], "`--prune` needs `--cache DIR`"),
        (["--cache", "cache", "--key", "a"], "`--key` needs `--prune`"),
        (["--cache", "cache", "--prune", "--key", "x"], "no entry has such a key"),
        (["--cache", "cache", "--prune", "--key", ""], "entries have such keys|empty"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_wrong_uses_of_the_cache(flags: list[str], what: str) -> None:
    """Nothing is removed by mistake."""
    with pytest.raises(ConfigError, match=what):
        run(flags)
    assert len(cache_entries(Path("cache/corpora"))) == 3
