"""`lmcore data corpora`: list the texts of lmcore and the plugins, and the corpora of files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError, LmcoreError, counted
from lmcore.cli.text.terminal import size_text
from lmcore.config.file.corpora_file import found_corpora_file, read_corpora
from lmcore.config.option import CORPORA, option
from lmcore.config.options.command_line import parse_section
from lmcore.config.section.accelerator import plugin_off_option

if TYPE_CHECKING:
    from lmcore.config.corpus import Corpus
    from lmcore.data.prepare.named_text import NamedText

__all__ = ["CorporaSection", "run"]


@dataclass(frozen=True)
class CorporaSection:
    """List the texts for `lmcore train --train-data`, and the files of corpora."""

    corpora: tuple[str, ...] = option(
        (),
        "Corpora files, which end with .yaml, and NAME=PATH; default: LMCORE_CORPORA, or "
        "corpora.yaml in the working directory.",
        metavar="FILE",
        paths=CORPORA,
    )
    json: bool = option(False, "Print JSON.")
    plugin_off: tuple[str, ...] = plugin_off_option()


def run(argv: list[str]) -> int:
    """Run `lmcore data corpora` and return the exit status."""
    section = parse_section(CorporaSection, argv, command="lmcore data corpora")
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
    following = f"--train-data {named}" if named else f"--corpus {list(texts)[-1]}"
    print("\n".join([*lines, "", f"next: lmcore train {following}"]))
    return 0


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
