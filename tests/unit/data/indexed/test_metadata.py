"""`PREFIX.meta.json` as it is read: absent, whole, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import DataError
from lmcore.data.indexed.metadata import (
    DatasetMetadata,
    metadata_path,
    read_metadata,
    write_metadata,
)
from lmcore.data.tokenizer import ByteTokenizer


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A prefix with metadata beside it."""
    found = tmp_path / "a_text_document"
    write_metadata(
        found,
        DatasetMetadata.of(
            ByteTokenizer(), append_eod=True, documents=2, sequences=3, tokens=40, dtype="uint16"
        ),
    )
    return found


def test_what_was_written_is_read(prefix: Path) -> None:
    """Every field comes back; fields of a later version are no harm."""
    path = metadata_path(prefix)
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"later": [1]}))
    found = read_metadata(prefix)
    assert found is not None
    assert (found.documents, found.sequences, found.tokens, found.append_eod) == (2, 3, 40, True)
    assert found.fingerprint == ByteTokenizer().fingerprint()


def test_none_is_no_error(tmp_path: Path) -> None:
    """Datasets of other tools have none."""
    assert read_metadata(tmp_path / "b") is None


def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    """A device is not read."""
    metadata_path(tmp_path / "b").symlink_to("/dev/zero")
    with pytest.raises(DataError, match="cannot read") as caught:
        read_metadata(tmp_path / "b")
    assert caught.value.why == "it is a device, not a file"


@pytest.mark.parametrize("text", ["", "no", "[1]", "\xff", "[" * 100_000])
def test_what_is_no_metadata_is_refused(prefix: Path, text: str) -> None:
    """Other content is an error that names the file."""
    metadata_path(prefix).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"cannot read .*a_text_document\.meta\.json"):
        read_metadata(prefix)


@pytest.mark.parametrize(
    "name,value",
    [
        ("tokenizer", "byte"),
        ("vocab_size", "256"),
        ("vocab_size", True),
        ("eod", 1.5),
        ("fingerprint", None),
        ("append_eod", 1),
        ("documents", [2]),
        ("dtype", 2),
    ],
)
def test_a_field_of_another_type_is_refused(prefix: Path, name: str, value: Any) -> None:
    """The message names the field and its value."""
    path = metadata_path(prefix)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(DataError, match=rf"`{name}` is ") as caught:
        read_metadata(prefix)
    assert json.dumps(value) in caught.value.what


def test_a_field_that_is_missing_is_named(prefix: Path) -> None:
    """The message names it."""
    path = metadata_path(prefix)
    values = json.loads(path.read_text())
    del values["tokens"]
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match="has no `tokens`"):
        read_metadata(prefix)
