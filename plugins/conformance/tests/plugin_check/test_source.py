"""Names of lmcore that a plugin's files use, compared with the contract."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from lmcore_conformance.contract.snapshot import describe_contract, load_contract
from lmcore_conformance.contract.surface import LOADS_TORCH, PUBLIC_MODULES
from lmcore_conformance.plugin_check.source import check_source, source_files

CONTRACT = describe_contract()
ROOT = Path(__file__).resolve().parents[4]
OWN_PLUGINS = (
    "examples/plugin_extension/src",
    "plugins/conformance/tests/extra",
    "plugins/conformance/tests/fake",
    "plugins/cpu/src",
    "plugins/sim/src",
    "plugins/triton/src",
    "plugins/xla/src",
    "plugins_cuda/src",
    "plugins_xpu/src",
    "plugins_xpu/tests/on_sim",
    "tests/contract/throwaway",
)
"""All plugins of this repository but the kit, which is released together with the core."""


def checked(folder, text, contract=CONTRACT, **settings):
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return list(check_source([path], contract, **settings))


@pytest.mark.parametrize(
    "text",
    [
        "from lmcore.contract import Device, OP_SPECS, torch_build, OpImpl",
        "from lmcore.contract import *\nDevice.from_torch('mine')",
        "from lmcore.contract.op import rules\nrules.dtypes('float32')",
        "import lmcore.contract, lmcore.base.errors\nlmcore.base.errors.DeviceError('')",
        "import lmcore.contract.op.packages as p\np.package_of.__name__",
        "from lmcore import hookspecs\nhookspecs.hookimpl()",
        "from lmcore.config.option import option",
        "import lmcore_other, torch\nlmcore_other.runtime",
        "import lmcore\nprint(lmcore.__version__, lmcore.__file__)",
        "from . import lmcore\nlmcore.runtime.rank",
        "def f(lmcore):\n    return lmcore.runtime",
        "import lmcore.base.errors\nfor lmcore in []:\n    lmcore.runtime",
        "LOAD = 'lmcore.contract.op.torch_kernels:linear'",
        "import importlib\nimportlib.import_module('lmcore_triton.offers').op_impls",
        "GROUP = 'lmcore.plugins'",
    ],
)
def test_names_of_the_contract_may_be_used(tmp_path, text):
    """The public names of public modules, everybody else's, and the plugin's own."""
    (check,) = checked(tmp_path, text)
    assert (check.status, check.detail) == (
        "ok",
        "1 file uses no name of lmcore but the contract's",
    )


@pytest.mark.parametrize(
    "text, name, fix",
    [
        ("import lmcore.train.loop", "lmcore.train.loop", None),
        ("from lmcore.runtime import launch", "lmcore.runtime.launch", None),
        ("from lmcore import train", "lmcore.train", None),
        ("def late():\n    from lmcore.plugin import discover", "lmcore.plugin.discover", None),
        (
            "if TYPE_CHECKING:\n    from lmcore.contract.probe import Check",
            "lmcore.contract.probe.Check",
            "`from lmcore.contract import Check`",
        ),
        (
            "from lmcore.contract.torch_device import own_index",
            "lmcore.contract.torch_device.own_index",
            "`from lmcore.contract import own_index`",
        ),
        (
            "import lmcore.contract.torch_device as t\nt._FUNCTIONS",
            "lmcore.contract.torch_device",
            None,
        ),
        (
            "import lmcore.contract\nlmcore.contract.torch_device._FUNCTIONS",
            "lmcore.contract.torch_device._FUNCTIONS",
            None,
        ),
        ("from lmcore import contract as a\na.rng.RngSnapshot", "lmcore.contract.rng", None),
        (
            "from lmcore.base import errors\nx = errors\nx.printable",
            "lmcore.base.errors.printable",
            None,
        ),
        (
            "from lmcore.base import errors\ngetattr(errors, 'printable')",
            "lmcore.base.errors.printable",
            None,
        ),
        ("from lmcore.base.errors import *\nprintable('')", "lmcore.base.errors.printable", None),
        (
            "from importlib import import_module\nimport_module('lmcore.runtime').launch",
            "lmcore.runtime",
            None,
        ),
        ("m = __import__('lmcore.base.durable')", "lmcore.base.durable", None),
        (
            "def late():\n    __import__('lmcore.base.' + f'dur{\"able\"}')",
            "lmcore.base.durable",
            None,
        ),
        (
            "from lmcore.base import errors\ngetattr(errors, 'print' 'able')",
            "lmcore.base.errors.pr",
            None,
        ),
        ("LOAD = 'lmcore.families.gpt.model:GPT'", "lmcore.families.gpt.model.GPT", None),
    ],
)
def test_a_private_name_is_a_failure(tmp_path, text, name, fix):
    """File, line and name are given, and the public module if it has one; a choice warns only."""
    (check,) = checked(tmp_path, text)
    assert check.status == "failed"
    assert check.detail.startswith(f"`{name}")
    line = len(text.splitlines()) if not text.startswith("import lmcore.contract.t") else 1
    assert f"(mine.py, line {line}) is private: version " in check.detail
    assert fix is None or check.fix == fix
    (allowed,) = checked(tmp_path, text, allow_private=True)
    assert (allowed.status, allowed.detail) == ("warning", check.detail)


@pytest.mark.parametrize(
    "text, name, fix",
    [
        ("from lmcore.contract import OpImp", "lmcore.contract.OpImp", "OpImpl"),
        ("from lmcore.contract.nonsense import x", "lmcore.contract.nonsense", None),
        ("import lmcore.configuration", "lmcore.configuration", None),
    ],
)
def test_a_name_that_does_not_exist_is_always_a_failure(tmp_path, text, name, fix):
    """The name that was probably meant is the fix."""
    for allow_private in (False, True):
        (check,) = checked(tmp_path, f"def f():\n    {text}", allow_private=allow_private)
        assert check.status == "failed"
        assert check.detail.startswith(f"`{name}")
        assert "(mine.py, line 2) is not in lmcore " in check.detail
        assert fix is None or check.fix == f"did you mean `lmcore.contract.{fix}`?"


def test_a_name_that_came_later_is_a_failure(tmp_path):
    """Compared with an older version, the names that it did not have yet are named."""
    old = load_contract("1.0")
    (check,) = checked(tmp_path, "from lmcore.accelerator import own_index", old)
    assert check.status == "failed"
    assert check.detail.endswith("came after version 1.0 of the contract")
    assert checked(tmp_path, "from lmcore.accelerator import Device", old)[0].status == "ok"
    (check,) = checked(tmp_path, "from lmcore.contract import Device", old)
    assert "came after version 1.0 of the contract" in check.detail


@pytest.mark.parametrize(
    "text, first, fix",
    [
        (
            "import json\nfrom lmcore.accelerator import Device, Probe\nimport lmcore.errors",
            "`lmcore.accelerator.Device` (mine.py, line 2)",
            "`lmcore.contract` for `lmcore.accelerator`, `lmcore.base.errors` for `lmcore.errors`;",
        ),
        (
            "LOAD = 'lmcore.accelerator.op.torch_kernels:adamw'",
            "`lmcore.accelerator.op.torch_kernels.adamw` (mine.py, line 1)",
            "`lmcore.contract` for `lmcore.accelerator`;",
        ),
    ],
)
def test_a_former_name_of_a_module_is_a_warning(tmp_path, text, first, fix):
    """One for each file, with the line of the first use and the names of today."""
    (check,) = checked(tmp_path, text)
    assert check.status == "warning"
    assert check.detail == f"{first} is a former name, which contract 2.0 will not have"
    assert check.fix.startswith(fix)


def test_a_private_name_is_private_by_its_former_name_too(tmp_path):
    """The failure comes beside the warning, with the name of today."""
    failure, warning = checked(tmp_path, "from lmcore.accelerator.rng import RngSnapshot")
    assert (failure.status, warning.status) == ("failed", "warning")
    assert failure.detail.startswith("`lmcore.contract.rng")


@pytest.mark.parametrize("folder", OWN_PLUGINS)
def test_the_repositorys_plugins_use_only_public_names(folder):
    """The contract has all that a real plugin needs."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    checks = list(check_source(files, CONTRACT))
    assert [check for check in checks if check.status != "ok"] == []


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_public_name_exists(module):
    """The list promises nothing that cannot be imported."""
    found = importlib.import_module(module)
    assert [name for name in PUBLIC_MODULES[module] if not hasattr(found, name)] == []


def test_public_modules_load_torch_only_if_that_is_said():
    """A plugin's module, which every command imports, may import all others."""
    light = sorted(set(PUBLIC_MODULES) - LOADS_TORCH)
    code = f"import sys, {', '.join(light)}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


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
    (inner / "__init__.py").touch()
    (inner / "deep.py").write_text("import lmcore.base.durable", encoding="utf-8")
    (tmp_path / "plugin_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    files = source_files("plugin_package.inner.deep")
    assert {path.name for path in files} == {"__init__.py", "deep.py"}
    (check,) = check_source(files, CONTRACT)
    assert "(plugin_package/inner/deep.py, line 1)" in check.detail
    assert [path.name for path in source_files("plugin_module")] == ["plugin_module.py"]
    assert source_files("no_such_plugin") == []


def test_compiled_modules_alone_are_skipped():
    """A plugin without source is reported, and does not pass."""
    (check,) = check_source([], CONTRACT)
    assert check.status == "skipped"
