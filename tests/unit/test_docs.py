"""The reference pages say what the code does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from lmcore.cli.main import COMMANDS
from lmcore.config import megatron
from lmcore.config.preset import PRESETS
from lmcore.config.section import run_options

ROOT = Path(__file__).resolve().parents[2]


def load_generator() -> ModuleType:
    path = ROOT / "docs/generate.py"
    spec = importlib.util.spec_from_file_location("docs_generate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()


@pytest.mark.parametrize("path", GENERATOR.PAGES)
def test_page_is_up_to_date(path: str) -> None:
    """Each generated file is what the code makes now; a new flag is thereby a visible decision."""
    made = GENERATOR.PAGES[path]()
    assert made == (ROOT / path).read_text(encoding="utf-8"), "run `python docs/generate.py`"


def page(name: str) -> str:
    return (ROOT / "docs/reference" / name).read_text(encoding="utf-8")


def test_everything_appears() -> None:
    """Every option, preset, old flag and command stands in its page."""
    for name in run_options():
        assert f"| `{name}` |" in page("options.md")
    for name in PRESETS:
        assert f"| `{name}` |" in page("presets.md")
    for name in (*megatron.RENAMED, *megatron.FIXED, *megatron.UNSUPPORTED):
        assert f"| `{name}" in page("megatron-flags.md")
    for group in COMMANDS.values():
        for name in group:
            assert f"\n## `lmcore {name}`\n" in page("commands.md")


def test_guide_names_real_options() -> None:
    """The flags and YAML keys in the guide to configuration exist."""
    text = (ROOT / "docs/how-to/configure.md").read_text(encoding="utf-8")
    known = {one.flag for one in run_options().values()}
    known |= {f"--no-{one.flag[2:]}" for one in run_options().values() if one.type is bool}
    known |= {*megatron.RENAMED, *megatron.FIXED, *megatron.UNSUPPORTED}
    known |= {"--preset", "--help", "--json", "--no"}
    assert set(re.findall(r"--[a-z][a-z-]*[a-z]", text)) <= known
