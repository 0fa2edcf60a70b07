"""The wheels of tox are built and installed again if, and only if, what is in them has changed."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from suite import wheels


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small tree of sources, in the place of this repository."""
    for name in (
        *("pyproject.toml", "lmcore/a.py", "native/a.cpp", "plugins/cpu/src/lmcore_cpu/plugin.py"),
        *("plugins/conformance/src/a/template/tests/test_x.py.in",),
        *("plugins_cuda/src/lmcore_cuda/plugin.py",),
        *("plugins/cpu/tests/test_a.py", "plugins_cuda/tests/test_b.py", "tests/test_c.py"),
        *("lmcore/__pycache__/a.pyc", "plugins_cuda/build/lib/x.py", "docs/page.md"),
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name, encoding="utf-8")
    monkeypatch.setattr(wheels, "ROOT", tmp_path)
    monkeypatch.setattr(wheels, "DIST", tmp_path / "dist")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        *("pyproject.toml", "lmcore/a.py", "lmcore/new.py", "native/a.cpp"),
        *("plugins/cpu/src/lmcore_cpu/plugin.py", "plugins_cuda/src/lmcore_cuda/plugin.py"),
        "plugins/conformance/src/a/template/tests/test_x.py.in",
    ],
)
def test_a_change_of_a_source_makes_another_fingerprint(tree: Path, name: str) -> None:
    """Every file of a wheel counts, new files and the template's tests too."""
    before = wheels.fingerprint()
    (tree / name).write_text("changed", encoding="utf-8")
    assert wheels.fingerprint() != before


@pytest.mark.parametrize(
    "name",
    [
        *("plugins/cpu/tests/test_a.py", "plugins_cuda/tests/test_b.py", "tests/test_c.py"),
        *("lmcore/__pycache__/a.pyc", "plugins_cuda/build/lib/x.py", "docs/page.md"),
    ],
)
def test_a_change_of_anything_else_does_not(tree: Path, name: str) -> None:
    """Tests, pages and what builds have left are in no wheel."""
    before = wheels.fingerprint()
    (tree / name).write_text("changed", encoding="utf-8")
    assert wheels.fingerprint() == before


def test_a_renamed_file_makes_another_fingerprint(tree: Path) -> None:
    """The content alone does not make a file."""
    before = wheels.fingerprint()
    (tree / "lmcore/a.py").rename(tree / "lmcore/b.py")
    assert wheels.fingerprint() != before


def test_torch_alone_comes_from_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other package is asked of torch's index, and what torch needs comes from pip's own."""
    requirements = ["numpy>=2.0", "torch>=2.8.0a0", "torchao", "torch==2.8.0"]
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    assert wheels.needed_commands(["pip"], requirements) == [["pip", *requirements]]
    monkeypatch.setenv("TORCH_INDEX_URL", "https://torch/cpu")
    first, second = wheels.needed_commands(["pip"], requirements)
    torch = ["torch>=2.8.0a0", "torch==2.8.0"]
    assert first == ["pip", "--no-deps", "--index-url", "https://torch/cpu", *torch]
    assert second == ["pip", *requirements]


def test_nothing_is_built_twice(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second build of the same sources runs no command; one of changed sources builds all."""
    commands: list[list[str]] = []

    def run(command: list[str], env: object = None) -> None:
        wheels.DIST.mkdir(exist_ok=True)
        with zipfile.ZipFile(wheels.DIST / "lmcore-1-any.whl", "w") as archive:
            archive.writestr("lmcore/_native.so", "")
            archive.writestr("lmcore_cpu/_kernels.so", "")
        commands.append(command)

    for plugin in wheels.PLUGINS:
        (tree / plugin).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(wheels, "run", run)
    wheels.build()
    first = len(commands)
    assert first == 1 + len(wheels.PLUGINS)
    wheels.build()
    assert len(commands) == first
    (tree / "lmcore/a.py").write_text("changed", encoding="utf-8")
    wheels.build()
    assert len(commands) == 2 * first


@pytest.mark.parametrize("written", [(), ("lmcore/_native.so",)], ids=["none", "one"])
def test_a_wheel_without_its_native_part_is_refused(
    tree: Path, monkeypatch: pytest.MonkeyPatch, written: tuple[str, ...]
) -> None:
    """The tests of the C++ code would be skipped in silence; without a compiler that is right."""

    def run(command: list[str], env: object = None) -> None:
        wheels.DIST.mkdir(exist_ok=True)
        with zipfile.ZipFile(wheels.DIST / "lmcore-1-any.whl", "w") as archive:
            for name in written:
                archive.writestr(name, "")

    for plugin in wheels.PLUGINS:
        (tree / plugin).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(wheels, "run", run)
    monkeypatch.setattr(wheels.shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(SystemExit, match="has no C\\+\\+ part"):
        wheels.build()
    monkeypatch.setattr(wheels.shutil, "which", lambda name: None)
    wheels.build()
    assert (wheels.DIST / wheels.STAMP).is_file()


def test_the_environment_of_py_is_made_only_if_it_is_stale(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other environments start tox again only for sources that `py` does not have yet."""
    commands: list[list[str]] = []
    monkeypatch.setattr(wheels, "run", lambda command, env=None: commands.append(command))
    for folder in (tree / "dist", tree / ".tox/py"):
        folder.mkdir(parents=True)
        (folder / wheels.STAMP).write_text(wheels.fingerprint(), encoding="utf-8")
    wheels.ensure(tree / ".tox")
    assert commands == []
    (tree / ".tox/py" / wheels.STAMP).write_text("other sources", encoding="utf-8")
    wheels.ensure(tree / ".tox")
    assert [command[:3] for command in commands] == [
        [sys.executable, "-m", "pip"],
        [sys.executable, "-m", "tox"],
    ]


def test_a_failed_command_ends_with_its_status(capfd: pytest.CaptureFixture[str]) -> None:
    """The command and its status are named."""
    with pytest.raises(SystemExit) as ended:
        wheels.run([sys.executable, "-c", "import sys; sys.exit(7)"])
    assert ended.value.code == 7
    assert "ended with status 7" in capfd.readouterr().err


def test_packages_of_ours_come_from_dist(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin beside the environment is its wheel, installed again when its source changes."""
    asked: list[list[str]] = []
    folder = tree / "site"

    def install(command: list[str]) -> None:
        asked.append(command)
        folder.mkdir()

    monkeypatch.setattr(wheels, "run", install)
    wheel = tree / "dist/lmcore_mine-1-py3-none-any.whl"
    source = tree / "plugins/mine/src/lmcore_mine/plugin.py"
    source.parent.mkdir(parents=True)
    with pytest.raises(SystemExit, match="no wheel of lmcore-mine"):
        wheels.packages(folder, "lmcore-mine")
    wheel.parent.mkdir()
    wheel.touch()
    for text in ("", "", "changed"):
        source.write_text(text, encoding="utf-8")
        wheels.packages(folder, "lmcore-mine", "einops")
    assert [command[-3:] for command in asked] == [[str(folder), str(wheel), "einops"]] * 2
