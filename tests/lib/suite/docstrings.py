"""Lint of docstrings: each begins with what it documents, in the field's terms.

Run by `tox -e lint`, beside ruff's D401.  The docstring of a module, class or property begins with
a noun (or "True if"), a function's with a verb in the imperative.  Tests state what holds.
Text in backticks is not checked.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
SOURCES = (
    *("lmcore", "plugins", "plugins_cuda", "plugins_xpu", "tests"),
    *("benchmarks", "docs", "examples", "native"),
)

# Phrases that a file quotes: (file, phrase as found, in lower case).
QUOTED: frozenset[tuple[str, str]] = frozenset()

_PRONOUN = re.compile(
    r"(what|which|whatever|whether|who|whoever|whose|how|where|wherever|when|that|those|as|if)\b",
    re.IGNORECASE,
)
_NO_VERB = re.compile(
    r"""(An?|The|Its?|They|Their|Ones?|Two|Three|Four|This|These|Such|Others?|Another|Each|Every|All
    |Any|Both|Some|None|No|Nothing|Not|Nor|Only|More|Most|And|Or|But|Else|By|From|In|Of|On|Under
    |For|At|To|With|Without|Within|After|Before|Beside|Between|So|Too|There|Why)\b
    |(?![A-Z][a-z]) | \w+'s\b
    |(?!Access|Address|Assess|Bias|Bypass|Compress|Cross|Discuss|Express|Guess|Pass|Process)\w+s\b""",
    re.VERBOSE,
)
_PHRASE = re.compile(
    r"""\b(told|tells|hears|stands?(?!-)|mend(s|ed|ing)?|anew|whoever|go(es)?\s+on|likewise
    |of\s+(which|(its|their)\s+own)|that\s+of|those\s+(of|that|who|with)|the\s+like
    |who\s+errs)\b
    |^\s+\w+(,\ \*{0,2}\w+)*:\s+(?-i:Of|From|Whether|What|Which|How|Where)\b""",
    re.IGNORECASE | re.VERBOSE | re.MULTILINE,
)


class Finding(NamedTuple):
    """A refused docstring: its file and line, the kind of rule, and the words."""

    file: str
    line: int
    rule: str
    words: str


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield each docstring with its line, and True if it has to begin with a verb.

    The string after an assignment in a module or class counts as the docstring of its attribute.
    """
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, *functions)):
            continue
        before: ast.AST = node
        for statement in node.body[:1] if isinstance(node, functions) else node.body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if isinstance(
                    before, (ast.Module, ast.ClassDef, *functions, ast.Assign, ast.AnnAssign)
                ):
                    yield statement.lineno, text, isinstance(node, functions) and does(node)
            before = statement


def does(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True if *function* is neither a property nor a test nor a test's fixture."""
    marks = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
    return not re.search(r"property\b|fixture\b", marks) and not function.name.startswith("test_")


def findings(root: Path) -> Iterator[Finding]:
    """Yield what is refused in the Python files of *root*'s source folders."""
    for path in sorted(path for source in SOURCES for path in (root / source).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        for line, docstring, verb in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            text = re.sub(r"``?[^`]+``?", "`...`", docstring)
            first = " ".join(text.split()[:4])
            if _PRONOUN.match(text):
                yield Finding(file, line, "begins with a pronoun", first)
            elif verb and _NO_VERB.match(text):
                yield Finding(file, line, "begins with no verb", first)
            for found in _PHRASE.finditer(text):
                phrase = " ".join(found[0].split())
                if (file, phrase.lower()) not in QUOTED:
                    yield Finding(file, line + text.count("\n", 0, found.end()), "says", phrase)


def main() -> int:
    """Print what is refused; return the exit status."""
    found = list(findings(ROOT))
    for file, line, rule, phrase in found:
        print(f"{file}:{line}: {rule}: {phrase}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
