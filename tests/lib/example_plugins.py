"""Plugins that are installed from their sources for a test, such as the ones in `examples/`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

needs_examples = pytest.mark.skipif(
    not EXAMPLES.is_dir(), reason="needs the sources, not the wheel"
)


@contextmanager
def installed_example(
    folder: str, package: str, plugin: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Install an example for this process and those it starts, and take it away again.

    Args:
        folder: Folder in `examples/`.
        package: Package with the module `plugin`.
        plugin: Name of the plugin.
        site: New folder for the metadata of its distribution.
        monkeypatch: Fixture of that name.
    """
    installed(package, plugin, EXAMPLES / folder / "src", site, monkeypatch)
    yield
    for module in [one for one in sys.modules if one.partition(".")[0] == package]:
        del sys.modules[module]


def installed(
    package: str, plugin: str, sources: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Install a plugin from its sources for this process and those it starts, for one test.

    Args:
        package: Package with the module `plugin`.
        plugin: Name of the plugin.
        sources: Folder of the package.
        site: New folder for the metadata of its distribution.
        monkeypatch: Fixture of that name.
    """
    record = site / f"{package}-1.0.dist-info"
    record.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.0\n"
    (record / "METADATA").write_text(text, encoding="utf-8")
    points = f"[lmcore.plugins]\n{plugin} = {package}.plugin\n"
    (record / "entry_points.txt").write_text(points, encoding="utf-8")
    for variable in ("LMCORE_PLUGINS", "LMCORE_PLUGIN_OFF", "LMCORE_DEVICE"):
        monkeypatch.delenv(variable, raising=False)
    paths = [str(site), str(sources)]
    monkeypatch.setattr(sys, "path", [*paths, *sys.path])
    monkeypatch.setenv("PYTHONPATH", ":".join(paths), prepend=":")
    importlib.invalidate_caches()
