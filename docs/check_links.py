"""Check that every relative link in the Markdown files leads to a file and, with `#`, to a heading.

Run by `tox -e docs`.  Links to other hosts are not followed: the check needs no network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = {".git", ".tox", ".venv", "build", "dist", "node_modules", "runs"}

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*\s*$", re.MULTILINE)


def markdown_files(root: Path) -> Iterator[Path]:
    """Yield the Markdown files under *root* that belong to the project."""
    for path in sorted(root.rglob("*.md")):
        folders = path.relative_to(root).parts[:-1]
        if not any(folder in SKIPPED or folder.startswith(".venv") for folder in folders):
            yield path


def anchors(text: str) -> set[str]:
    """Return the anchors that a page's headings get: lower case, hyphens, no punctuation."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        kept = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        repeats = sum(1 for known in found if re.fullmatch(rf"{re.escape(kept)}(-\d+)?", known))
        found.add(f"{kept}-{repeats}" if repeats else kept)
    return found


def broken_links(root: Path) -> Iterator[str]:
    """Yield `file: link: reason` for each relative link under *root* that leads nowhere."""
    for page in markdown_files(root):
        text = page.read_text(encoding="utf-8")
        prose = _CODE.sub("", _FENCE.sub("", text))
        for link in [*_LINK.findall(prose), *_REFERENCE.findall(prose)]:
            if re.match(r"[a-z][a-z0-9+.-]*:", link):
                continue
            target, _, anchor = unquote(link).partition("#")
            found = page.parent / target if target else page
            name = page.relative_to(root).as_posix()
            if not found.exists():
                yield f"{name}: {link}: no such file"
            elif anchor and found.suffix == ".md" and anchor not in anchors(found.read_text()):
                yield f"{name}: {link}: no such heading"


def main() -> int:
    """Print the broken links; return 1 if there are any."""
    broken = list(broken_links(ROOT))
    pages = len(list(markdown_files(ROOT)))
    print(*broken, f"{pages} pages, {len(broken)} broken links", sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
