"""docs/check_links.py finds what leads nowhere."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
broken_links = runpy.run_path(str(ROOT / "docs" / "check_links.py"))["broken_links"]


def test_every_link_leads_somewhere() -> None:
    """The project's own pages have no broken link."""
    assert list(broken_links(ROOT)) == []


def test_planted_links_are_found(tmp_path: Path) -> None:
    """A missing file and a missing heading are found; code, hosts and good links are not."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "other.md").write_text("# A `b`, c!\n\n## Twice\n\n## Twice\n")
    (tmp_path / "page.md").write_text(
        "# Top\n"
        "[1](sub/other.md) [2](sub/other.md#a-b-c) [3](#top) [4](https://example.org/x.md)\n"
        "[5](sub/other.md#twice-1) [6](sub) `[7](code.md)`\n"
        "```\n[8](fenced.md)\n```\n"
        "[9](missing.md) [10](sub/other.md#twice-2) [11](#nowhere)\n"
        "[ref]: gone.md\n"
    )
    assert list(broken_links(tmp_path)) == [
        "page.md: missing.md: no such file",
        "page.md: sub/other.md#twice-2: no such heading",
        "page.md: #nowhere: no such heading",
        "page.md: gone.md: no such file",
    ]
