"""Record what versions of torch offer to the XPU plugin: names, and signatures of functions.

    python plugins_xpu/tests/record_signatures.py 2.11.0 2.12.0    # wheels are fetched and deleted
    python plugins_xpu/tests/record_signatures.py path/to/torch.whl path/to/site-packages

Sources are read as text: torch is not imported, and a wheel for any system will do, since the
Python part is the same in all of them.  One file of `signatures/` holds one version; the tests
compare the stand-ins of `fakes/`, and what the plugin's sources name, with each.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

SIGNATURES = Path(__file__).with_name("signatures")
WITH_SIGNATURES = ("torch.xpu", "torch.accelerator", "torch.distributed")
"""Modules whose functions are recorded with their signatures."""
WITH_NAMES = (
    *("torch", "torch.amp", "torch.autograd", "torch.autograd.function", "torch.backends"),
    *("torch.backends.mkldnn", "torch.nn", "torch.nn.attention", "torch.nn.functional"),
    *("torch.optim", "torch.profiler", "torch.version"),
)
"""Modules whose names are recorded."""
_SMALL_WHEEL = ("--platform", "macosx_11_0_arm64", "--platform", "macosx_14_0_arm64")
_COMPILED = {
    "torch": ("torch/_C/__init__.pyi", "torch/_C/_VariableFunctions.pyi"),
    "torch.nn.functional": ("torch/_C/_nn.pyi",),
}
"""Stubs of names that the compiled part puts into a module."""


class Sources:
    """The Python sources of one torch, in a wheel or a folder."""

    def __init__(self, where: Path) -> None:
        if where.is_dir():
            self.paths = {
                path.relative_to(where).as_posix() for path in (where / "torch").rglob("*.py*")
            }
            self._read: Callable[[str], str] = lambda path: (where / path).read_text("utf-8")
        else:
            archive = zipfile.ZipFile(where)
            self.paths = set(archive.namelist())
            self._read = lambda path: archive.read(path).decode("utf-8")
        self._known: dict[str, dict[str, ast.AST | None]] = {}

    def version(self) -> str:
        """Return the release, without a build's suffix."""
        found = re.search(r"^__version__ = '([^'+]+)", self._read("torch/version.py"), re.MULTILINE)
        assert found is not None
        return found[1]

    def tree(self, path: str) -> list[ast.stmt]:
        """Return the statements of a file."""
        return ast.parse(self._read(path)).body

    def file_of(self, module: str) -> str | None:
        """Return the path of a module's source, None where it has none here."""
        path = module.replace(".", "/")
        return next(
            (
                candidate
                for candidate in (f"{path}/__init__.py", f"{path}.py")
                if candidate in self.paths
            ),
            None,
        )

    def names(self, module: str) -> dict[str, ast.AST | None]:
        """Return the names of a module, with the definition of each function and class."""
        if module in self._known:
            return self._known[module]
        found: dict[str, ast.AST | None] = {}
        self._known[module] = found  # modules import each other
        path = self.file_of(module)
        if path is None:
            return found
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        folder = path.removesuffix("__init__.py")
        for one in self.paths if path.endswith("__init__.py") else ():
            inner = one.removeprefix(folder)
            if one.startswith(folder) and inner.endswith(".py") and inner.count("/") < 2:
                name = inner.removesuffix("/__init__.py").removesuffix(".py")
                if name.isidentifier() and name != "__init__":
                    found[name] = None
        self._collect(self.tree(path), package, found)
        for stub in _COMPILED.get(module, ()):
            defined = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
            kept = [node for node in self.tree(stub) if isinstance(node, defined)]
            self._collect(kept, package, found)
        return found

    def _collect(
        self, body: list[ast.stmt], package: str, found: dict[str, ast.AST | None]
    ) -> None:
        for node in statements(body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = node
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name.partition(".")[0], None)
            elif isinstance(node, ast.ImportFrom):
                self._import(node, package, found)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (node for target in targets for node in ast.walk(target)):
                    if isinstance(name, ast.Name):
                        found.setdefault(name.id, None)

    def _import(self, node: ast.ImportFrom, package: str, found: dict[str, ast.AST | None]) -> None:
        module = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            module = ".".join([*parents, *([module] if module else [])])
        everything = any(alias.name == "*" for alias in node.names)
        # Others' names are followed where signatures or lists of names lie there.
        known = self.names(module) if node.level or everything else {}
        for alias in node.names:
            if alias.name == "*":
                shown = self._shown(module, known)
                found |= {name: one for name, one in known.items() if name in shown}
            elif found.get(alias.asname or alias.name) is None:
                found[alias.asname or alias.name] = known.get(alias.name)

    def _shown(self, module: str, known: Iterable[str]) -> set[str]:
        """Return what `import *` takes of a module: `__all__`, or all public names."""
        path = self.file_of(module)
        for node in self.tree(path) if path else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                with contextlib.suppress(ValueError):
                    return set(ast.literal_eval(node.value))
        return {name for name in known if not name.startswith("_")}


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield what runs when a module is imported, whichever way its conditions go."""
    for node in body:
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.dump(node.test):
                yield from statements(node.body)
            yield from statements(node.orelse)
        elif isinstance(node, ast.Try):
            for part in (node.body, *(handler.body for handler in node.handlers), node.orelse):
                yield from statements(part)
        else:
            yield node


def signature(node: ast.FunctionDef) -> str:
    """Return parameters without annotations; a default that is no literal is `...`."""
    arguments = node.args
    for one in ast.walk(arguments):
        if isinstance(one, ast.arg):
            one.annotation = None
    arguments.defaults = [literal(default) for default in arguments.defaults]
    arguments.kw_defaults = [default and literal(default) for default in arguments.kw_defaults]
    return f"({ast.unparse(arguments)})"


def literal(node: ast.expr) -> ast.expr:
    """Return a literal as it is, and `...` for what must be computed."""
    try:
        ast.literal_eval(node)
    except ValueError:
        return ast.Constant(...)
    return node


def signatures(names: dict[str, ast.AST | None]) -> dict[str, str]:
    """Return the signatures of functions, and of the methods of classes, that are public."""
    found = {}
    for name, node in sorted(names.items()):
        if isinstance(node, ast.FunctionDef) and not name.startswith("_"):
            found[name] = signature(node)
        if isinstance(node, ast.ClassDef) and not name.startswith("_"):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.decorator_list:
                    found[f"{name}.{method.name}"] = signature(method)
    return found


def properties(sources: Sources) -> list[str]:
    """Return the fields of what `torch.xpu.get_device_properties` returns."""
    (record,) = (
        node
        for node in sources.tree("torch/_C/__init__.pyi")
        if isinstance(node, ast.ClassDef) and node.name == "_XpuDeviceProperties"
    )
    fields = (node.target for node in record.body if isinstance(node, ast.AnnAssign))
    return sorted(field.id for field in fields if isinstance(field, ast.Name))


def compiled(sources: Sources) -> dict[str, str]:
    """Return the signatures of what `torch.xpu` calls in torch's compiled part."""
    return {
        node.name: signature(node)
        for node in sources.tree("torch/_C/__init__.pyi")
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_xpu_")
    }


def record(sources: Sources) -> dict[str, Any]:
    """Return all that is recorded of a version."""
    modules = {name: sources.names(name) for name in WITH_SIGNATURES}
    names = modules | {name: sources.names(name) for name in WITH_NAMES}
    return {
        "torch": sources.version(),
        "device_properties": properties(sources),
        "compiled": compiled(sources),
        "signatures": {name: signatures(found) for name, found in modules.items()},
        "names": {
            name: " ".join(sorted(member for member in found if not member.startswith("_")))
            for name, found in names.items()
        },
    }


def write(folder: Path) -> Path:
    """Record the torch of a wheel or a folder; return the file."""
    found = record(Sources(folder))
    file = SIGNATURES / f"torch-{found['torch']}.json"
    SIGNATURES.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return file


def fetch(version: str, folder: Path) -> Path:
    """Return the wheel of a version, from the registry; the smallest there is."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command += [str(folder), "--only-binary=:all:", *_SMALL_WHEEL, f"torch=={version}"]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob(f"torch-{version}-*.whl")
    return wheel


def main() -> None:
    """Record what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="+", help="a version, a wheel, or the folder torch lies in")
    for target in parser.parse_args().what:
        if Path(target).exists():
            print(write(Path(target)))
            continue
        with tempfile.TemporaryDirectory() as folder:
            print(write(fetch(target, Path(folder))))


if __name__ == "__main__":
    main()
