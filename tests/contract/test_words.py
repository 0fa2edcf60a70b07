"""The core names no vendor: not in code, strings, comments or docstrings.

A word counts wherever it is alone or as a part of an identifier (`use_xyz`, `XyzDevice`,
`xyz:0`, `libxyz2`'s `libxyz` does not).  `allowed_words.toml` lists the unavoidable ones.
"""

from __future__ import annotations

import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = Path(__file__).with_name("allowed_words.toml")
_LIST = Path(__file__).with_name("vendor_words.toml")
SOURCES = ("lmcore", "native")
TEXT_SUFFIXES = {".cpp", ".h", ".hpp", ".md", ".py", ".pyi", ".toml", ".yaml", ".yml", ".json"}

WORDS = frozenset(chain(*tomllib.loads(_LIST.read_text(encoding="utf-8")).values()))

_RUN = re.compile(r"[A-Za-z]+")
_CAMEL = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


class Finding(NamedTuple):
    """A vendor's word in a file; `line` 0 is the file's name."""

    file: str
    line: int
    word: str


def vendor_words(text: str) -> set[str]:
    """Return the vendors' words in a piece of text or an identifier."""
    runs = _RUN.findall(text)
    lowered = [run.lower() for run in runs]
    pairs = {f"{first}_{second}" for first, second in pairwise(lowered)}
    parts = {part.lower() for run in runs for part in _CAMEL.findall(run)}
    return WORDS & (pairs | parts | set(lowered))


def pieces(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the tokens of a Python file, or the lines of another text, with their line numbers."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        for offset, line in enumerate(token.string.splitlines()):
            yield token.start[0] + offset, line


def findings(root: Path) -> set[Finding]:
    """Return every vendor's word under *root*'s source folders."""
    found = set()
    for path in sorted(path for source in SOURCES for path in (root / source).rglob("*")):
        if path.suffix not in TEXT_SUFFIXES or "__pycache__" in path.parts:
            continue
        name = path.relative_to(root).as_posix()
        found |= {Finding(name, 0, word) for word in vendor_words(name)}
        for number, piece in pieces(path):
            found |= {Finding(name, number, word) for word in vendor_words(piece)}
    return found


def allowed() -> dict[tuple[str, str], str]:
    """Return the reason for each allowed (file, word)."""
    entries = tomllib.loads(ALLOWED.read_text(encoding="utf-8")).get("allow", [])
    return {(entry["file"], entry["word"]): entry["reason"] for entry in entries}


def test_core_names_no_vendor() -> None:
    """Every vendor's word in the core is on the list of allowed ones."""
    refused = [found for found in findings(ROOT) if (found.file, found.word) not in allowed()]
    lines = [f"{file}:{line}: `{word}`" for file, line, word in sorted(refused)]
    assert not lines, "the core names a vendor:\n" + "\n".join(lines)


def test_no_permission_is_stale() -> None:
    """Each allowed word is still there, and says why it is."""
    present = {(found.file, found.word) for found in findings(ROOT)}
    assert set(allowed()) <= present
    assert all(len(reason.split()) > 2 for reason in allowed().values())


@pytest.mark.parametrize(
    "line",
    [
        "import torch.cuda",
        "use_xpu = True",
        "class NCCLBackend: pass",
        "class CudaDevice: pass",
        "x.to('xpu:0')",
        "# faster with oneCCL",
        '"""Runs on ROCm."""',
        "f'{flash_attn_version}'",
        "name = 'flash-attn'",
        "HIP_VISIBLE_DEVICES = 1",
        "cuDNN = 1",
        "x = 'transformer-engine'",
        "gpu = cuda0",
    ],
)
def test_planted_word_is_found(tmp_path: Path, line: str) -> None:
    """A vendor's word in an identifier, string, comment or docstring is found, with its line."""
    (tmp_path / "lmcore").mkdir()
    (tmp_path / "lmcore" / "planted.py").write_text(f"x = 1\n{line}\n", encoding="utf-8")
    assert {(found.file, found.line) for found in findings(tmp_path)} == {("lmcore/planted.py", 2)}


def test_planted_word_is_found_in_every_kind_of_source(tmp_path: Path) -> None:
    """C++ files, presets and the names of files are read too."""
    for name in ("native/a.cpp", "lmcore/a.yaml", "lmcore/cuda_graph.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "cuda" in name else "// xpu\n", encoding="utf-8")
    assert {(found.file, found.line) for found in findings(tmp_path)} == {
        ("native/a.cpp", 1),
        ("lmcore/a.yaml", 1),
        ("lmcore/cuda_graph.py", 0),
    }


@pytest.mark.parametrize(
    "line", ["relationship = 1", "accl = clip(x)", "# intelligent chips", "gpu"]
)
def test_other_words_pass(line: str) -> None:
    """A word that only contains the letters of a vendor's is no vendor's word."""
    assert not vendor_words(line)
