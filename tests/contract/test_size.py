"""No function over 80 lines, no module over 500: tails are what makes code hard to read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "lmcore",
    "plugins/*/src",
    "plugins_cuda/src",
    "plugins_xpu/src",
    "benchmarks",
    "examples",
)
FUNCTION_LINES = 80
MODULE_LINES = 500


def oversized(root: Path) -> Iterator[str]:
    """Yield every module and function under *root* that is over its limit."""
    files = {path for source in SOURCES for path in root.glob(f"{source}/**/*.py")}
    for path in sorted(files):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(root).as_posix()
        lines = len(text.splitlines())
        if lines > MODULE_LINES:
            yield f"{name}: {lines} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > FUNCTION_LINES:
                    yield f"{name}:{node.lineno}: `{node.name}`: {length} lines"


def test_nothing_is_oversized() -> None:
    """Every function and module of the core, the plugins, benchmarks and examples fits."""
    assert list(oversized(ROOT)) == []


def test_planted_tails_are_found(tmp_path: Path) -> None:
    """One line over the limit is found, at the limit is not."""
    (tmp_path / "lmcore").mkdir()

    def body(lines: int) -> str:
        return "def f():\n" + "    pass\n" * (lines - 1)

    (tmp_path / "lmcore" / "fits.py").write_text(body(FUNCTION_LINES), encoding="utf-8")
    (tmp_path / "lmcore" / "function.py").write_text(body(FUNCTION_LINES + 1), encoding="utf-8")
    (tmp_path / "lmcore" / "module.py").write_text("x = 1\n" * (MODULE_LINES + 1), encoding="utf-8")
    assert list(oversized(tmp_path)) == [
        f"lmcore/function.py:1: `f`: {FUNCTION_LINES + 1} lines",
        f"lmcore/module.py: {MODULE_LINES + 1} lines",
    ]
