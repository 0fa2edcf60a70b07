"""Modules that have to start fast load no torch, not even through another module.

import-linter reads import statements; this loads the modules, and so also sees what a package's
`__init__` brings along.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

_LOAD = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
    importlib.import_module(module.name)
print("torch" in sys.modules)
"""

_LOAD_PLUGINS = """
import sys
from importlib.metadata import entry_points
points = entry_points(group="lmcore.plugins")
assert "cpu" in points.names, points
for point in points:
    point.load()
print("torch" in sys.modules)
"""


def loads_torch(code: str, *arguments: str) -> bool:
    """Run *code* in a fresh interpreter and return whether it loaded torch."""
    command = [sys.executable, "-P", "-W", "error", "-c", code, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return {"True\n": True, "False\n": False}[run.stdout]


@pytest.mark.parametrize(
    "name",
    [
        "lmcore.cli",
        "lmcore.config",
        "lmcore.base.errors",
        "lmcore.hookspecs",
        "lmcore.base.log",
        "lmcore.base.child_process",
        "lmcore.base.bounded_file",
        "lmcore.base.crc32",
        "lmcore.base.durable",
        "lmcore.base.lock",
        "lmcore.base.signals",
        "lmcore.base.threads",
        "lmcore.plugin",
        "lmcore.model",
        "lmcore.families.gpt.family",
        "lmcore.train.datasets",  # what the launcher of a run decides by
        "lmcore.train.resume.ended",
        "lmcore.train.resume.point",
    ],
)
def test_module_loads_no_torch(name: str) -> None:
    """The module and everything in it can be imported without torch."""
    assert not loads_torch(_LOAD, name)


def test_installed_plugins_load_no_torch() -> None:
    """Every installed plugin's module can be imported without torch; the CPU plugin is one."""
    assert not loads_torch(_LOAD_PLUGINS)


def test_loading_torch_is_noticed() -> None:
    """The check sees torch where a module does load it."""
    assert loads_torch(_LOAD, "lmcore.contract.op.reference")
