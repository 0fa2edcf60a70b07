"""The import contracts of `.importlinter` refuse what they are there to refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="`tox -e imports` installs import-linter")

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = {
    "lmcore_cpu": "plugins/cpu/src",
    "lmcore_cuda": "plugins_cuda/src",
    "lmcore_data_tools": "plugins/data-tools/src",
    "lmcore_deepspeed": "plugins/deepspeed/src",
    "lmcore_serve": "plugins/serve/src",
    "lmcore_sim": "plugins/sim/src",
    "lmcore_triton": "plugins/triton/src",
    "lmcore_xla": "plugins/xla/src",
    "lmcore_xpu": "plugins_xpu/src",
}
LAYERS = [
    ["cli"],
    ["library", "train", "retrieval"],
    ["logger"],
    ["evaluation"],
    ["generation"],
    ["inference"],
    ["conversion"],
    ["checkpoint"],
    ["optim", "parallel"],
    ["families"],
    ["data"],
    ["runtime"],
    ["plugin"],
    ["hookspecs"],
    ["contract"],
    ["config"],
    ["model"],
    ["base"],
    ["old_paths"],
]


# Answers each line, which has a configuration and folders, in a process that is forked for it.
# The finder of an editable install would answer with this repository's packages.
_LINTER = """
import json, os, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from importlinter.cli import lint_imports
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]
for line in sys.stdin:
    configuration, *folders = json.loads(line)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.chdir(folders[0])
        sys.path[:0] = folders
        status = lint_imports(config_filename=configuration, no_cache=True)
        sys.stdout.flush()
        os._exit(status)
    os.close(write)
    with open(read) as file:
        output = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([status, output]), flush=True)
"""

Lint = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def lint() -> Iterator[Lint]:
    """Function that checks the packages in folders against the repository's contracts."""
    command = [sys.executable, "-P", "-c", _LINTER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as linter:
        assert linter.stdin is not None
        assert linter.stdout is not None
        asked, told = linter.stdin, linter.stdout

        def check(*folders: Path) -> tuple[int, str]:
            words = [str(path) for path in (ROOT / ".importlinter", *folders)]
            asked.write(f"{json.dumps(words)}\n")
            status, output = json.loads(told.readline())
            return status, output

        yield check


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """An empty package for each layer and each plugin."""
    modules = [*(f"lmcore/{name}" for row in LAYERS for name in row), "lmcore/base/log"]
    for module in ["lmcore", *modules, *PLUGINS]:
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").touch()
    return tmp_path


def test_empty_skeleton_passes(lint: Lint, skeleton: Path) -> None:
    """The contracts hold where nothing is imported, so that the plants below are what breaks."""
    status, output = lint(skeleton)
    assert status == 0, output


@pytest.mark.parametrize(
    "importer,imported",
    [
        *[
            (f"lmcore/{lower}", f"lmcore.{upper}")
            for above, below in pairwise(LAYERS)
            for upper in above
            for lower in below
        ],
        *[
            (f"lmcore/{left}", f"lmcore.{right}")
            for row in LAYERS
            for left in row
            for right in row
            if left != right
        ],
        ("lmcore/config", "torch"),
        ("lmcore/hookspecs", "torch.nn"),
        ("lmcore/plugin", "torch"),
        ("lmcore/base", "torch"),
        ("lmcore/train", "lmcore_cpu"),
        ("lmcore/contract", "lmcore_xpu"),
        ("lmcore/train", "lmcore_deepspeed"),
        ("lmcore/train", "deepspeed"),
        ("lmcore/data", "lmcore_data_tools"),
        ("lmcore_data_tools", "lmcore.train"),
        ("lmcore_data_tools", "lmcore_cpu"),
        ("lmcore_deepspeed", "lmcore_cpu"),
        ("lmcore/generation", "lmcore_serve"),
        ("lmcore_serve", "lmcore.train"),
        ("lmcore_serve", "lmcore.families"),
        ("lmcore_serve", "lmcore_deepspeed"),
        ("lmcore/families", "triton"),
        ("lmcore_cpu", "lmcore.runtime"),
        ("lmcore_cuda", "lmcore.families"),
        ("lmcore_xpu", "lmcore.plugin"),
        ("lmcore_xpu", "lmcore_cpu"),
        ("lmcore_xla", "lmcore.runtime"),
        ("lmcore_sim", "lmcore.runtime"),
        ("lmcore/checkpoint", "lmcore_sim"),
        ("lmcore/families", "lmcore_triton"),
        ("lmcore_triton", "lmcore.model"),
        ("lmcore_triton", "lmcore_cuda"),
    ],
)
def test_planted_import_is_refused(
    lint: Lint, skeleton: Path, importer: str, imported: str
) -> None:
    """An import against the layers, inside a function too, breaks a contract."""
    code = f"def late() -> None:\n    import {imported}\n"
    (skeleton / importer / "planted.py").write_text(code, encoding="utf-8")
    status, output = lint(skeleton)
    assert status == 1
    assert f"{importer.replace('/', '.')}.planted -> {imported.removesuffix('.nn')}" in output


def test_indirect_torch_is_refused(lint: Lint, skeleton: Path) -> None:
    """`plugin` reaching torch through the layer of the contract breaks the contract."""
    for name, imported in [("plugin", "lmcore.contract.op"), ("contract", "torch")]:
        module = "op" if name == "contract" else "planted"
        (skeleton / "lmcore" / name / f"{module}.py").write_text(f"import {imported}\n")
    status, output = lint(skeleton)
    assert status == 1
    assert "torch" in output


def test_new_folder_needs_a_layer(lint: Lint, skeleton: Path) -> None:
    """A package that has no place among the layers is refused."""
    (skeleton / "lmcore" / "extra").mkdir()
    (skeleton / "lmcore" / "extra" / "__init__.py").touch()
    status, output = lint(skeleton)
    assert status == 1
    assert "lmcore.extra" in output


def test_annotation_is_a_dependency(lint: Lint, skeleton: Path) -> None:
    """An import against the layers is refused if only annotations need it, too."""
    code = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import lmcore.train\n"
    (skeleton / "lmcore" / "config" / "planted.py").write_text(code, encoding="utf-8")
    status, output = lint(skeleton)
    assert status == 1
    assert "lmcore.config.planted -> lmcore.train" in output


def test_circle_is_refused(lint: Lint, skeleton: Path) -> None:
    """Two files of a folder may not import each other, not even for annotations."""
    folder = skeleton / "lmcore" / "data"
    (folder / "early.py").write_text("import lmcore.data.late\n", encoding="utf-8")
    code = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import lmcore.data.early\n"
    (folder / "late.py").write_text(code, encoding="utf-8")
    status, output = lint(skeleton)
    assert status == 1
    assert "No cycles are allowed in lmcore.data" in output


def test_repository_keeps_the_contracts(lint: Lint) -> None:
    """The packages of this repository pass, so that `tox -e imports` means something."""
    status, output = lint(ROOT, *(ROOT / source for source in PLUGINS.values()))
    assert status == 0, output
