"""The hint that installs a package, for lmcore from an index and from its sources."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcore.model import installation as module
from lmcore.model.installation import installation, sources

NEEDS = [
    "numpy>=2",
    'isal>=1.7; platform_machine != "none"',
    'lmcore-digging[deep]; extra == "dig"',
    'spade>=2; extra == "dig"',
    'lmcore-serve; extra == "serve"',
]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of an lmcore with a plugin, from which lmcore has been installed."""
    root = tmp_path / "my sources"
    for folder, name in (("", "lmcore"), ("plugins/dig", "lmcore-digging"), ("plugins_x", "x")):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
    (root / "plugins/broken").mkdir()
    (root / "plugins/broken/pyproject.toml").write_text("[")
    record = {"url": root.as_uri(), "dir_info": {}}
    installed_from(record, monkeypatch)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _name: NEEDS)
    return root


def installed_from(record: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have lmcore installed from where `direct_url.json` says; None: from an index."""
    text = None if record is None else json.dumps(record)
    found = SimpleNamespace(read_text=lambda _file: text)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _name: found)
    monkeypatch.setattr(module, "__file__", "/site-packages/lmcore/model/installation.py")


def test_from_sources(checkout: Path) -> None:
    """A package of the sources is named by its folder, beside what else its extra needs."""
    folder = checkout / "plugins/dig"
    assert sources() == checkout
    assert installation("lmcore-digging") == f"run `pip install '{folder}'`"
    assert installation("lmcore-digging", "dig") == (
        f"run `pip install '{folder}[deep]' 'spade>=2'`"
    )


@pytest.mark.parametrize(
    "record",
    [
        None,
        {"url": "file:///wheels/lmcore.whl", "archive_info": {}},
        {"url": "https://example.org/lmcore.git", "vcs_info": {}},
        {"url": "file:///gone", "dir_info": {"editable": True}},
    ],
)
def test_from_elsewhere(record: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the sources at hand the extra, or the package, comes from lmcore's own index."""
    installed_from(record, monkeypatch)
    place = "with the index or folder that lmcore came from"
    assert installation("lmcore-digging", "dig") == f'run `pip install "lmcore[dig]"`, {place}'
    assert installation("lmcore-digging") == f"run `pip install lmcore-digging`, {place}"


@pytest.mark.usefixtures("checkout")
def test_a_package_that_the_sources_lack() -> None:
    """A package of other origin is not looked for in the sources."""
    assert 'pip install "lmcore[serve]"`, with the index' in installation("lmcore-serve", "serve")


def test_in_place(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> None:
    """Run from its sources without an installation, lmcore finds them beside itself."""

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.setattr(importlib.metadata, "requires", missing)
    monkeypatch.setattr(module, "__file__", str(checkout / "lmcore/model/installation.py"))
    folder = checkout / "plugins/dig"
    assert installation("lmcore-digging", "dig") == f"run `pip install '{folder}'`"
