"""Former names of modules, which plugins for earlier contracts import."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest

from lmcore import old_paths


@pytest.mark.parametrize(
    "old",
    [
        "lmcore.errors",
        "lmcore.bounded_file",
        "lmcore.accelerator",
        "lmcore.accelerator.registry",
        "lmcore.accelerator.op.rules",
        "lmcore.accelerator.op.torch_kernels",
    ],
)
def test_a_former_name_is_the_same_module_with_a_warning(old: str) -> None:
    """Classes are the same by either name: an error raised by one is caught by the other."""
    new = importlib.import_module(old_paths.current_path(old))
    name, spec = new.__name__, new.__spec__
    sys.modules.pop(old, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert importlib.import_module(old) is new
    assert f"`{old}` is `{name}` now" in [str(warning.message) for warning in caught]
    assert {warning.category for warning in caught} == {DeprecationWarning}
    assert (new.__name__, new.__spec__) == (name, spec)
    assert name.startswith(("lmcore.base.", "lmcore.contract"))


def test_the_warning_names_the_line_that_imports() -> None:
    """An author finds the place; attributes and `from` imports work as before the move."""
    code = """
import lmcore.accelerator.op.rules
from lmcore.errors import ConfigError
import lmcore.errors, lmcore.base.errors
assert lmcore.errors is lmcore.base.errors
assert lmcore.accelerator.op.rules.HALF is lmcore.contract.op.rules.HALF
"""
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True
    )
    assert (
        "<string>:2: DeprecationWarning: `lmcore.accelerator` is `lmcore.contract`" in done.stderr
    )
    assert "<string>:3: DeprecationWarning: `lmcore.errors` is `lmcore.base.errors`" in done.stderr


@pytest.mark.parametrize("name", ["lmcore.accelerators", "lmcore.errors_of", "lmcore.log"])
def test_other_names_are_not_found(name: str) -> None:
    """A name that only begins as a former name does, or was private, is unknown."""
    with pytest.raises(ModuleNotFoundError, match=name):
        importlib.import_module(name)


def test_an_unknown_module_below_a_former_name_has_pythons_error() -> None:
    """It has the name of today."""
    warnings.simplefilter("ignore")
    with pytest.raises(ModuleNotFoundError, match=r"lmcore\.contract\.nothing"):
        importlib.import_module("lmcore.accelerator.nothing")
