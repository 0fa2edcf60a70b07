"""Preparation of a corpus for a run: files of text to an indexed dataset in a cache.

    DIR/corpora/FILES.json     the files of a corpus, with the digest and the state of each
    DIR/corpora/FILES.lock     held by the process that prepares it
    DIR/corpora/KEY/           the dataset; KEY is of the content, the tokenizer and all settings
    DIR/corpora/KEY.lock       held by the process that writes the dataset, or removes it

A dataset is complete when its metadata file exists, which is written last.  It is found again by
content, so it is never stale: files that change give another key.  Files are read again only if
their size, inode or times changed.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.durable import write_atomically
from lmcore.base.errors import ConfigError, DataError, LmcoreError, counted
from lmcore.config.corpus import Corpus
from lmcore.data.cache.build_lock import build_or_wait
from lmcore.data.indexed.files import DiskFullError, disk_errors, file_changed
from lmcore.data.indexed.metadata import read_metadata
from lmcore.data.input.compression import STDIN
from lmcore.data.input.files import Format, InputFile, detect_format, find_inputs, formats_of
from lmcore.data.input.options import DocumentUnit, InputOptions
from lmcore.data.prepare.corpus_cache import CACHE_NAME, entry_lock, mark_used

if TYPE_CHECKING:
    from lmcore.data.prepare.request import PrepareProgress
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["CorpusFile", "PreparedCorpus", "corpus_files", "prepare_corpus"]

logger = logging.getLogger(__name__)

_VERSION = 1
_MAX_RECORD_BYTES = 1 << 28  # a corpus of a million files
_PROGRESS_SECONDS = 30.0
_SETTLED_SECONDS = 3.0
"""Age in seconds above which the modification time of a file identifies its content."""


@dataclass(frozen=True)
class CorpusFile:
    """File of a corpus.

    Attributes:
        path: Absolute path.
        format: Format of its content.
        state: Size, inode and times, which change with the content.
        sha256: Digest of the content.
    """

    path: str
    format: Format
    state: tuple[int, ...]
    sha256: str


class PreparedCorpus(NamedTuple):
    """Dataset of a corpus.

    Attributes:
        prefix: Prefix of the indexed dataset.
        digest: Digest of the content of the files, and of how documents are read from them.
    """

    prefix: str
    digest: str


def corpus_files(corpus: Corpus) -> list[InputFile]:
    """Return the files of a corpus in order, without a look into those whose name has the format.

    Raises:
        DataError: A file is missing, a pattern matches nothing, or a directory has no file of text.
        ConfigError: Files have different formats, or the format is unknown.
    """
    for path in corpus.paths:
        _refuse_stream(corpus, path)
    try:
        # The format of a `.json` file is in its content, which only the preparation reads.
        files = find_inputs(corpus.paths, corpus.input_format, by_name=True)
    except LmcoreError as problem:
        raise _of_corpus(corpus, problem) from None
    counts = formats_of(files)
    if len(counts) > 1:
        raise ConfigError(
            f"{corpus.shown} has files of several formats",
            why=", ".join(f"{count:,} {name}" for name, count in counts.most_common()),
            hint=f"give a pattern for the files of one format, such as "
            f"`{_pattern(corpus, files)}`, and another corpus for the rest",
        )
    return files


def _refuse_stream(corpus: Corpus, path: str) -> None:
    """Raise `DataError` for what cannot be read twice, or is no path at all."""
    found, what = Path(path), f"{corpus.shown} cannot be read from `{path}`"
    if "://" in path:
        hint = "download the files, and name these"
        raise DataError(what, why="it is a URL, and nothing is downloaded", hint=hint)
    if path == STDIN or (found.exists() and not (found.is_file() or found.is_dir())):
        raise DataError(what, why="it is not a regular file", hint="write its content to a file")


def _pattern(corpus: Corpus, files: Sequence[InputFile]) -> str:
    """Return a pattern that matches the files of the format of the first file."""
    suffixes = "".join(Path(files[0].path).suffixes[-2:])
    folder = Path(corpus.paths[0])
    folder = folder if folder.is_dir() else Path(files[0].path).parent
    return f"{folder}/*{suffixes}"


def prepare_corpus(
    corpus: Corpus, tokenizer: Tokenizer, directory: Path, *, may_be_gone: bool = False
) -> PreparedCorpus:
    """Tokenize a corpus into a cache, unless that was done before with the same content.

    If several processes share the cache, one process does it and the other processes wait.  A
    preparation that was killed continues with its last complete shard.

    Args:
        corpus: The corpus.
        tokenizer: Tokenizer of the run.
        directory: Folder of the cache; the datasets are in its folder `corpora`.
        may_be_gone: True if files that were prepared before may be missing (`--lazy-loader`).

    Returns:
        The prefix of the indexed dataset, and the digest of the files.

    Raises:
        DataError: A file is missing, changes while it is read, or has a document that cannot be
            used; the cache cannot be written.
        ConfigError: Settings of the corpus do not fit its files or the tokenizer.
    """
    prepared = _Preparation(corpus, tokenizer, directory / CACHE_NAME, may_be_gone=may_be_gone)
    found = prepared.find()  # also in a cache that cannot be written
    if found is None:
        with _errors_of(corpus), disk_errors(prepared.folder):
            prepared.folder.mkdir(parents=True, exist_ok=True)
        found = build_or_wait(prepared.lock, prepared.find, prepared.make, what=corpus.shown)
    mark_used(Path(found.prefix).parent)
    return found


class _Preparation:
    """Preparation of a corpus in a cache."""

    def __init__(
        self, corpus: Corpus, tokenizer: Tokenizer, folder: Path, *, may_be_gone: bool
    ) -> None:
        self.corpus, self.tokenizer, self.folder = corpus, tokenizer, folder
        self.may_be_gone = may_be_gone
        eod = tokenizer.eod is not None if corpus.append_eod is None else corpus.append_eod
        self.append_eod = eod
        paths = [_absolute(path) for path in corpus.paths]
        self.files_id = _digest_of([paths, corpus.input_format])[:16]
        self.lock = folder / f"{self.files_id}.lock"
        self.record = folder / f"{self.files_id}.json"

    def find(self) -> PreparedCorpus | None:
        """Return the dataset if it exists for the present content, else None.

        Raises:
            LmcoreError: Files are missing, or have different formats.
        """
        recorded = self._recorded()
        if not recorded:
            return None
        try:
            present = [_absolute(file.path) for file in corpus_files(self.corpus)]
        except DataError:
            found = self._dataset(recorded) if self.may_be_gone else None
            if found is None:
                raise
            logger.info("%s: its files are gone, what was prepared is used", self.corpus.shown)
            return found
        same = present == [file.path for file in recorded]
        if not (same and all(_state(file.path) == file.state for file in recorded)):
            return None
        return self._dataset(recorded)

    def make(self) -> None:
        """Read the files that changed, and create the dataset unless there is one of the content.

        Raises:
            LmcoreError: See `prepare_corpus`.
        """
        with _errors_of(self.corpus):
            files = self._digested(corpus_files(self.corpus))
            if self._dataset(files) is None:
                build_or_wait(
                    entry_lock(self._key_folder(files)),
                    lambda: self._dataset(files),
                    lambda: self._prepare(files),
                    what=self.corpus.shown,
                )
            for file in files:
                if _state(file.path) != file.state:
                    shutil.rmtree(self._key_folder(files), ignore_errors=True)
                    raise file_changed(file.path)
            content = {"format": _VERSION, "files": [asdict(file) for file in files]}
            with disk_errors(self.record):
                write_atomically(self.record, (json.dumps(content) + "\n").encode())

    def _recorded(self) -> list[CorpusFile]:
        """Return the files as they were last prepared; empty if there is no record."""
        try:
            content = json.loads(read_bounded_file(self.record, _MAX_RECORD_BYTES))
            if content["format"] != _VERSION:
                return []
            return [
                CorpusFile(
                    str(file["path"]),
                    cast("Format", str(file["format"])),
                    tuple(int(number) for number in file["state"]),
                    str(file["sha256"]),
                )
                for file in content["files"]
            ]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []

    def _digested(self, found: Sequence[InputFile]) -> list[CorpusFile]:
        """Return the files with their digests; a file that has not changed is not read."""
        known = {(file.path, file.state): file for file in self._recorded()}
        size = sum(Path(file.path).stat().st_size for file in found)
        unit = "MiB" if size >> 20 else "KiB"
        amount = size / (1 << 20 if size >> 20 else 1 << 10)
        title = f"{counted(len(found), 'file')}, {amount:,.1f} {unit}"
        files, announced = [], False
        for one in found:
            path = _absolute(one.path)
            _settle(path)
            state = _state(path)
            before = known.get((path, state))
            if before is None and not announced:
                logger.info("%s: reading %s", self.corpus.shown, title)
                announced = True
            form = one.format if self.corpus.input_format != "auto" else detect_format(path).format
            digest = before.sha256 if before else _sha256(path)
            files.append(CorpusFile(path, form, state, digest))
        return files

    def _key_folder(self, files: Sequence[CorpusFile]) -> Path:
        """Return the folder of the dataset for this content, the tokenizer and all settings."""
        key = {
            "content": self._content(files),
            "tokenizer": self.tokenizer.fingerprint(),
            "append_eod": self.append_eod,
        }
        return self.folder / _digest_of(key)[:32]

    def _content(self, files: Sequence[CorpusFile]) -> dict[str, Any]:
        """Return the documents as digests, and how they are read."""
        return {
            "version": _VERSION,
            "files": [(file.sha256, file.format) for file in files],
            "json_key": self.corpus.json_key,
            "document_per": self.corpus.document_per,
            "skip": self.corpus.skip,
        }

    def _output(self, files: Sequence[CorpusFile]) -> Path:
        """Return the first part of the names of the dataset's files."""
        name = re.sub(r"[^A-Za-z0-9]+", "-", self.corpus.name).strip("-") or "corpus"
        return self._key_folder(files) / name[-60:]

    def _dataset(self, files: Sequence[CorpusFile]) -> PreparedCorpus | None:
        """Return the complete dataset of these files, else None."""
        folder = self._key_folder(files)
        found = sorted(glob.glob(f"{glob.escape(str(folder))}/*.meta.json"))  # noqa: PTH207
        for path in found:
            prefix = path.removesuffix(".meta.json")
            made_with = read_metadata(prefix)
            complete = all(Path(prefix + ending).is_file() for ending in (".bin", ".idx"))
            if complete and made_with and made_with.fingerprint == self.tokenizer.fingerprint():
                return PreparedCorpus(prefix, _digest_of(self._content(files))[:32])
        return None

    def _prepare(self, files: Sequence[CorpusFile]) -> None:
        from lmcore.data.prepare.partial_output import state_path
        from lmcore.data.prepare.request import PrepareRequest
        from lmcore.data.prepare.run import prepare

        output, corpus = self._output(files), self.corpus
        formats = {file.format for file in files}
        reading = InputOptions(document_per=cast("DocumentUnit", corpus.document_per))
        request = PrepareRequest(
            inputs=tuple(file.path for file in files),
            output_prefix=str(output),
            tokenizer=self.tokenizer,
            json_keys=(corpus.json_key,),
            append_eod=self.append_eod,
            on_error="skip" if corpus.skip else "stop",
            input_format=corpus.input_format if len(formats) > 1 else formats.pop(),
            reading=reading,
            overwrite=True,
            resume=state_path(str(output)).is_file(),
            continued_by="start the run again",
        )
        if any(Path(f"{request.key_prefix(corpus.json_key)}.{end}").exists() for end in _FILES):
            # Killed while the files got their names, after which no shard can be resumed.
            shutil.rmtree(self._key_folder(files), ignore_errors=True)
            request = replace(request, resume=False)
        with disk_errors(output.parent):
            output.parent.mkdir(parents=True, exist_ok=True)
        logger.info("%s: preparing it in `%s`", corpus.shown, output.parent)
        report = prepare(request, _Progress(corpus))
        skipped = sum(report.skipped.values())
        logger.info(
            "%s: %s, %s in %.0f s%s",
            *(corpus.shown, counted(report.documents, "document")),
            *(counted(report.outputs[0].tokens, "token"), report.seconds),
            f"; {counted(skipped, 'document')} skipped" if skipped else "",
        )


_FILES = ("bin", "idx", "meta.json")


class _Progress:
    """Log of a preparation, every half minute."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus, self._next = corpus, time.monotonic() + _PROGRESS_SECONDS

    def __call__(self, progress: PrepareProgress) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PROGRESS_SECONDS
            logger.info("%s: %s", self._corpus.shown, progress.bar())


def _absolute(path: str) -> str:
    return os.path.abspath(path)  # noqa: PTH100 - links keep their names


def _state(path: str) -> tuple[int, ...]:
    """Return numbers that change with the content of a file; empty if there is none."""
    try:
        found = Path(path).stat()
    except OSError:
        return ()
    return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _settle(path: str) -> None:
    """Wait until a further change of a file, made a moment ago, would change its times."""
    end = time.monotonic() + _SETTLED_SECONDS
    while time.monotonic() < end and time.time() - Path(path).stat().st_mtime < _SETTLED_SECONDS:
        time.sleep(0.05)


def _sha256(path: str) -> str:
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextmanager
def _errors_of(corpus: Corpus) -> Iterator[None]:
    """Name the corpus in errors of the block, and its keys in place of the flags of a command.

    Raises:
        LmcoreError: The same error.
    """
    try:
        yield
    except OSError as error:
        what = f"{corpus.shown} cannot be read"
        why = f"{error.strerror}: `{error.filename}`"
        raise DataError(what, why=why, hint="check the path and its permissions") from error
    except DiskFullError as error:
        error.hint = "make room on the disk, and start the run again"
        raise
    except LmcoreError as error:
        raise _of_corpus(corpus, error) from None


_WORDS = (
    (re.compile(r"`--on-error (\w+)`"), r"`on_error: \1`{place}"),
    (re.compile(r"`--input-format`"), r"`input_format`{place}"),
    (re.compile(r"`--input-format (\w+)`"), r"`input_format: \1`{place}"),
    (re.compile(r"`--document-per (\w+)`"), r"`document_per: \1`{place}"),
    (re.compile(r"`--json-keys (\S+)`"), r"`json_key: \1`{place}"),
    (re.compile(r"`--json-keys`"), r"`json_key`{place}"),
    (re.compile(r"`--append-eod`"), r"`append_eod`{place}"),
    (re.compile(r"the patterns of `--input`|`--input`"), r"the path of the corpus"),
)
"""Flags of `lmcore data prepare`, and what a corpora file has in their place."""


def _of_corpus(corpus: Corpus, error: LmcoreError) -> LmcoreError:
    in_file = corpus.where and not corpus.where.startswith("`")
    place = "" if in_file else " in a corpora file"

    def translated(text: str | None) -> str | None:
        for words, instead in _WORDS if text else ():
            text = words.sub(instead.format(place=place), text or "")
        return text

    others = [error, *getattr(error, "others", ())]
    for one in others:
        one.what = translated(one.what) or one.what
        one.why, one.hint = translated(one.why), translated(one.hint)
    if not error.what.startswith("corpus `"):
        error.what = f"{corpus.shown}: {error.what}"
    return error
