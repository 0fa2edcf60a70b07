"""Corpora files: what they name, how they are found, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.corpus import Corpus
from lmcore.config.file.corpora_file import read_corpora
from lmcore.config.load import load_config

LONG = """\
# Corpora of the group.
c4/en: c4/en/c4-train.*.json.gz
wiki:
  path: [wiki/a.jsonl, /data/b.jsonl.xz]
  json-key: body
  append_eod: false
  on_error: skip
  summary: Articles.
plain:
  path: "*.txt"
  document_per: paragraph
  input_format: text
"""


def test_short_and_long_entries(tmp_path: Path) -> None:
    """A name has one path, or several keys; relative paths are relative to the file."""
    path = tmp_path / "corpora.yaml"
    path.write_text(LONG, "utf-8")
    found, problems = read_corpora([str(path)])
    assert problems == []
    assert list(found) == ["c4/en", "wiki", "plain"]
    place = f"{tmp_path}/c4/en/c4-train.*.json.gz"
    assert found["c4/en"] == Corpus("c4/en", (place,), where=f"{path}:2")
    assert found["wiki"] == Corpus(
        *("wiki", (f"{tmp_path}/wiki/a.jsonl", "/data/b.jsonl.xz"), "body"),
        append_eod=False,
        skip=True,
        summary="Articles.",
        where=f"{path}:3",
    )
    assert (found["plain"].document_per, found["plain"].input_format) == ("paragraph", "text")


def test_inline() -> None:
    """`NAME=PATH` needs no file, and its path may have the character."""
    found, problems = read_corpora(["c4/en=x/*.gz", "b=a=b.jsonl"])
    assert problems == []
    assert [one.paths for one in found.values()] == [("x/*.gz",), ("a=b.jsonl",)]


@pytest.mark.parametrize(
    "text, what, hint",
    [
        ("- a\n", "does not give names to paths", "NAME: PATH"),
        ("x: *.gz\n", ":1: not YAML", "quote a pattern"),
        ("x: [a\n", ":2: not YAML", "NAME: PATH"),
        ("x:\n  pth: a\n", ":2: unknown key `pth`", "did you mean `path`?"),
        ("x.jsonl: a\n", ":1: `x.jsonl` is not a name", "letters"),
        ("/x: a\n", ":1: `/x` is not a name", "letters"),
        ("x:\n  path: a\n  on_error: no\n", ":3: `on_error: no`: unknown choice", "`skip`"),
        ("x:\n", ":1: corpus `x` has no path", "NAME: PATH"),
        ("x:\n  json_key: a\n", ":1: corpus `x` has no path", "NAME: PATH"),
        ("x:\n  path: a\n  json_key: [b, c]\n", ":3: `json_key` takes a value", "NAME"),
        ("x:\n  path: [[a]]\n", ":2: `path` takes a value", "NAME"),
        ("x: a\nx: b\n", ":2: there are two corpora `x`", "another name"),
        ("x: " + "[" * 90 + "\n", ": not YAML", ""),
        ("x: !glob a.gz\n", ":1: not YAML", "quote a pattern"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, what: str, hint: str) -> None:
    """Each mistake is named with its line."""
    path = tmp_path / "corpora.yaml"
    path.write_text(text, "utf-8")
    _, (problem, *_) = read_corpora([str(path)])
    assert what in problem.what
    assert hint in str(problem.hint)


@pytest.mark.parametrize(
    "value, what",
    [
        ("web", "`--corpora web` is not NAME=PATH"),
        ("web=", "`--corpora web=` is not NAME=PATH"),
        ("./x=y", "`--corpora ./x=y`: `./x` is not a name"),
        ("no.yaml", "cannot read the corpora file `no.yaml`"),
    ],
)
def test_wrong_values(value: str, what: str) -> None:
    """So is a value of the option."""
    found, (problem,) = read_corpora([value])
    assert (found, problem.what) == ({}, what)


def test_unreadable(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are an error, not a traceback."""
    (tmp_path / "x.yaml").write_bytes(b"x: \xff")
    _, (problem,) = read_corpora([str(tmp_path / "x.yaml")])
    assert "not UTF-8" in str(problem.why)


def corpora_of(*argv: str) -> tuple[tuple[str, ...], str]:
    loaded = load_config(list(argv))
    return loaded.config.data.corpora, str(loaded.provenance["corpora"])


def test_found_without_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option, the variable, the folder of the run file, and the working directory, in turn."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LMCORE_CORPORA", raising=False)
    use = ("--train-data", "web")
    assert corpora_of(*use) == ((), "default")
    Path("corpora.yaml").write_text("web: x\n", "utf-8")
    assert corpora_of(*use) == (("corpora.yaml",), "corpora.yaml")
    Path("runs").mkdir()
    Path("runs/run.yaml").write_text("data:\n  train_data: [web]\n", "utf-8")
    assert corpora_of("runs/run.yaml") == ((), "default")
    Path("runs/corpora.yaml").write_text("web: x\n", "utf-8")
    assert corpora_of("runs/run.yaml")[0] == ("runs/corpora.yaml",)
    monkeypatch.setenv("LMCORE_CORPORA", "else.yaml")
    assert corpora_of(*use) == (("else.yaml",), "environment: LMCORE_CORPORA")
    assert corpora_of(*use, "--corpora", "web=y")[0] == ("web=y",)


@pytest.mark.parametrize("argv", [(), ("--data-path", "x"), ("--valid-data", "web=x")])
def test_not_searched(argv: tuple[str, ...], tmp_path: Path, monkeypatch: Any) -> None:
    """A run that names no text has no corpora file."""
    monkeypatch.chdir(tmp_path)
    Path("corpora.yaml").write_text("web: x\n", "utf-8")
    assert corpora_of(*argv) == ((), "default")


def test_relative_to_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in a file of settings are relative to it; names are not paths."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/run.yaml").write_text(
        "data:\n  train_data: [c4/en, x.jsonl, './d']\n  valid_data: [web=v.jsonl]\n"
        "  corpora: [my.yaml, 'c4/en=d/*.gz']\n",
        "utf-8",
    )
    data = load_config(["runs/run.yaml"]).config.data
    assert data.train_data == ("c4/en", "runs/x.jsonl", "runs/d")
    assert data.valid_data == ("web=runs/v.jsonl",)
    assert data.corpora == ("runs/my.yaml", "c4/en=runs/d/*.gz")


def test_cache_dir_of_megatron() -> None:
    """`--cache-dir` of Intel's Megatron is `--data-cache-path`; with both the latter counts."""
    assert load_config(["--cache-dir", "a"]).config.data.data_cache_path == "a"
    both = load_config(["--cache-dir", "a", "--data-cache-path", "b"])
    assert both.config.data.data_cache_path == "b"


def test_validation_set_of_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NAME=CORPUS is a set of a corpus; a dataset with the prefix comes first, as before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LMCORE_CORPORA", raising=False)
    Path("runs").mkdir()
    Path("runs/corpora.yaml").write_text("c4/en: c.jsonl\nweb: w.jsonl\n", "utf-8")
    Path("runs/run.yaml").write_text("data:\n  valid_data: [a=c4/en, b=web, c=p/x]\n", "utf-8")
    for ending in ("idx", "bin"):
        Path(f"runs/web.{ending}").touch()
    loaded = load_config(["runs/run.yaml"])
    assert loaded.config.data.corpora == ("runs/corpora.yaml",)
    assert loaded.config.data.valid_data[:2] == ("a=c4/en", "b=runs/web")
    sets = loaded.sources[0].sets
    assert [(s.name, s.corpus) for blend in sets.values() for s in blend.sources] == [
        ("c4/en", True),
        ("runs/web", False),
        ("p/x", False),
    ]
    monkeypatch.chdir(tmp_path / "runs")
    inline = load_config(["--data-path", "x", "--valid-data", "a=z", "--corpora", "z=v.jsonl"])
    assert inline.sources[0].sets["a"].sources[0].corpus
    found = load_config(["--data-path", "x", "--valid-data", "a=web"])
    assert not found.sources[0].sets["a"].sources[0].corpus
    assert found.config.data.corpora == ()


def test_validation_set_of_a_file() -> None:
    """NAME=FILE is a set of a corpus, NAME=PREFIX of an indexed dataset, as before."""
    loaded = load_config(["--data-path", "x", "--valid-data", "a=v.jsonl.gz", "b=p/x.bin"])
    found, problems = loaded.sources
    if problems:
        raise ConfigError.collect(problems)
    assert [(s.name, s.corpus) for blend in found.sets.values() for s in blend.sources] == [
        ("v.jsonl.gz", True),
        ("p/x", False),
    ]
