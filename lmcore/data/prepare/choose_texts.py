"""Texts of a run: named texts of lmcore and its plugins, and corpora of files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmcore.base.errors import ConfigError, DataError, LmcoreError, counted, nearest
from lmcore.config.corpus import Corpus, is_text_path
from lmcore.config.derived.data_source import Blend, RunSources
from lmcore.config.file.corpora_file import CORPORA_FILE, read_corpora
from lmcore.data.input.compression import STDIN
from lmcore.data.prepare.corpus import corpus_files
from lmcore.data.prepare.named_text import NamedText, require_file
from lmcore.plugin.registrations import Registrations

__all__ = ["RunText", "choose_texts"]

RunText = NamedText | Corpus
"""Text that a run prepares."""


def choose_texts(
    sources: RunSources,
    texts: Mapping[str, NamedText],
    corpora: Sequence[str] = (),
    *,
    may_be_gone: bool = False,
) -> dict[str, RunText]:
    """Return the texts that a run reads, by name or path; empty if it reads datasets.

    Args:
        sources: Data sources of the run.
        texts: Every named text.
        corpora: Values of `--corpora`.
        may_be_gone: True if the file of a text may be missing (`--lazy-loader`).

    Raises:
        ConfigError: No text has the name, the corpora file is wrong, or files are both for training
            and for validation; all such problems at once.
        DataError: The file of a text is missing.
    """
    found: dict[str, RunText] = {}
    wanted = [blend for blend in sources.blends() if any(s.corpus for s in blend.sources)]
    known, problems = read_corpora(corpora) if wanted else ({}, [])
    problems += [_taken(known[name], texts[name]) for name in known if name in texts]
    unread = bool(problems)
    for blend in wanted:
        for name in [source.name for source in blend.sources if source.corpus]:
            try:
                found[name] = _text(name, blend.flag, texts, known)
                _require_files(found[name], may_be_gone=may_be_gone)
            except LmcoreError as problem:
                if not unread or not isinstance(problem, ConfigError):
                    problems.append(problem)
    problems += [] if problems else _trained(sources, found, may_be_gone=may_be_gone)
    if problems:
        raise problems[0] if len(problems) == 1 else ConfigError.collect(problems)
    return found


def _text(
    name: str, flag: str, texts: Mapping[str, NamedText], corpora: Mapping[str, Corpus]
) -> RunText:
    text = texts.get(name) or corpora.get(name)
    if text is not None:
        return text
    if is_text_path(name) and flag != "--corpus":
        return Corpus(name, (name,))
    if is_text_path(name):
        raise ConfigError(
            f"`{flag} {name}` is a path, not the name of a text",
            hint=f"`--train-data {name}` trains on the file",
        )
    known = [*corpora, *texts]
    close = nearest(name, known)
    listed = ", ".join(f"`{one}`" for one in known)
    hint = f"did you mean `{close}`? known: {listed}" if close else f"known: {listed}"
    raise ConfigError(
        f"`{flag} {name}`: no text has this name",
        why=texts.why_missing() if isinstance(texts, Registrations) else None,
        hint=f"{hint}; `--corpora {name}=PATH` or a line `{name}: PATH` in `corpora.yaml` adds it, "
        f"and `--train-data ./{name}` is the file or directory of that path",
    )


def _require_files(text: RunText, *, may_be_gone: bool) -> None:
    if isinstance(text, NamedText):
        require_file(text, may_be_gone=may_be_gone)
    elif not may_be_gone:
        try:
            corpus_files(text)
        except DataError as problem:
            if any(Path(path).exists() or "://" in path or path == STDIN for path in text.paths):
                raise
            gone = "`--lazy-loader` trains on what was prepared if the files are gone"
            gone += _unread_file(text)
            problem.hint = f"{problem.hint}; {gone}" if problem.hint else f"check the path; {gone}"
            raise


def _unread_file(corpus: Corpus) -> str:
    """Return the end of a hint if the working directory has another corpora file."""
    here, of_corpus = Path(CORPORA_FILE), Path(corpus.where.rpartition(":")[0])
    if of_corpus.name != CORPORA_FILE or not here.is_file() or here.samefile(of_corpus):
        return ""
    return f"; `{here}` of the working directory is read with `--corpora {here}`"


def _taken(corpus: Corpus, text: NamedText) -> ConfigError:
    return ConfigError(
        f"{corpus.where}: the name `{corpus.name}` is taken",
        why=f"it is the {text.shown}",
        hint="give the corpus another name",
    )


def _trained(
    sources: RunSources, texts: Mapping[str, RunText], *, may_be_gone: bool
) -> list[LmcoreError]:
    """Return a problem for each blend of validation or test that reads files of training."""
    if may_be_gone:
        return []

    def files(blend: Blend) -> dict[str, str]:
        corpora = (texts.get(source.name) for source in blend.sources)
        return {
            os.path.realpath(file.path): text.name
            for text in corpora
            if isinstance(text, Corpus)
            for file in corpus_files(text)
        }

    train = sources.own.get("train")
    trained = {} if train is None else files(train)
    problems: list[LmcoreError] = []
    for part, blend in sources.own.items() if trained else ():
        held = {} if part == "train" else files(blend)
        both = [path for path in held if path in trained]
        if both:
            problems.append(
                ConfigError(
                    f"`{blend.flag} {held[both[0]]}` reads files that the run trains on",
                    why=f"{counted(len(both), 'file')} of {counted(len(held), 'file')}, such as "
                    f"`{Path(both[0]).name}`, {'is' if len(both) == 1 else 'are'} of corpus "
                    f"`{trained[both[0]]}` too",
                    hint="hold out documents with `lmcore data split`; or leave the flag out, and "
                    "`--split` divides the documents",
                )
            )
    return problems
