"""Compare the releases that `package_sources.toml` names with what it records of them.

    python plugins_cuda/tests/compare_package_sources.py             # fetches and deletes them
    python plugins_cuda/tests/compare_package_sources.py *.whl *.tar.gz

Sources are read as text: nothing of a package is imported.  Source archives are fetched with pip,
which runs their `setup.py`: torch has to be installed.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORD = tomllib.loads(Path(__file__).with_name("package_sources.toml").read_text(encoding="utf-8"))


class Archive:
    """A wheel or source archive: its release, and its Python files by path in the package."""

    def __init__(self, path: Path) -> None:
        name, version = re.match(r"(.+?)-(\d[^-]*?)(?:-|\.tar)", path.name).groups()
        self.release = f"{name.replace('_', '-')}=={version}"
        self.files: dict[str, str] = {}
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                for file in wheel.namelist():
                    if file.endswith(".py"):
                        self.files[file] = wheel.read(file).decode("utf-8")
            return
        with tarfile.open(path) as source:
            for member in source:
                if member.name.endswith(".py") and member.isfile():
                    inner = member.name.partition("/")[2]
                    self.files[inner] = source.extractfile(member).read().decode("utf-8")


def parameters(tree: ast.Module, name: str) -> str | None:
    """Return the parameters of a function, or of an autograd function's `forward`, as recorded."""
    name, _, method = name.partition(".")
    found = next((node for node in tree.body if getattr(node, "name", "") == name), None)
    if found is not None and method:
        found = next(node for node in found.body if getattr(node, "name", "") == "forward")
    if found is None:
        return None
    arguments = found.args
    if method:
        arguments.posonlyargs, arguments.args = arguments.args[1:], []
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    arguments.defaults = [
        ast.Constant(...) if isinstance(default, ast.Name) else default
        for default in arguments.defaults
    ]
    return f"({ast.unparse(arguments)})"


def calls(archive: Archive, name: str) -> Iterator[int]:
    """Yield the number of arguments of each call of a function, in the part for torch."""
    for path, text in archive.files.items():
        if not path.startswith("transformer_engine/pytorch/"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if called == name:
                    assert not node.keywords
                    yield len(node.args)


def compare(archive: Archive) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield place, function, recorded and found for what the record has of a release."""
    for function in RECORD["function"]:
        name = function["name"]
        for source in function["sources"]:
            if source.get("release") == archive.release:
                found = parameters(ast.parse(archive.files[source["path"]]), name)
                yield source["path"], name, source["parameters"], found
        if archive.release in function.get("callers", ()):
            count = len(function["arguments"])
            found = sorted(set(calls(archive, name)))
            yield "calls", name, [count], found
    for constant in RECORD["constant"]:
        if constant["release"] == archive.release:
            text = archive.files[constant["path"]]
            (value,) = (
                node.value
                for node in ast.parse(text).body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == constant["name"]
            )
            keys = {ast.unparse(key) for key in value.keys}
            found = [key for key in constant["keys"] if key in keys]
            yield constant["path"], constant["name"], constant["keys"], found


def releases() -> list[str]:
    """Return all releases that the record names."""
    found = {constant["release"] for constant in RECORD["constant"]}
    for function in RECORD["function"]:
        found |= {source["release"] for source in function["sources"] if "release" in source}
        found |= set(function.get("callers", ()))
    return sorted(found)


def fetch(release: str, folder: Path) -> None:
    """Put the archive of a release into *folder*: a wheel, or the sources of flash-attn."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--pre"]
    command += ["--dest", str(folder), release]
    if release.startswith("flash-attn=="):
        command += ["--no-binary", ":all:", "--no-build-isolation"]
    else:
        command += ["--only-binary", ":all:"]
    environment = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    subprocess.run(command, check=True, env=environment)


def main() -> int:
    """Compare, and return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("archive", nargs="*", type=Path, help="a wheel or source archive")
    archives = parser.parse_args().archive
    differences = 0
    with tempfile.TemporaryDirectory() as folder:
        if not archives:
            for release in releases():
                fetch(release, Path(folder))
            archives = sorted(Path(folder).iterdir())
        for path in archives:
            archive = Archive(path)
            for place, name, recorded, found in compare(archive):
                same = recorded == found
                differences += not same
                detail = "as recorded" if same else f"recorded {recorded}, found {found}"
                print(f"{archive.release} {place} {name}: {detail}")
    return min(differences, 1)


if __name__ == "__main__":
    sys.exit(main())
