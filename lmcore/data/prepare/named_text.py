"""Named texts of lmcore and of plugins, for `--corpus NAME`.

A text is tokenized into the run directory, where the next run finds it unless text or tokenizer
have changed.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import DataError
from lmcore.config.derived.data_source import BUNDLED
from lmcore.data.cache.build_lock import build_or_wait
from lmcore.data.prepare.lazy_text import LazyText, write_lazy_text
from lmcore.plugin.registrations import Registrations, plugin_corpora

if TYPE_CHECKING:
    from lmcore.contract.tokenizer import Tokenizer
    from lmcore.plugin import PluginRecord, PluginSet

__all__ = [
    "BUNDLED",
    "NamedText",
    "bundled_text",
    "named_texts",
    "prepare_named_text",
    "require_file",
]

logger = logging.getLogger(__name__)

_MAX_RECORD_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 20
_SETTLED_SECONDS = 3.0
"""Age in seconds above which the modification time of a file identifies its content."""


@dataclass(frozen=True)
class NamedText:
    """Named text to train on.

    Attributes:
        name: name for `--corpus`.
        path: UTF-8 text, compressed or not.
        summary: description in one line.
        plugin: plugin that provides it; None: bundled with lmcore.
    """

    name: str
    path: Path
    summary: str
    plugin: PluginRecord | None = None

    @property
    def plugin_name(self) -> str | None:
        """Name of the plugin, or None."""
        return self.plugin.name if self.plugin else None

    @property
    def shown(self) -> str:
        """Description of the text in messages."""
        owner = f" of plugin {self.plugin.label}" if self.plugin else ""
        return f"corpus `{self.name}`{owner}"


def bundled_text() -> NamedText:
    """Return the text bundled with lmcore."""
    path = Path(str(resources.files("lmcore.data") / "bundled" / f"{BUNDLED}.txt"))
    return NamedText(BUNDLED, path, "Scenes from Shakespeare's plays; the text by default.")


def named_texts(plugins: PluginSet) -> Registrations[NamedText]:
    """Return all texts by name, the bundled one first."""
    own = bundled_text()
    found = plugin_corpora(plugins, {own.name: "lmcore"})
    texts = {own.name: own} | {
        name: NamedText(name, corpus.path, corpus.summary, found.plugins[name])
        for name, corpus in found.items()
    }
    return Registrations(texts, found.plugins, found.failures)


def require_file(text: NamedText, *, may_be_gone: bool = False) -> None:
    """Raise `DataError` if the file of a text is missing, unless it may be."""
    if not text.path.is_file() and not may_be_gone:
        raise DataError(
            f"{text.shown} has no file", why=f"`{text.path}` does not exist", hint=_hint(text)
        )


def prepare_named_text(
    text: NamedText, tokenizer: Tokenizer, directory: Path, *, keep_text: Path | None = None
) -> str:
    """Tokenize *text* into *directory*, unless that was done before.

    If several processes share the directory, one process does it and the other processes wait.

    Args:
        text: the text.
        tokenizer: tokenizer of the text.
        directory: directory of the dataset.
        keep_text: directory for a copy of the text (`LazyText`), so that later runs with any
            tokenizer do not need its source; None: no copy.

    Returns:
        The prefix of the indexed dataset.

    Raises:
        DataError: the file cannot be read, is empty or not UTF-8, or the tokenizer cannot encode
            it.
    """
    try:
        prepared = _Prepared(text, tokenizer, directory, keep_text)
        prepared.prefix.parent.mkdir(parents=True, exist_ok=True)
        return build_or_wait(
            Path(f"{prepared.prefix}.lock"), prepared.find, prepared.make, what=text.shown
        )
    except (DataError, OSError) as error:
        if isinstance(error, DataError):
            cause, hint = error.what_and_why, error.hint or _hint(text)
        else:
            cause, hint = f"{error.strerror}: `{error.filename}`", _hint(text)
            if error.filename != str(text.path):
                hint = "check the directory and its permissions"
        raise DataError(
            f"{text.shown} cannot be prepared in `{directory}`", why=cause, hint=hint
        ) from error


class _Prepared:
    """Dataset of a named text in a directory."""

    def __init__(
        self, text: NamedText, tokenizer: Tokenizer, directory: Path, keep_text: Path | None
    ) -> None:
        from lmcore.data.prepare.run import document_prefix

        self.text, self.tokenizer = text, tokenizer
        self.kept = None if keep_text is None else keep_text / text.name
        self.output = directory / text.name
        self.prefix = Path(document_prefix(str(directory / text.name), "text"))
        self.record = Path(f"{directory / text.name}.sha256")
        self.digest = self._source()

    def find(self) -> str | None:
        """Return the prefix if the dataset exists, with this text and tokenizer, else None."""
        from lmcore.data.indexed.metadata import read_metadata

        try:
            same_text = self._recorded()[:1] == [self.digest]
        except (OSError, ValueError):
            return None
        made_with = read_metadata(self.prefix) if same_text else None
        if made_with is None or made_with.fingerprint != self.tokenizer.fingerprint():
            return None
        return str(self.prefix)

    def make(self) -> None:
        """Create the dataset."""
        from lmcore.data.prepare.plain_text import documents_from_text, prepare_documents

        self.record.unlink(missing_ok=True)
        path = self.text.path
        with closing(documents_from_text(path)) as documents:
            found: Iterable[str] = documents
            if self.kept is not None:
                found = self._lazy(self.kept) or write_lazy_text(
                    documents, self.kept, source=self.digest
                )
            prepare_documents(found, self.tokenizer, self.output, source=str(path))
        self.record.write_text(f"{self.digest} {self._state()}\n", encoding="ascii")

    def _lazy(self, kept: Path) -> LazyText | None:
        """Return the kept copy of the text if it has the content of the source, else None."""
        if not Path(f"{kept}.text.json").is_file():
            return None
        lazy = LazyText(kept)
        return lazy if lazy.source == self.digest else None

    def _source(self) -> str:
        """Return the digest of the source, or of the kept copy if the source is missing."""
        if not self.text.path.is_file() and self.kept is not None:
            kept = LazyText(self.kept)
            logger.info("%s: its source is missing, the kept copy is used", self.text.shown)
            return kept.source
        try:
            digest, state = self._recorded()
        except (OSError, ValueError):
            return _digest(self.text.path)
        return digest if state == self._state() else _digest(self.text.path)

    def _recorded(self) -> list[str]:
        return read_bounded_file(self.record, _MAX_RECORD_BYTES).decode("ascii").split()

    def _state(self) -> str:
        """Return a string that changes with the file; unique if the file was modified just now."""
        try:
            found = self.text.path.stat()
        except OSError:
            return "gone"
        if time.time() - found.st_mtime < _SETTLED_SECONDS:
            return f"new-{time.time_ns()}"
        return f"{found.st_size}-{found.st_ino}-{found.st_mtime_ns}-{found.st_ctime_ns}"


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _hint(text: NamedText) -> str:
    owner = text.plugin.distribution if text.plugin else "lmcore"
    return f"reinstall `{owner}`, or choose another text: `lmcore data corpora` lists them"
