"""Texts that have a name: found, refused, and prepared into a run directory."""

from __future__ import annotations

import gzip
import logging
import os
import tracemalloc
from pathlib import Path

import pytest

from lmcore.base.errors import DataError, PluginError
from lmcore.contract.registry import CorpusRegistry
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.prepare import named_text as named_text_module
from lmcore.data.prepare import plain_text
from lmcore.data.prepare.lazy_text import LazyText
from lmcore.data.prepare.named_text import (
    BUNDLED,
    NamedText,
    bundled_text,
    named_texts,
    prepare_named_text,
    require_file,
)
from lmcore.data.prepare.plain_text import documents_from_text
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.plugin import PluginRecord, PluginSet, PluginState

MINE = PluginRecord("mine", "mine", "lmcore-mine", "1.0", PluginState.USABLE)


@pytest.fixture
def text(tmp_path: Path) -> NamedText:
    """A small text of a plugin."""
    path = tmp_path / "holes.txt"
    path.write_text("One hole.\n\nTwo holes.\n" * 40, encoding="utf-8")
    return NamedText("holes", path, "Of holes.", MINE)


def test_the_bundled_text_has_a_name() -> None:
    """Without any plugin there is lmcore's own text, and its file."""
    texts = named_texts(PluginSet(()))
    assert list(texts) == [BUNDLED]
    assert texts[BUNDLED] == bundled_text()
    assert bundled_text().path.stat().st_size == 1_115_394


def test_missing_file(text: NamedText) -> None:
    """A text whose file is gone is an error before anything is built."""
    text.path.unlink()
    with pytest.raises(DataError) as caught:
        require_file(text)
    assert caught.value.what == "corpus `holes` of plugin `mine` (lmcore-mine 1.0) has no file"
    assert caught.value.hint is not None
    assert "reinstall `lmcore-mine`" in caught.value.hint


def test_a_directory_that_cannot_be_made(text: NamedText, tmp_path: Path) -> None:
    """A file where the directory should be is no fault of the installation."""
    (tmp_path / "cache").write_text("x")
    with pytest.raises(DataError) as caught:
        prepare_named_text(text, ByteTokenizer(), tmp_path / "cache" / "texts")
    assert "reinstall" not in str(caught.value.hint)
    assert "check the directory" in str(caught.value.hint)


def test_prepared_text_is_the_text(text: NamedText, tmp_path: Path) -> None:
    """Its documents joined are the file; each ends with the end-of-document token."""
    prefix = prepare_named_text(text, ByteTokenizer(), tmp_path / "run" / "data")
    assert prefix == str(tmp_path / "run" / "data" / "holes_text_document")
    data = IndexedDataset(prefix)
    ids = [int(one) for number in range(len(data)) for one in data.get(number)]
    assert ByteTokenizer().decode(ids) == text.path.read_text(encoding="utf-8")
    assert ids[-1] == ByteTokenizer.eod


def test_prepared_once(text: NamedText, tmp_path: Path) -> None:
    """The next start finds it; a changed text or another tokenizer prepares it again."""

    class Other(ByteTokenizer):
        name = "Other"

    def prepared(tokenizer: ByteTokenizer) -> int:
        return Path(prepare_named_text(text, tokenizer, tmp_path) + ".bin").stat().st_ino

    first = prepared(ByteTokenizer())
    assert prepared(ByteTokenizer()) == first
    other = prepared(Other())
    assert other != first
    text.path.write_text("Other holes.\n" * 60, encoding="utf-8")
    data = IndexedDataset(prepare_named_text(text, Other(), tmp_path))
    assert data.tokens == len("Other holes.\n" * 60) + data.document_count


@pytest.mark.parametrize(
    "content, cause",
    [
        (b"", "is empty"),
        (b"fine\n\xff\xfe\n", "line 2 is not UTF-8"),
        (b"cut \xc3", "line 1 is not UTF-8"),
        (gzip.compress(b"text" * 100, mtime=0)[:-9], "is cut short"),
    ],
)
def test_unfit_text(text: NamedText, tmp_path: Path, content: bytes, cause: str) -> None:
    """The error names the corpus, its plugin and what is wrong, and leaves no dataset."""
    text.path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        prepare_named_text(text, ByteTokenizer(), tmp_path / "data")
    assert "corpus `holes` of plugin `mine` (lmcore-mine 1.0)" in caught.value.what
    assert cause in str(caught.value.why)
    assert caught.value.hint
    assert not list((tmp_path / "data").glob("*.idx"))


def test_a_text_that_cannot_be_opened(text: NamedText, tmp_path: Path) -> None:
    """The system's message is passed on."""
    text.path.unlink()
    with pytest.raises(DataError, match="corpus `holes`") as caught:
        prepare_named_text(text, ByteTokenizer(), tmp_path / "data")
    assert "No such file" in str(caught.value.why)


@pytest.mark.parametrize("ending", ["", "\n"])
def test_long_lines_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """A text without line ends is cut into documents that joined are the text, bytes whole."""
    monkeypatch.setattr(plain_text, "_LINE_BYTES", 7)
    path = tmp_path / "line.txt"
    written = "Grüße, \N{SNOWMAN}! " * 500 + ending
    path.write_text(written, encoding="utf-8")
    documents = list(documents_from_text(path, document_characters=64))
    assert "".join(documents) == written
    assert max(map(len, documents)) <= 4 * 64 + 7


def test_memory_does_not_grow_with_a_line(tmp_path: Path) -> None:
    """Sixty megabytes on one line take a few megabytes of memory."""
    path = tmp_path / "line.txt"
    with path.open("wb") as stream:
        for _ in range(60):
            stream.write(b"x" * (1 << 20))
    tracemalloc.start()
    assert sum(map(len, documents_from_text(path))) == 60 << 20
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20


def test_kept_text_serves_without_its_source(
    text: NamedText, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A text that was kept makes the same dataset when its source is gone, for any tokenizer."""

    class Other(ByteTokenizer):
        name = "Other"

    kept = tmp_path / "texts"
    first = prepare_named_text(text, ByteTokenizer(), tmp_path / "a", keep_text=kept)
    plain = prepare_named_text(text, ByteTokenizer(), tmp_path / "plain")
    text.path.unlink()
    with pytest.raises(DataError):
        prepare_named_text(text, ByteTokenizer(), tmp_path / "b")
    with caplog.at_level(logging.INFO):
        again = prepare_named_text(text, Other(), tmp_path / "c", keep_text=kept)
    assert "its source is missing" in caplog.text
    for ending in (".bin", ".idx"):
        made = [Path(prefix + ending).read_bytes() for prefix in (first, plain, again)]
        assert made[0] == made[1] == made[2]
    assert prepare_named_text(text, Other(), tmp_path / "c", keep_text=kept) == again


def test_changed_source_of_a_kept_text(text: NamedText, tmp_path: Path) -> None:
    """While the source is there it decides: what was kept of an older one is made again."""
    for content in ("Old.\n" * 50, "New!\n" * 50):
        text.path.write_text(content, encoding="utf-8")
        prefix = prepare_named_text(text, ByteTokenizer(), tmp_path / "a", keep_text=tmp_path)
        data = IndexedDataset(prefix)
        assert ByteTokenizer().decode(data.get(0)[:5].tolist()) == content[:5]
        assert LazyText(tmp_path / "holes")[0].startswith(content[:5])


def test_settled_source_is_not_read_again(
    text: NamedText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that has not changed since is known by size and times, however large it is."""
    before = text.path.stat().st_mtime - 60
    os.utime(text.path, (before, before))
    monkeypatch.setattr(named_text_module, "_SETTLED_SECONDS", 0.0)
    first = prepare_named_text(text, ByteTokenizer(), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(named_text_module, "_digest", None)
        assert prepare_named_text(text, ByteTokenizer(), tmp_path) == first
    size = text.path.stat().st_size
    text.path.write_text("x" * size, encoding="utf-8")
    data = IndexedDataset(prepare_named_text(text, ByteTokenizer(), tmp_path))
    assert int(data.get(0)[0]) == ord("x")


def test_names_with_slashes(tmp_path: Path) -> None:
    """A text called `c4/en` has a separate folder."""
    registry = CorpusRegistry("mine")
    registry.add("c4/en", tmp_path / "c4.txt", "Pages.")
    (tmp_path / "c4.txt").write_text("A page.\n", encoding="utf-8")
    one = registry.found["c4/en"]
    text = NamedText(one.name, one.path, one.summary, MINE)
    prefix = prepare_named_text(text, ByteTokenizer(), tmp_path / "out")
    assert prefix == str(tmp_path / "out/c4/en_text_document")
    for wrong in ("/en", "c4/", "c4//en", "../en", "c4/../en"):
        with pytest.raises(PluginError):
            registry.add(wrong, tmp_path / "c4.txt", "Pages.")
