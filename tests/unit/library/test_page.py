"""The page on the library has every public name, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import lmcore

TEXT = (Path(__file__).resolve().parents[3] / "docs/reference/library.md").read_text("utf-8")


def test_every_name_is_documented() -> None:
    """Names of the package, and attributes of a session by `rt.`."""
    own = {name for name in vars(lmcore.Session) if not name.startswith("_")} - {
        "current",
        "require_none",
    }
    documented = set(re.findall(r"`rt\.(\w+)", TEXT)) | set(re.findall(r"with rt\.(\w+)", TEXT))
    assert own <= documented
    assert documented - own == {"opened_at"}
    assert all(f"`{name}" in TEXT for name in lmcore.__all__)
