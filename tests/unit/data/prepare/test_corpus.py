"""Preparation of corpora: found again by content, complete or not there, safe against a kill."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import lzma
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.config.corpus import Corpus
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.prepare import corpus as corpus_module
from lmcore.data.prepare import partial_output
from lmcore.data.prepare.corpus import PreparedCorpus, prepare_corpus
from lmcore.data.prepare.request import PrepareRequest
from lmcore.data.prepare.run import prepare
from lmcore.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer

TEXTS = [f"document {i}: " + "the cat sat " * 5 for i in range(30)]


def compressed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def lines(texts: list[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({key: text, "url": "x"}).encode() + b"\n" for text in texts)


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """New files need no wait."""
    monkeypatch.setattr(corpus_module, "_SETTLED_SECONDS", 0.0)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Three shards, one of them of two gzip members."""
    for i in range(3):
        part = TEXTS[10 * i : 10 * i + 10]
        content = compressed(lines(part[:4])) + compressed(lines(part[4:]))
        (tmp_path / f"web-{i}.json.gz").write_bytes(content)
    return Corpus("c4/en", (f"{tmp_path}/web-*.json.gz",))


def documents(made: PreparedCorpus) -> list[str]:
    data = IndexedDataset(made.prefix)
    ids = [data.document(i) for i in range(data.document_count)]
    assert all(one[-1] == ByteTokenizer().eod for one in ids)
    return [bytes(one[:-1].astype("u1")).decode() for one in ids]


def made_in(corpus: Corpus, folder: Path, **options: Any) -> PreparedCorpus:
    return prepare_corpus(corpus, ByteTokenizer(), folder / "cache", **options)


def folders(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache/corpora").iterdir() if path.is_dir()}


def test_same_as_the_command(corpus: Corpus, tmp_path: Path) -> None:
    """The dataset has the documents in order, byte for byte as `lmcore data prepare` writes it."""
    made = made_in(corpus, tmp_path)
    assert documents(made) == TEXTS
    assert Path(made.prefix).name == "c4-en_text_document"
    prepare(PrepareRequest(corpus.paths, f"{tmp_path}/own", ByteTokenizer(), append_eod=True))
    for ending in ("bin", "idx"):
        own = Path(f"{tmp_path}/own_text_document.{ending}")
        assert own.read_bytes() == Path(f"{made.prefix}.{ending}").read_bytes()


def test_prepared_once(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call reads no file and encodes nothing; nor does one of the same content."""
    made = made_in(corpus, tmp_path)

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr("lmcore.data.prepare.run.prepare", refused)
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "_sha256", refused)
        assert made_in(corpus, tmp_path) == made
    for path in tmp_path.glob("web-*"):
        os.utime(path, ns=(1, 1))
    assert made_in(corpus, tmp_path) == made
    (tmp_path / "moved").mkdir()
    for path in tmp_path.glob("web-*"):
        shutil.copy(path, tmp_path / "moved")
    moved = Corpus("other", (f"{tmp_path}/moved/*",), input_format="jsonl")
    assert made_in(moved, tmp_path) == made


@pytest.mark.parametrize("change", ["edit", "add", "remove", "rename"])
def test_never_stale(corpus: Corpus, tmp_path: Path, change: str) -> None:
    """Every change of the files gives another dataset; the old content finds the old one."""
    before = made_in(corpus, tmp_path)
    path = tmp_path / "web-1.json.gz"
    content, found = path.read_bytes(), path.stat()
    if change == "edit":  # of the same size, with the same time
        path.write_bytes(compressed(lines([*TEXTS[10:19], TEXTS[19].upper()])))
    elif change == "add":
        (tmp_path / "web-9.json.gz").write_bytes(compressed(lines(["more"])))
    elif change == "remove":
        path.unlink()
    else:
        path.rename(tmp_path / "web-3.json.gz")
    if path.exists():
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    after = made_in(corpus, tmp_path)
    expected = {
        "edit": [*TEXTS[:19], TEXTS[19].upper(), *TEXTS[20:]],
        "add": [*TEXTS, "more"],
        "remove": TEXTS[:10] + TEXTS[20:],
        "rename": TEXTS[:10] + TEXTS[20:] + TEXTS[10:20],
    }[change]
    assert documents(after) == expected
    assert (after.prefix == before.prefix, after.digest == before.digest) == (False, False)
    for extra in (tmp_path / "web-9.json.gz", tmp_path / "web-3.json.gz"):
        extra.unlink(missing_ok=True)
    path.write_bytes(content)
    assert made_in(corpus, tmp_path) == before


def test_key(corpus: Corpus, tmp_path: Path) -> None:
    """Tokenizer and settings are part of the key; the digest of the content has no tokenizer."""
    made = made_in(corpus, tmp_path)
    other: Tokenizer = build_tokenizer(
        "NullTokenizer", vocab_file=None, merge_file=None, vocab_size=300
    )
    numbers = tmp_path / "n.jsonl"
    numbers.write_bytes(lines(["1 2 3", "4"]))
    ids = Corpus("n", (str(numbers),))
    null = prepare_corpus(ids, other, tmp_path / "cache")
    assert null.prefix != made_in(ids, tmp_path).prefix
    assert null.digest == made_in(ids, tmp_path).digest
    without = Corpus(corpus.name, corpus.paths, append_eod=False)
    assert made_in(without, tmp_path).prefix != made.prefix
    url = Corpus(corpus.name, corpus.paths, json_key="url")
    assert documents(made_in(url, tmp_path)) == ["x"] * 30
    assert len(folders(tmp_path)) == 5


def test_formats(tmp_path: Path) -> None:
    """Plain text, tables and other compressions are read as `lmcore data prepare` reads them."""
    (tmp_path / "a.txt").write_text("one\ntwo\n", "utf-8")
    (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress(lines(TEXTS[:2])))
    (tmp_path / "c.csv").write_text("body,n\nx y,1\n", "utf-8")
    text = Corpus("a", (f"{tmp_path}/a.txt",), document_per="line")
    assert documents(made_in(text, tmp_path)) == ["one", "two"]
    assert documents(made_in(Corpus("b", (f"{tmp_path}/b.jsonl.xz",)), tmp_path)) == TEXTS[:2]
    table = Corpus("c", (f"{tmp_path}/c.csv",), json_key="body")
    assert documents(made_in(table, tmp_path)) == ["x y"]


def test_files_gone(corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With `--lazy-loader` what was prepared is used; without, and with a new tokenizer, not."""
    made = made_in(corpus, tmp_path)
    for path in tmp_path.glob("web-*"):
        path.unlink()
    with pytest.raises(DataError, match="no file matches"):
        made_in(corpus, tmp_path)
    caplog.set_level(logging.INFO)
    assert made_in(corpus, tmp_path, may_be_gone=True) == made
    assert "its files are gone" in caplog.text
    other = build_tokenizer("NullTokenizer", vocab_file=None, merge_file=None, vocab_size=300)
    with pytest.raises(DataError, match="no file matches"):
        prepare_corpus(corpus, other, tmp_path / "cache", may_be_gone=True)


def test_killed_and_continued(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preparation that ended after a shard continues with it."""
    reached = partial_output.PartialOutput.complete_shard

    def killed(*arguments: Any) -> None:
        reached(*arguments)
        raise KeyboardInterrupt

    shards = PrepareRequest.__init__

    def small(self: Any, *arguments: Any, **values: Any) -> None:
        shards(self, *arguments, **values, shard_bytes=1)

    monkeypatch.setattr(PrepareRequest, "__init__", small)
    with monkeypatch.context() as patch:
        patch.setattr(partial_output.PartialOutput, "complete_shard", killed)
        with pytest.raises(KeyboardInterrupt):
            made_in(corpus, tmp_path)
    (folder,) = folders(tmp_path)
    state = tmp_path / "cache/corpora" / folder / "c4-en.partial/state.json"
    assert json.loads(state.read_text())["state"]["shards"] == 1
    assert documents(made_in(corpus, tmp_path)) == TEXTS
    assert not state.parent.exists()


@pytest.mark.parametrize("left", ["bin", "bin idx"])
def test_killed_at_the_end(corpus: Corpus, tmp_path: Path, left: str) -> None:
    """Files that got their names before the metadata are not taken for a dataset."""
    made = made_in(corpus, tmp_path)
    for ending in {"bin", "idx", "meta.json"} - set(left.split()):
        Path(f"{made.prefix}.{ending}").unlink()
    assert made_in(corpus, tmp_path) == made
    assert documents(made) == TEXTS


def test_changed_while_prepared(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that changes meanwhile leaves no dataset under the key of its old content."""

    def prepared(request: PrepareRequest, progress: Any) -> Any:
        (tmp_path / "web-0.json.gz").write_bytes(compressed(lines(["new"])))
        return prepare(request, progress)

    with monkeypatch.context() as patch:
        patch.setattr("lmcore.data.prepare.run.prepare", prepared)
        with pytest.raises(DataError, match="changed while it was read"):
            made_in(corpus, tmp_path)
    assert folders(tmp_path) == set()
    assert documents(made_in(corpus, tmp_path)) == ["new", *TEXTS[10:]]


@pytest.mark.parametrize(
    "content, name, what, why, hint",
    [
        (
            lines(["a"]) + b'{"txt": "b"}\n',
            "a.jsonl",
            "line 2: key missing",
            "`txt`",
            "`json_key: ",
        ),
        (lines(["a"]) + b"{\n", "a.jsonl", "line 2: broken JSON", "", "`input_format: json`"),
        (compressed(lines(["a"]))[:-9], "a.json.gz", "is cut short", "incomplete", "again"),
        (b"\xff\xf0{", "a.json.gz", "line 1: not UTF-8", "0xff", "`on_error: skip`"),
        (b"", "a.jsonl", "no documents", "empty", "the path of the corpus"),
    ],
)
def test_bad_content(
    tmp_path: Path, content: bytes, name: str, what: str, why: str, hint: str
) -> None:
    """Each problem names the corpus, the file and the line, and keys in place of flags."""
    (tmp_path / name).write_bytes(content)
    corpus = Corpus("web", (f"{tmp_path}/{name}",), where="corpora.yaml:1")
    with pytest.raises(DataError) as caught:
        made_in(corpus, tmp_path)
    assert caught.value.what.startswith("corpus `web` (corpora.yaml:1): ")
    assert what in caught.value.what
    assert why in str(caught.value.why)
    assert hint in str(caught.value.hint)
    assert "--" not in str(caught.value.hint)
    assert not list((tmp_path / "cache/corpora").glob("*.json"))


def test_skipped_documents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`on_error: skip` leaves out what cannot be used, and counts it."""
    caplog.set_level(logging.INFO)
    (tmp_path / "a.jsonl").write_bytes(lines(["a"]) + b"{\n" + lines(["b"]))
    corpus = Corpus("web", (f"{tmp_path}/a.jsonl",), skip=True)
    assert documents(made_in(corpus, tmp_path)) == ["a", "b"]
    assert "1 document skipped" in caplog.text


def test_settings_that_do_not_fit(corpus: Corpus, tmp_path: Path) -> None:
    """A unit of plain text for JSON lines, and an unknown format, are errors."""
    wrong = Corpus(corpus.name, corpus.paths, document_per="line")
    with pytest.raises(ConfigError, match="`document_per: line` in a corpora file"):
        made_in(wrong, tmp_path)
    with pytest.raises(ConfigError, match="unknown `input_format: jsn`"):
        made_in(Corpus("x", corpus.paths, input_format="jsn"), tmp_path)


def test_cache_that_cannot_be_written(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in its place and a full disk are errors; a complete cache is not written."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write") as caught:
        prepare_corpus(corpus, ByteTokenizer(), tmp_path / "file")
    assert caught.value.what.startswith("corpus `c4/en`")
    with monkeypatch.context() as patch:

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(corpus_module, "write_atomically", full)
        with pytest.raises(DataError) as caught:
            made_in(corpus, tmp_path)
    assert "No space left" in str(caught.value.why)
    assert "start the run again" in str(caught.value.hint)
    made = made_in(corpus, tmp_path)

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(corpus_module, "build_or_wait", refused)
    assert made_in(corpus, tmp_path) == made


def test_damaged_record(corpus: Corpus, tmp_path: Path) -> None:
    """A record that cannot be read is written again."""
    made = made_in(corpus, tmp_path)
    (record,) = (tmp_path / "cache/corpora").glob("*.json")
    for content in ("", "[]", '{"format": 1}', '{"format": 1, "files": [{}]}', "[" * 100_000):
        record.write_text(content)
        assert made_in(corpus, tmp_path) == made
