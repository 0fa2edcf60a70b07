"""Choice of the texts of a run: by name, by path, and what is wrong with them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.config.corpus import Corpus
from lmcore.config.load import load_config
from lmcore.data.prepare.choose_texts import choose_texts
from lmcore.data.prepare.named_text import BUNDLED, bundled_text
from lmcore.plugin.registrations import Registrations

OWN = {BUNDLED: bundled_text()}


def texts_of(flags: str, texts: Any = OWN) -> Any:
    loaded = load_config(flags.split())
    data = loaded.config.data
    sources, _ = loaded.sources
    return choose_texts(sources, texts, data.corpora, may_be_gone=data.lazy_loader)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a corpora file and some files."""
    monkeypatch.chdir(tmp_path)
    Path("web").mkdir()
    for name in ("a", "b", "held"):
        Path(f"web/{name}.jsonl").write_text(json.dumps({"text": name}) + "\n", "utf-8")
    Path("corpora.yaml").write_text("web: web/[ab].jsonl\nweb/held: web/held.jsonl\n", "utf-8")
    return tmp_path


def test_text_of_a_run() -> None:
    """By default the bundled text, also by its name; none where a dataset is named."""
    assert texts_of("") == texts_of("--corpus shakespeare") == OWN
    assert texts_of("--train-data shakespeare") == OWN
    assert texts_of("--data-path data") == {}
    with pytest.raises(ConfigError, match="`--corpus hamlet`"):
        texts_of("--corpus hamlet")
    with pytest.raises(ConfigError, match="`--valid-data hamlet`: no text has"):
        texts_of("--train-data shakespeare --valid-data hamlet")
    with pytest.raises(ConfigError) as caught:
        texts_of("--train-data wikipedia shakespeare c4/en")
    assert [one.what for one in (caught.value, *caught.value.others)] == [
        "`--train-data wikipedia`: no text has this name",
        "`--train-data c4/en`: no text has this name",
    ]


def test_names_and_paths() -> None:
    """A name of the corpora file, and a path without one."""
    Path("test.jsonl").write_text("", "utf-8")
    found = texts_of("--train-data web --valid-data web/held --test-data ./test.jsonl")
    assert [(type(one), one.name) for one in found.values()] == [
        (Corpus, "web"),
        (Corpus, "web/held"),
        (Corpus, "./test.jsonl"),
    ]


def test_unknown_name() -> None:
    """All names are listed, with the nearest, how to add one, and a plugin that might have it."""
    texts = Registrations(OWN, {}, {"mine": "failed: libx.so"})
    with pytest.raises(ConfigError) as caught:
        texts_of("--train-data web/hold", texts)
    assert caught.value.what == "`--train-data web/hold`: no text has this name"
    assert caught.value.why == "plugin `mine` might add it: it failed: libx.so"
    hint = str(caught.value.hint)
    assert "did you mean `web/held`? known: `web`, `web/held`, `shakespeare`" in hint
    assert "`web/hold: PATH` in `corpora.yaml`" in hint
    assert "`--train-data ./web/hold`" in hint


def test_missing_files() -> None:
    """A file that is gone is an error, unless the run trains on what was prepared."""
    Path("web/held.jsonl").unlink()
    with pytest.raises(DataError) as caught:
        texts_of("--train-data web/held")
    assert "corpus `web/held` (corpora.yaml:2): no such file: `web/held.jsonl`" in caught.value.what
    assert "`--lazy-loader`" in str(caught.value.hint)
    assert list(texts_of("--train-data web/held --lazy-loader")) == ["web/held"]
    with pytest.raises(DataError, match="no file matches"):
        texts_of("--train-data ./none/*.gz")


def test_missing_files_beside_the_settings() -> None:
    """The corpora file of the working directory is named if another one is read."""
    Path("jobs").mkdir()
    Path("jobs/corpora.yaml").write_text("web: web/*.jsonl\n", "utf-8")
    Path("jobs/run.yaml").write_text("data:\n  train_data: [web]\n", "utf-8")
    with pytest.raises(DataError, match=r"jobs/corpora.yaml:1") as caught:
        texts_of("jobs/run.yaml")
    assert "`corpora.yaml` of the working directory is read with `--co" in str(caught.value.hint)


def test_formats() -> None:
    """Files of two formats under one name are an error that offers a pattern."""
    Path("web/c.txt").write_text("text", "utf-8")
    with pytest.raises(ConfigError, match="files of several formats") as caught:
        texts_of("--train-data ./web")
    assert caught.value.why == "3 jsonl, 1 text"
    assert "`web/*.jsonl`" in str(caught.value.hint)


def test_training_files_held_out() -> None:
    """Validation on files of training is an error, also by another name or a link."""
    Path("link.jsonl").symlink_to("web/b.jsonl")
    for held in ("./web", "web", "link.jsonl"):
        with pytest.raises(ConfigError, match="reads files that the run trains on") as caught:
            texts_of(f"--train-data web --valid-data {held}")
        assert "`lmcore data split`" in str(caught.value.hint)
    assert len(texts_of("--train-data web --valid-data web/held")) == 2


def test_taken_name() -> None:
    """A name of lmcore or of a plugin cannot be given to files."""
    with pytest.raises(ConfigError, match="the name `shakespeare` is taken"):
        texts_of("--corpora shakespeare=web/a.jsonl --train-data shakespeare")


def test_wrong_corpora_file() -> None:
    """The mistakes of the file are reported, and no name that it would have given."""
    Path("bad.yaml").write_text("web:\n  pth: x\n", "utf-8")
    with pytest.raises(ConfigError) as caught:
        texts_of("--corpora bad.yaml --train-data web")
    assert caught.value.what == "bad.yaml:2: unknown key `pth`"
    assert caught.value.others == ()


@pytest.mark.parametrize(
    "flags, what",
    [
        ("--corpus web/a.jsonl", "`--corpus web/a.jsonl` is a path, not the name of a text"),
        ("--train-data ./pipe", "corpus `./pipe` cannot be read from `./pipe`"),
        ("--corpora x=- --train-data x", "corpus `x` (`--corpora x=-`) cannot be read from `-`"),
        ("--train-data https://x.org/a.gz", "cannot be read from `https://x.org/a.gz`"),
        ("--train-data ./empty", "corpus `./empty`: no known file in `./empty`"),
    ],
)
def test_what_is_no_file(flags: str, what: str) -> None:
    """A path in place of a name, a pipe, standard input, a URL and an empty directory."""
    os.mkfifo("pipe")
    Path("empty").mkdir()
    with pytest.raises((ConfigError, DataError)) as caught:
        texts_of(flags)
    assert what in caught.value.what
    assert "--lazy-loader" not in str(caught.value.hint)
