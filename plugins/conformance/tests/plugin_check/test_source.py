"""Imports of a plugin's files from lmcore."""

from __future__ import annotations

import copy

import pytest

from lmcore_conformance.contract.snapshot import describe_contract
from lmcore_conformance.plugin_check.source import check_source, source_files

CONTRACT = describe_contract()


def checked(folder, text, contract=CONTRACT):
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return list(check_source([path], contract))


@pytest.mark.parametrize(
    "text",
    [
        "from lmcore.accelerator import Device, OP_SPECS, torch_build, OpImpl",
        "from lmcore.accelerator.probe import Check",
        "from lmcore.accelerator import tokenizer",
        "import lmcore.accelerator, lmcore.errors",
        "from lmcore import hookspecs",
        "from lmcore.config.option import option",
        "import lmcore_other, torch",
        "from . import lmcore",
        "from lmcore.accelerator import *",
    ],
)
def test_the_contract_may_be_imported(tmp_path, text):
    """Four packages of lmcore, everybody else's, and the plugin's own."""
    (check,) = checked(tmp_path, text)
    assert (check.status, check.detail) == (
        "ok",
        "1 file imports nothing of lmcore but the contract",
    )


@pytest.mark.parametrize(
    "text, module",
    [
        ("import lmcore.train.loop", "lmcore.train.loop"),
        ("from lmcore.runtime import rank", "lmcore.runtime"),
        ("from lmcore import model", "lmcore.model"),
        ("def late():\n    from lmcore.plugin import discover", "lmcore.plugin"),
        ("from lmcore.configuration import x", "lmcore.configuration"),
    ],
)
def test_the_rest_of_lmcore_is_a_warning(tmp_path, text, module):
    """It may work today; the line and the module are named."""
    (check,) = checked(tmp_path, text)
    assert check.status == "warning"
    assert check.detail.startswith(f"imports `{module}` (mine.py, line {text.count(chr(10)) + 1})")


def test_a_name_that_is_not_there_is_a_failure(tmp_path):
    """The name that was meant is the fix."""
    (check,) = checked(tmp_path, "def f():\n    from lmcore.accelerator import OpImp")
    assert check.status == "failed"
    assert "imports `OpImp` from `lmcore.accelerator` (mine.py, line 2)" in check.detail
    assert check.fix == "did you mean `OpImpl`?"


def test_a_name_that_came_later_is_a_failure(tmp_path):
    """Held against an older version, what it did not have yet is named."""
    old = copy.deepcopy(CONTRACT) | {"api": "0.9"}
    del old["functions"]["torch_build"]
    (check,) = checked(tmp_path, "from lmcore.accelerator import torch_build", old)
    assert check.status == "failed"
    assert "which version 0.9 of the contract does not have; it came later" in check.detail


def test_a_file_that_is_no_python_is_a_failure(tmp_path):
    """It is named, and the others are read."""
    (check,) = checked(tmp_path, "def f(:")
    assert check.status == "failed"
    assert check.detail.startswith("mine.py cannot be read: ")


def test_the_files_of_a_package_are_found(tmp_path, monkeypatch):
    """All files of the top-level package count, or the one file of a module."""
    inner = tmp_path / "plugin_package" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "plugin_package" / "__init__.py").touch()
    (inner / "deep.py").touch()
    (tmp_path / "plugin_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    names = {path.name for path in source_files("plugin_package.inner.deep")}
    assert names == {"__init__.py", "deep.py"}
    assert [path.name for path in source_files("plugin_module")] == ["plugin_module.py"]
    assert source_files("no_such_plugin") == []


def test_compiled_modules_alone_are_skipped():
    """A plugin without source is reported, and does not pass."""
    (check,) = check_source([], CONTRACT)
    assert check.status == "skipped"
