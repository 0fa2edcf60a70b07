"""The page on the library has every public name, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import lmcore

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs/reference/library.md").read_text("utf-8")


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


def test_the_lines_of_the_readme_run(
    start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As they are printed, without lines before them."""
    start().close()  # the environment of the other tests, restored at the end
    monkeypatch.setenv("LMCORE_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if "lmcore.start" in block]
    exec(compile(block, "README.md", "exec"), {})
    assert (tmp_path / "out" / "iter_0000004").is_dir()
