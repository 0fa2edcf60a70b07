"""`lmcore data corpora`: texts of lmcore and the plugins, corpora of files, and their cache."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError, LmcoreError, counted
from lmcore.cli.data.training_command import training_command
from lmcore.cli.text.terminal import size_text
from lmcore.config.file.corpora_file import found_corpora_file, read_corpora
from lmcore.config.option import CORPORA, INPUT_PATH, option
from lmcore.config.options.command_line import parse_section
from lmcore.config.section.accelerator import plugin_off_option

if TYPE_CHECKING:
    from lmcore.config.corpus import Corpus
    from lmcore.data.prepare.corpus_cache import CacheEntry
    from lmcore.data.prepare.named_text import NamedText

__all__ = ["CorporaSection", "run"]

_DAY = 24 * 60 * 60


@dataclass(frozen=True)
class CorporaSection:
    """List the texts for `lmcore train --train-data`, or what is prepared of them in a cache."""

    corpora: tuple[str, ...] = option(
        (),
        "Corpora files, which end with .yaml, and NAME=PATH; default: LMCORE_CORPORA, or "
        "corpora.yaml in the working directory.",
        metavar="FILE",
        paths=CORPORA,
    )
    cache: str | None = option(
        None,
        "List the prepared corpora in a cache in place of the texts: the directory that runs have "
        "as --data-cache-path, or a run directory.",
        metavar="DIR",
        paths=INPUT_PATH,
    )
    prune: bool = option(
        False,
        "Remove the entries of --cache that no run has used for --unused-days, or those of --key; "
        "none that is being prepared.",
    )
    unused_days: float = option(
        30.0, "Days without use after which --prune removes an entry.", minimum=0
    )
    key: tuple[str, ...] = option(
        (), "Entries that --prune removes, by the beginning of their key.", metavar="KEY"
    )
    json: bool = option(False, "Print JSON.")
    plugin_off: tuple[str, ...] = plugin_off_option()


def run(argv: list[str]) -> int:
    """Run `lmcore data corpora` and return the exit status."""
    section = parse_section(CorporaSection, argv, command="lmcore data corpora")
    if section.cache is not None:
        return _cache(section)
    if section.prune or section.key:
        flag = "--prune" if section.prune else "--key"
        raise ConfigError(f"`{flag}` needs `--cache DIR`", hint="name the cache to remove from")
    from lmcore.cli.selection import find_plugins
    from lmcore.data.prepare.named_text import named_texts

    texts = named_texts(find_plugins(argv, probe=False))
    found = found_corpora_file([], os.environ)
    corpora, problems = read_corpora(section.corpora or ([found[0]] if found else []))
    if problems:
        raise ConfigError.collect(problems)
    rows = [_corpus_row(text) for text in texts.values()]
    rows += [_files_row(corpus) for corpus in corpora.values()]
    if section.json:
        print(json.dumps(rows, indent=2))
        return 0
    lines: list[str] = []
    for row in rows:
        size = "no file" if row["bytes"] is None else size_text(row["bytes"])
        owner = f"plugin {row['plugin']}" if row["plugin"] else "lmcore"
        if "where" in row:
            owner = row["where"]
            size = row["problem"] or f"{counted(row['files'], 'file')}, {size}"
        summary = [f"  {row['summary']}"] if row["summary"] else []
        lines += [row["name"], *summary, f"  {size}, of {owner}: {row['path']}"]
    named = next((row["name"] for row in rows if row.get("problem", "no") is None), None)
    following = f"lmcore train --corpus {list(texts)[-1]}"
    if named is not None:
        given = f" --corpora {shlex.join(section.corpora)}" if section.corpora else ""
        following = _training(corpora[named], f"--train-data {named}{given}")
    print("\n".join([*lines, "", f"next: {following}"]))
    return 0


def _training(corpus: Corpus, data: str) -> str:
    """Return the command that trains on a corpus; documents are counted only where files are."""
    from lmcore.data.prepare.corpus import corpus_files

    files = corpus_files(corpus)
    if corpus.document_per == "file" and all(file.format == "text" for file in files):
        return training_command(data, len(files))
    return f"lmcore train {data}"


def _cache(section: CorporaSection) -> int:
    """List the entries of a cache, or remove some; return the exit status."""
    from lmcore.data.prepare.corpus_cache import cache_entries, cache_folder, remove_entries

    folder = cache_folder(Path(str(section.cache)))
    entries = cache_entries(folder)
    if section.key and not section.prune:
        raise ConfigError("`--key` needs `--prune`", hint="without them all entries are listed")
    if section.prune:
        entries = remove_entries(folder, _chosen(section, entries))
    if section.json:
        print(json.dumps([_entry_row(one) for one in entries], indent=2))
        return 0
    for one in entries:
        state = _state(one)
        print(f"{one.key}  {one.name or '(no file yet)'}\n  {size_text(one.size)}, {state}")
    total = f"{counted(len(entries), 'entry', 'entries')}, "
    total += size_text(sum(one.size for one in entries))
    print(f"{'removed' if section.prune else folder}: {total}")
    return 0


def _chosen(section: CorporaSection, entries: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Return the entries that are to be removed.

    Raises:
        ConfigError: A key is of no entry, or of several, or of one that is being prepared.
    """
    if not section.key:
        limit = time.time() - section.unused_days * _DAY
        return [one for one in entries if one.used <= limit and one.owner is None]
    chosen = []
    for key in section.key:
        found = [one for one in entries if one.key.startswith(key)]
        if len(found) != 1:
            why = "no entry has such a key" if not found else f"{len(found)} entries have such keys"
            raise ConfigError(f"`--key {key}`: {why}", hint="without `--prune` all are listed")
        if (owner := found[0].owner) is not None:
            raise ConfigError(f"`--key {key}`: it is being prepared", why=f"by {owner}")
        chosen += found
    return chosen


def _state(entry: CacheEntry) -> str:
    """Return when an entry was used last, and what is wrong with it."""
    if (owner := entry.owner) is not None:
        return f"being prepared by {owner}"
    days = max(0.0, time.time() - entry.used) / _DAY
    used = f"used {days:.0f} days ago" if days >= 1 else "used today"
    return used if entry.complete else f"{used}, its preparation was interrupted"


def _entry_row(entry: CacheEntry) -> dict[str, Any]:
    row = {"key": entry.key, "name": entry.name, "path": str(entry.folder), "bytes": entry.size}
    busy = entry.owner is not None
    return row | {"used": entry.used, "complete": entry.complete, "being_prepared": busy}


def _corpus_row(text: NamedText) -> dict[str, Any]:
    there = text.path.is_file()
    return {
        "name": text.name,
        "summary": text.summary,
        "plugin": text.plugin_name,
        "path": str(text.path),
        "bytes": text.path.stat().st_size if there else None,
    }


def _files_row(corpus: Corpus) -> dict[str, Any]:
    """Return the row of a corpus; `problem` says why it has no files, or is None."""
    from lmcore.data.prepare.corpus import corpus_files

    row = {"name": corpus.name, "summary": corpus.summary, "plugin": None}
    row |= {"path": " ".join(corpus.paths), "where": corpus.where.replace("`", "")}
    try:
        files = corpus_files(corpus)
    except LmcoreError as problem:
        what = problem.what.removeprefix(f"{corpus.shown}: ").removeprefix(f"{corpus.shown} ")
        return row | {"files": 0, "bytes": None, "problem": what}
    size = sum(Path(file.path).stat().st_size for file in files)
    return row | {"files": len(files), "bytes": size, "problem": None}
