"""Texts that have a name: lmcore's own, and those that plugins bring; `--corpus NAME`.

A text is prepared into the run directory, where the next start finds it, unless text or tokenizer
have changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.errors import ConfigError, DataError, suggestion
from lmcore.plugins.registrations import Registrations, plugin_corpora

if TYPE_CHECKING:
    from lmcore.data.tokenizer.base import Tokenizer
    from lmcore.plugins import PluginRecord, PluginSet

__all__ = ["BUNDLED", "NamedText", "bundled_text", "find_text", "named_texts", "prepare_named_text"]

BUNDLED = "shakespeare"
"""Name of the text in `lmcore/data/bundled`."""

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class NamedText:
    """A text to train on.

    Attributes:
        name: What `--corpus` calls it.
        path: UTF-8 text, compressed or not.
        summary: One line about it.
        plugin: The plugin that brings it; None: it is lmcore's own.
    """

    name: str
    path: Path
    summary: str
    plugin: PluginRecord | None = None

    @property
    def plugin_name(self) -> str | None:
        """The plugin's name, if it is a plugin's."""
        return self.plugin.name if self.plugin else None

    @property
    def shown(self) -> str:
        """The text in messages."""
        owner = f" of plugin {self.plugin.label}" if self.plugin else ""
        return f"corpus `{self.name}`{owner}"


def bundled_text() -> NamedText:
    """Return the text that comes with lmcore."""
    path = Path(str(resources.files("lmcore.data") / "bundled" / f"{BUNDLED}.txt"))
    return NamedText(BUNDLED, path, "Scenes from Shakespeare's plays; the text by default.")


def named_texts(plugins: PluginSet) -> Registrations[NamedText]:
    """Return every text by its name, lmcore's own first."""
    own = bundled_text()
    found = plugin_corpora(plugins, {own.name: "lmcore"})
    texts = {own.name: own} | {
        name: NamedText(name, one.path, one.summary, found.plugins[name])
        for name, one in found.items()
    }
    return Registrations(texts, found.plugins, found.failures)


def find_text(name: str, texts: Mapping[str, NamedText], *, flag: str = "--corpus") -> NamedText:
    """Return the text that *flag* names, whose file is there.

    Raises:
        ConfigError: There is none of this name.
        DataError: Its file is missing.
    """
    text = texts.get(name)
    if text is None:
        raise ConfigError(
            f"`{flag} {name}`: there is no text of this name",
            why=texts.why_missing() if isinstance(texts, Registrations) else None,
            hint=f"{suggestion(name, texts)}; for a text of yours, use `lmcore data prepare` and "
            "`--data-path`",
        )
    if not text.path.is_file():
        raise DataError(
            f"{text.shown} has no file", why=f"`{text.path}` is not there", hint=_hint(text)
        )
    return text


def prepare_named_text(text: NamedText, tokenizer: Tokenizer, directory: Path) -> str:
    """Tokenize *text* into *directory*, if it does not stand there already.

    Returns:
        The prefix of the indexed data set.

    Raises:
        DataError: The file cannot be read, is empty, or is not UTF-8; or the tokenizer cannot
            encode it.
    """
    from lmcore.data.metadata import read_metadata
    from lmcore.data.plain_text import prepare_text
    from lmcore.data.prepare import document_prefix

    prefix = document_prefix(str(directory / text.name), "text")
    record = directory / f"{text.name}.sha256"
    try:
        digest = _digest(text.path)
        same_text = record.is_file() and record.read_text(encoding="ascii").strip() == digest
        made_with = read_metadata(prefix) if same_text else None
        if made_with is not None and made_with.fingerprint == tokenizer.fingerprint():
            return prefix
        directory.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)
        prepare_text(text.path, tokenizer, directory / text.name)
        record.write_text(f"{digest}\n", encoding="ascii")
    except (DataError, OSError) as error:
        if isinstance(error, DataError):
            cause = f"{error.what}: {error.why}" if error.why else error.what
        else:
            cause = f"{error.strerror}: `{error.filename}`"
        raise DataError(
            f"{text.shown} cannot be prepared in `{directory}`",
            why=cause,
            hint=(isinstance(error, DataError) and error.hint) or _hint(text),
        ) from error
    return prefix


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _hint(text: NamedText) -> str:
    owner = text.plugin.distribution if text.plugin else "lmcore"
    return f"reinstall `{owner}`, or train on another text: `lmcore data corpora` lists them"
