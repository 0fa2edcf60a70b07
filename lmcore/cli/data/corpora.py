"""`lmcore data corpora`: list the texts of lmcore and of the plugins."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcore.cli.text.terminal import size_text
from lmcore.config.option import option
from lmcore.config.options.command_line import parse_section
from lmcore.config.section.accelerator import plugin_off_option

if TYPE_CHECKING:
    from lmcore.data.prepare.named_text import NamedText

__all__ = ["CorporaSection", "run"]


@dataclass(frozen=True)
class CorporaSection:
    """List the texts for `lmcore train --corpus`."""

    json: bool = option(False, "Print JSON.")
    plugin_off: tuple[str, ...] = plugin_off_option()


def run(argv: list[str]) -> int:
    """Run `lmcore data corpora` and return the exit status."""
    section = parse_section(CorporaSection, argv, command="lmcore data corpora")
    from lmcore.cli.selection import find_plugins
    from lmcore.data.prepare.named_text import named_texts

    texts = named_texts(find_plugins(argv, probe=False))
    rows = [_corpus_row(text) for text in texts.values()]
    if section.json:
        print(json.dumps(rows, indent=2))
        return 0
    lines: list[str] = []
    for row in rows:
        size = "no file" if row["bytes"] is None else size_text(row["bytes"])
        owner = f"plugin {row['plugin']}" if row["plugin"] else "lmcore"
        lines += [row["name"], f"  {row['summary']}", f"  {size}, of {owner}: {row['path']}"]
    print("\n".join([*lines, "", f"next: lmcore train --corpus {rows[-1]['name']}"]))
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
