"""Packages that are recognised, misfits that are found without an import, and the messages."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.contract import TorchBuild
from lmcore.contract.op.packages import FACT, Package, describe
from lmcore_xpu import packages, plugin
from lmcore_xpu.packages import (
    BINDINGS,
    BINDINGS_LIBRARY,
    EXTENSION,
    PACKAGES,
    TRITON,
    installed_packages,
    packages_of,
    problems_of,
)

TORCH = TorchBuild("2.13.0+xpu", "20250302")
OLD_TORCH = TorchBuild("2.8.0+xpu", "20250101")


@pytest.fixture(autouse=True)
def only_what_is_put_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pass over what this environment has, apart from torch."""
    real = importlib.metadata.distribution

    def found(name: str) -> importlib.metadata.Distribution:
        distribution = real(name)
        if tmp_path not in Path(str(distribution.locate_file(""))).parents:
            raise importlib.metadata.PackageNotFoundError(name)
        return distribution

    monkeypatch.setattr(importlib.metadata, "distribution", found)


def wants(monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    """Have torch's metadata ask for this."""
    real = packages._distribution
    torch: Any = SimpleNamespace(requires=list(texts))
    monkeypatch.setattr(
        packages, "_distribution", lambda name: torch if name == "torch" else real(name)
    )


def with_library(folder: Path) -> None:
    """Give installed bindings their part for GPUs."""
    file = folder / BINDINGS / BINDINGS_LIBRARY
    file.parent.mkdir(parents=True)
    file.touch()


def test_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package, no entry; torch's build is read where it is not given."""
    monkeypatch.setattr("lmcore.contract.op.packages.module_is_there", lambda name: False)
    monkeypatch.setattr(packages, "module_is_there", lambda name: False)
    assert installed_packages() == {}


def test_an_extension_for_this_torch(install: Any) -> None:
    """A build whose first two numbers are torch's has nothing against it; it is not imported."""
    install("extension", EXTENSION, "2.13.10+xpu", requires="psutil")
    assert installed_packages(TORCH)[EXTENSION] == Package("2.13.10+xpu")
    assert "intel_extension_for_pytorch" not in sys.modules


@pytest.mark.parametrize("requires", ["psutil", "torch==2.8.0"])
def test_the_last_extension(install: Any, requires: str) -> None:
    """The last release is for another torch, and says that it ended; there is no other."""
    install("extension", EXTENSION, "2.8.10+xpu", requires=requires)
    assert installed_packages(TORCH)[EXTENSION].problem == (
        f"`{EXTENSION}` 2.8.10+xpu is for torch 2.8, and torch 2.13.0+xpu is installed; it ended "
        "with 2.8 in March 2026, and torch has these kernels itself"
    )
    assert installed_packages(OLD_TORCH)[EXTENSION].problem is None


def test_an_older_extension(install: Any) -> None:
    """Under torch 2.8 there is a release that fits, and the message says so."""
    install("extension", EXTENSION, "2.7.10+xpu", requires="psutil")
    assert installed_packages(OLD_TORCH)[EXTENSION].problem == (
        f"`{EXTENSION}` 2.7.10+xpu is for torch 2.7, and torch 2.8.0+xpu is installed; its last "
        "release, 2.8, fits"
    )


@pytest.mark.parametrize("local", ["", "+cpu"])
def test_an_extension_for_processors(install: Any, local: str) -> None:
    """The registry's build has no GPUs; one of its files shows it if the version does not."""
    folder = install("extension", EXTENSION, f"2.13.0{local}")
    file = folder / "intel_extension_for_pytorch" / "_version.py"
    file.parent.mkdir()
    file.write_text('# made by a machine\n__version__ = "2.13.0+cpu"\n', encoding="utf-8")
    problem = installed_packages(TORCH)[EXTENSION].problem
    assert problem is not None
    assert problem.startswith(f"the installed `{EXTENSION}` 2.13.0+cpu is a build for CPUs")


def test_an_extension_from_its_sources(install: Any) -> None:
    """Without metadata nothing is known against it; a version alone counts."""
    install("extension")
    assert installed_packages(TORCH)[EXTENSION] == Package()
    install("extension", EXTENSION, "2.13.0")
    assert installed_packages(TORCH)[EXTENSION] == Package("2.13.0")


@pytest.mark.parametrize("name", ["oneccl-bind-pt", "oneccl_bindings_for_pytorch"])
def test_bindings(install: Any, name: str) -> None:
    """They are known under each of their names, and fit by version and by what they hold."""
    folder = install("bindings", name, "2.13.0+xpu")
    assert installed_packages(TORCH)[BINDINGS].problem == (
        f"the installed `{BINDINGS}` 2.13.0+xpu is a build for CPUs: it has no `{BINDINGS_LIBRARY}`"
    )
    with_library(folder)
    assert installed_packages(TORCH)[BINDINGS] == Package("2.13.0+xpu")
    problem = installed_packages(TorchBuild("2.12.0+xpu", "20250302"))[BINDINGS].problem
    assert problem is not None
    assert "is for torch 2.13, and torch 2.12.0+xpu is installed" in problem
    assert "torch reaches oneCCL itself, as `xccl`" in problem


def test_triton(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that torch's metadata asks for fits, under either name."""
    wants(monkeypatch, "numpy", "?", 'triton-xpu==3.7.2; platform_system == "Linux"')
    install("triton-xpu", "triton-xpu", "3.7.2", requires="")
    assert installed_packages(TORCH)[TRITON] == Package("3.7.2")


def test_an_older_triton(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that torch was not released with is reported with the version that torch wants."""
    wants(monkeypatch, "triton-xpu==3.7.2")
    install("triton-xpu", "pytorch-triton-xpu", "3.5.0", requires="")
    assert installed_packages(TORCH)[TRITON].problem == (
        "`pytorch-triton-xpu` 3.5.0 is installed, and torch wants `triton-xpu==3.7.2`"
    )


@pytest.mark.parametrize("version", ["", "3.7.1"])
def test_triton_for_other_gpus(install: Any, version: str) -> None:
    """A package of that name without the part for these GPUs is reported as such."""
    install("triton", "triton" if version else "", version or "1", requires="")
    suffix = f" {version}" if version else ""
    assert installed_packages(TORCH)[TRITON].problem == (
        f"the installed `triton`{suffix} is for other GPUs: it has no `backends/intel`"
    )


def test_two_tritons_over_each_other(install: Any) -> None:
    """Two distributions that bring one module are not trusted, whichever came last."""
    install("triton", "triton", "3.7.1", requires="")
    install("triton-xpu", "triton-xpu", "3.7.2", requires="")
    problem = installed_packages(TORCH)[TRITON].problem
    assert problem is not None
    assert "`triton` 3.7.1 and `triton-xpu` 3.7.2 are installed over each other" in problem


def test_triton_from_its_sources(install: Any) -> None:
    """Without metadata the module itself counts."""
    install("triton-xpu")
    assert installed_packages(TORCH)[TRITON] == Package()


def test_torch_without_metadata(install: Any) -> None:
    """A torch that is not installed by pip asks for nothing."""
    install("triton-xpu", "triton-xpu", "3.7.2", requires="")
    assert installed_packages(TORCH)[TRITON] == Package("3.7.2")


@pytest.mark.parametrize("folder, name", [("extension", EXTENSION), ("triton-xpu", TRITON)])
def test_loads(install: Any, folder: str, name: str) -> None:
    """The modules that a package is tried by exist in it."""
    install(folder)
    assert PACKAGES[name].import_problem() is None


def test_the_extension_ends_the_process(install: Any) -> None:
    """Its import exits where it finds another torch than its own; that is a reason too."""

    def load(module: str) -> object:
        raise SystemExit(127)

    assert PACKAGES[EXTENSION].import_problem(load) == (
        f"`{EXTENSION}` is installed, and its `intel_extension_for_pytorch` cannot be loaded: 127"
    )


def test_facts_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are read from a device's facts, and without them from the installation."""
    recorded = {TRITON: Package("3.7.2"), EXTENSION: Package("2.8.10+xpu", "for torch 2.8")}
    device: Any = SimpleNamespace(facts={FACT: describe(recorded)})
    assert packages_of(device) == recorded
    monkeypatch.setattr(packages, "installed_packages", lambda: {TRITON: Package("1")})
    bare: Any = SimpleNamespace(facts={})
    assert packages_of(bare) == {TRITON: Package("1")}


@pytest.mark.parametrize("strict", [True, False])
def test_strict_ops_refuses_a_misfit(*, strict: bool) -> None:
    """With `--strict-ops` packages whose kernels cannot be used are problems, bindings are none."""
    recorded = {
        EXTENSION: Package("2.8.10+xpu", "is for torch 2.8"),
        BINDINGS: Package("2.8.0+xpu", "is for torch 2.8"),
        TRITON: Package("3.5.0", "torch wants another"),
    }
    device: Any = SimpleNamespace(facts={FACT: describe(recorded)}, name="Intel GPU")
    config: Any = SimpleNamespace(accelerator=SimpleNamespace(strict_ops=strict), plugins={})
    found = problems_of(device, config)
    assert found == plugin.lmcore_validate_config(device, config)
    if not strict:
        assert found == []
        return
    extension, triton = found
    assert extension.what == f"`--strict-ops`: the kernel package `{EXTENSION}` cannot be used"
    assert str(extension.hint).startswith(f"remove it (`pip uninstall {EXTENSION}`)")
    assert "download.pytorch.org/whl/xpu" in str(triton.hint)
