"""Kernel packages are recognised, and misfits named, without importing them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.contract import CheckStatus, TorchBuild
from lmcore.contract.op.packages import FACT, Package, describe
from lmcore_cuda import doctor
from lmcore_cuda.packages import PACKAGES, installed_packages, packages_of, problems_of

TORCH = TorchBuild("2.13.0+cu130", "13.0")
FOLDERS = {name: name for name in PACKAGES} | {"apex-extensions": "apex"}
"""The package of each stand-in."""


def test_without_any() -> None:
    """No package is found if none is installed."""
    assert installed_packages(TORCH) == {}


@pytest.mark.parametrize("folder,name", FOLDERS.items())
def test_is_recognised(folder: str, name: str, install: Any) -> None:
    """An installed package is found with its version; nothing of it is imported."""
    install(folder, PACKAGES[name].distributions[0], "3.2.1")
    assert installed_packages(TORCH) == {name: Package("3.2.1")}
    files = [str(getattr(module, "__file__", "")) for module in sys.modules.values()]
    assert not [file for file in files if f"/fakes/{folder}/" in file]


@pytest.mark.parametrize("folder,name", FOLDERS.items())
def test_loads(folder: str, name: str, install: Any) -> None:
    """The compiled parts that a package is tried by exist in it, and are loaded."""
    install(folder)
    loaded: list[str] = []
    assert PACKAGES[name].import_problem() is None
    assert PACKAGES[name].import_problem(loaded.append) is None
    assert {sys.modules[module].__name__ for module in loaded} == set(loaded)
    assert ("apex._extensions.amp_C" in loaded) == (folder == "apex-extensions")


def test_version_4_has_its_own_name(install: Any) -> None:
    """Version 2 brings a folder of version 4 along; that alone is no installation of it."""
    install("flash-attn", "flash-attn", "2.8.3")
    install("flash-attn-4")
    assert set(installed_packages(TORCH)) == {"flash-attn"}


def test_another_torch_is_required(install: Any) -> None:
    """A requirement that the installed torch does not meet is named with both versions."""
    install("flash-attn", "flash-attn", "2.8.3", requires="torch<2.12,>=2.4")
    found = installed_packages(TORCH)["flash-attn"]
    assert found.problem == (
        "`flash-attn` 2.8.3 requires torch<2.12,>=2.4, and torch 2.13.0+cu130 is installed"
    )


def test_a_requirement_of_an_extra_is_none(install: Any) -> None:
    """A requirement of an extra alone is no problem."""
    install("flash-attn", "flash-attn", "2.8.3", requires='torch<2; extra == "old"')
    assert installed_packages(TORCH)["flash-attn"].problem is None


@pytest.mark.parametrize(
    "version,url,expected",
    [
        ("2.8.3+cu13torch2.12cxx11abitrue", "", "was built for torch 2.12"),
        ("2.8.3", "https://x/flash_attn-2.8.3+cu13torch2.8cxx11abiTRUE-cp311.whl", "torch 2.8"),
        ("2.8.3+cu12torch2.13cxx11abitrue", "", "was built for CUDA 12"),
        ("2.8.3+cu13torch2.13cxx11abitrue", "", None),
        ("2.8.3", "file:///home/me/flash_attn-2.8.3-cp311.whl", None),
    ],
)
def test_version_is_read_from_the_file_name(
    version: str, url: str, expected: str | None, install: Any
) -> None:
    """A wheel says in its name, which pip records, what torch and CUDA it was built for."""
    install("flash-attn", "flash-attn", version, url=url)
    problem = installed_packages(TORCH)["flash-attn"].problem
    assert (problem is None) if expected is None else (problem is not None and expected in problem)


def test_the_other_apex(install: Any) -> None:
    """The registry's unrelated `apex` is named as what it is, and not imported."""
    install("other-apex", "apex", "0.9.10", summary="Pyramid toolkit", requires="")
    found = installed_packages(TORCH)["apex"]
    assert found == Package(
        "0.9.10",
        "the installed `apex` 0.9.10 is another package of that name (`Pyramid toolkit`): it has "
        "no `apex.optimizers`",
    )
    assert "apex" not in sys.modules


def test_apex_without_extensions(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package built for Python alone is recognised too."""
    install("apex", "apex", "0.1")
    monkeypatch.setattr(
        "lmcore_cuda.packages.module_is_there", lambda name: name in {"apex", "apex.optimizers"}
    )
    problem = installed_packages(TORCH)["apex"].problem
    assert problem == "`apex` is installed without its CUDA extensions: no `amp_C`"


def test_an_undefined_symbol() -> None:
    """The import's error is reported in one line, with the package and the part."""

    def load(module: str) -> object:
        raise ImportError(f"{module}.so: undefined symbol:\n _ZN3c105ErrorC2E")

    assert PACKAGES["apex"].import_problem(load) == (
        "`apex` is installed, and its `amp_C` cannot be loaded: amp_C.so: undefined symbol: "
        "_ZN3c105ErrorC2E"
    )


def test_facts_of_a_device() -> None:
    """Packages in a device's facts survive JSON."""
    packages = {"apex": Package("0.1", "broken"), "liger-kernel": Package("0.8.5")}
    device: Any = SimpleNamespace(facts={FACT: describe(packages)})
    assert packages_of(device) == packages


@pytest.mark.parametrize("strict", [True, False])
def test_strict_ops_refuses_a_misfit(*, strict: bool) -> None:
    """With `--strict-ops` a package that cannot be used is a problem; without it is none."""
    facts = describe({"apex": Package("0.1", "built for another torch")})
    device: Any = SimpleNamespace(facts={FACT: facts})
    config: Any = SimpleNamespace(accelerator=SimpleNamespace(strict_ops=strict))
    found = problems_of(device, config)
    if not strict:
        assert found == []
        return
    (problem,) = found
    assert problem.what == "`--strict-ops`: the kernel package `apex` cannot be used"
    assert problem.why == "built for another torch"
    assert "pip uninstall apex" in str(problem.hint)


def test_doctor_reports_packages() -> None:
    """`lmcore doctor` has a line for each installed package; a misfit has its command."""
    found = doctor._packages({"apex": Package("0.1", "broken"), "liger-kernel": Package("0.8.5")})
    assert [(check.name, check.status, check.detail) for check in found] == [
        ("apex", CheckStatus.WARNING, "broken"),
        ("liger-kernel", CheckStatus.OK, "0.8.5"),
    ]
    assert found[0].fix == PACKAGES["apex"].install
