"""A plugin with injected faults, and the suite run on it without pytest around it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from suite import calls, warm
from suite.environment import new_environment, throwaway_environment
from suite.fixtures import one_trial_of_each_plugin

from lmcore.plugin.isolation import subprocess_call as isolated

if TYPE_CHECKING:
    from lmcore_conformance.op.run_shapes import RunShapes

__all__ = ["new_environment", "one_trial_of_each_plugin", "throwaway_environment"]

FAKE = Path(__file__).parent / "fake"
EXTRA = Path(__file__).parent / "extra"


@pytest.fixture(autouse=True, scope="session")
def warm_checks() -> Iterator[None]:
    """Processes of checks are forked from one that has imported torch."""
    from lmcore_conformance import runner
    from lmcore_conformance.registry import all_checks

    warm.preload(
        "lmcore_conformance.process.ranks", *{check.run.__module__ for check in all_checks()}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolated, "subprocess", calls.SUBPROCESS)
        patch.setattr(runner, "ForkServer", calls.NoForkServer)
        yield


@pytest.fixture(scope="session")
def fake_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for `sys.path` in which the distribution `lmcore-fake` is installed."""
    site = tmp_path_factory.mktemp("site")
    (site / "lmcore_fake").symlink_to(FAKE / "lmcore_fake")
    info = site / "lmcore_fake-1.0.dist-info"
    info.mkdir()
    metadata = "Metadata-Version: 2.1\nName: lmcore-fake\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    points = "[lmcore.plugins]\nfake = lmcore_fake.plugin\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    return site


@pytest.fixture(scope="session")
def extra_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for `sys.path` in which the distribution `lmcore-extra` is installed."""
    site = tmp_path_factory.mktemp("extra")
    (site / "lmcore_extra").symlink_to(EXTRA / "lmcore_extra")
    info = site / "lmcore_extra-0.3.dist-info"
    info.mkdir()
    metadata = "Metadata-Version: 2.1\nName: lmcore-extra\nVersion: 0.3\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    names = ("onlyops", "countgloo", "purebf16", "torchckpt", "slowstager")
    points = "".join(f"{name} = lmcore_extra.{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[lmcore.plugins]\n{points}", encoding="utf-8")
    return site


@pytest.fixture
def fake(fake_site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs the fake, with a way to misbehave."""

    def install(mode: str = "") -> None:
        monkeypatch.syspath_prepend(fake_site)
        monkeypatch.setenv("FAKE", mode)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        _forget()

    yield install
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lmcore_fake"]:
        del sys.modules[name]


@pytest.fixture
def run(fake: Callable[..., None]) -> Callable[..., Mapping[str, Any]]:
    """Return a function that makes checks of the fake and returns their results by id."""

    def make(
        mode: str,
        *ids: str,
        patience: float = 1.0,
        declaration: Any = None,
        shapes: RunShapes | None = None,
    ) -> Any:
        from lmcore_conformance.declaration import find_declaration, read_declaration
        from lmcore_conformance.registry import all_checks
        from lmcore_conformance.runner import Runner
        from lmcore_conformance.target import find_target

        fake(mode)
        checks = all_checks("--shapes-of") if shapes else all_checks()
        target = find_target("fake")
        if declaration is None:
            declaration = read_declaration(find_declaration(target.module), checks)
        runner = Runner(target, declaration, checks, patience=patience, shapes=shapes)
        wanted = [
            check.id
            for check in checks
            if any(check.id == name or (name.endswith("*") and check.id.startswith(name[:-1]))
                   for name in ids)
        ]  # fmt: skip
        assert wanted
        runner.choose(wanted)
        return {name: runner.result(name) for name in wanted}

    return make
