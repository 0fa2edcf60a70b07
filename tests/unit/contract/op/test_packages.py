"""Packages of kernels: how they are recognised without an import, and what of them does not fit."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lmcore.contract import TorchBuild
from lmcore.contract.op.packages import (
    FACT,
    Package,
    PackageKind,
    UsablePackages,
    describe,
    distribution_of,
    metadata_problem,
    module_is_there,
    origin_of,
    package_of,
    packages_in_facts,
    strict_problems,
)

TORCH = TorchBuild("2.13.0+chip", "1.0")
KIND = PackageKind(
    "fast-rows", ("fast-rows", "fast_rows_chip"), ("fast_rows",), ("fast_rows.built",), "make it"
)

Put = Callable[..., importlib.metadata.Distribution]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Return what installs the package: its module, and metadata as pip writes it."""
    (tmp_path / "fast_rows").mkdir()
    (tmp_path / "fast_rows" / "__init__.py").touch()
    (tmp_path / "fast_rows" / "part.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def install(
        version: str = "1.2", *requires: str, url: str = "", name: str = "fast-rows"
    ) -> importlib.metadata.Distribution:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {one}" for one in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        if url:
            (info / "direct_url.json").write_text(url, encoding="utf-8")
        importlib.invalidate_caches()
        found = distribution_of(KIND)
        assert found is not None
        return found

    return install


def test_nothing_is_installed() -> None:
    """A package whose modules are not there is none."""
    assert package_of(KIND, TORCH) is None
    assert distribution_of(KIND) is None


def test_one_that_fits(put: Put) -> None:
    """It is known by its modules, under any of its names, and not imported."""
    put(name="fast_rows_chip")
    assert package_of(KIND, TORCH) == Package("1.2")
    assert "fast_rows" not in sys.modules


def test_one_without_metadata(put: Put) -> None:
    """Modules alone do, unless another package has the same ones."""
    assert package_of(KIND, TORCH) == Package()
    named = PackageKind(*(getattr(KIND, name) for name in list(vars(KIND))[:5]), named=True)
    assert package_of(named, TORCH) is None


@pytest.mark.parametrize(
    "version, requires, url, problem",
    [
        ("1.2", ("numpy", "torch>=2.11"), "", None),
        ("1.2", ("torch<2.13",), "",
         "`fast-rows` 1.2 requires torch<2.13, and torch 2.13.0+chip is installed"),
        ("1.2", ('torch<2; extra == "old"', "not a requirement!"), "", None),
        ("1.2", ('torch<2; python_version < "3"',), "", None),
        ("1.2+torch2.8", (), "",
         "`fast-rows` 1.2+torch2.8 was built for torch 2.8, and torch 2.13.0+chip is installed"),
        ("1.2+torch2.13", (), "", None),
        ("1.2", (), json.dumps({"url": "https://x/fast_rows-1.2+torch2.12-py3.whl"}),
         "`fast-rows` 1.2 was built for torch 2.12, and torch 2.13.0+chip is installed"),
        ("1.2", (), "not json", None),
        ("1.2", (), "[]", None),
        ("1.2", (), "{}", None),
    ],
)  # fmt: skip
def test_what_metadata_says(
    put: Put, version: str, requires: tuple[str, ...], url: str, problem: str | None
) -> None:
    """Requirements that hold, the version and the file's name are compared with torch."""
    found = put(version, *requires, url=url)
    assert metadata_problem(KIND, found, TORCH) == problem
    assert origin_of(found).startswith(version)


def test_a_nightly_torch(put: Put) -> None:
    """A version of torch before its release meets a requirement on that."""
    found = put("1.2", "torch>=2.13")
    assert metadata_problem(KIND, found, TorchBuild("2.14.0.dev20261101", None)) is None


def test_what_else_contradicts(put: Put) -> None:
    """A kind's own question is asked last, with the metadata and torch."""
    asked: list[Any] = []

    def misfit(distribution: importlib.metadata.Distribution, torch: TorchBuild) -> str:
        asked.append((distribution.version, torch))
        return "is for another chip"

    kind = PackageKind(*(getattr(KIND, name) for name in list(vars(KIND))[:5]), misfit=misfit)
    put("1.2")
    assert package_of(kind, TORCH) == Package("1.2", "is for another chip")
    assert asked == [("1.2", TORCH)]


def test_modules_are_found_without_an_import(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package, a part of it, and what is not there, or cannot be looked for."""
    assert module_is_there("fast_rows")
    assert module_is_there("fast_rows.part")
    assert not module_is_there("fast_rows.gone")
    assert not module_is_there("no_rows")
    assert not module_is_there("no_rows.part")
    assert not module_is_there("this.part")  # a module that is a file has no parts
    bare = ModuleType("bare_rows")
    bare.__spec__ = None
    monkeypatch.setitem(sys.modules, "bare_rows", bare)
    assert not module_is_there("bare_rows")


@pytest.mark.parametrize(
    "error, said",
    [
        (ImportError("x.so: undefined symbol:\n  _ZN3c10"), "x.so: undefined symbol: _ZN3c10"),
        (SystemExit(127), "127"),
        (RuntimeError(), "RuntimeError"),
        (OSError("x" * 400), "x" * 300),
    ],
)
def test_an_import_that_fails(error: BaseException, said: str) -> None:
    """The message of any exception is shortened to one line."""

    def load(module: str) -> object:
        assert module == "fast_rows.built"
        raise error

    assert KIND.import_problem(load) == (
        f"`fast-rows` is installed, and its `fast_rows.built` cannot be loaded: {said}"
    )


def test_an_import_that_works() -> None:
    """Nothing is said of compiled parts that load."""
    assert KIND.import_problem(lambda module: None) is None


def test_a_package_is_tried_once() -> None:
    """Compiled parts are loaded where nothing else speaks against them, and not again."""
    tried: list[str] = []

    def problem(name: str) -> None:
        tried.append(name)

    usable = UsablePackages({"a": Package("1"), "b": Package("1", "too old")}, problem)
    assert usable.problem("a", load=False) is None
    assert tried == []
    assert [usable.problem("a"), usable.problem("a"), usable.problem("b")] == [
        None,
        None,
        "too old",
    ]
    assert tried == ["a"]


def test_facts_of_a_device() -> None:
    """Descriptions of packages survive JSON; a device without this fact has none."""
    told = {"a": Package("1", "too old"), "b": Package()}
    facts = json.loads(json.dumps({FACT: describe(told)}))
    device: Any = SimpleNamespace(facts=facts)
    assert packages_in_facts(device) == told
    bare: Any = SimpleNamespace(facts={})
    assert packages_in_facts(bare) is None


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("install", ["make it", ""])
def test_strict_ops_refuses_a_misfit(install: str, *, strict: bool) -> None:
    """With `--strict-ops` what does not fit or load is a problem, with the fix, if any."""
    kinds = {
        name: PackageKind(name, (name,), (name,), (module,), install)
        for name, module in (("fits", "json"), ("old", "json"), ("broken", "no_such_module"))
    }
    told = {"fits": Package("1"), "old": Package("1", "is for torch 2.8"), "broken": Package("1")}
    config: Any = SimpleNamespace(accelerator=SimpleNamespace(strict_ops=strict))
    found = strict_problems(told, kinds, config)
    if not strict:
        assert found == []
        return
    old, broken = found
    assert old.what == "`--strict-ops`: the kernel package `old` cannot be used"
    assert old.why == "is for torch 2.8"
    rebuild = "rebuild it (`make it`), " if install else ""
    assert old.hint == (
        f"{rebuild}remove it (`pip uninstall old`), or leave `--strict-ops` out and continue "
        "without its kernels"
    )
    assert "no_such_module" in str(broken.why)
