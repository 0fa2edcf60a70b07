"""Stand-ins of kernel packages on the path, with the metadata that pip would have written.

Loaded by path: by the tests here, and by tests of plugins.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

Install = Callable[..., Path]


@contextmanager
def stand_ins(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: tuple[str, ...]
) -> Iterator[Install]:
    """Return a function that puts the stand-in of a kernel package on the path, with metadata.

    Modules imported from it, and kernels that import it, are unloaded afterwards.

    Args:
        fakes: Holds a folder for each package.
        tmp_path: Gets the metadata.
        monkeypatch: The test's.
        own: Prefixes of the names of modules that import packages.
    """
    before = set(sys.modules)

    def put(
        folder: str,
        name: str = "",
        version: str = "1.0",
        *,
        requires: str = "torch",
        summary: str = "",
        url: str = "",
    ) -> Path:
        monkeypatch.syspath_prepend(fakes / folder)
        if not name:
            return fakes / folder
        info = tmp_path / folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Summary: {summary}"] if summary else []
        lines += [f"Requires-Dist: {requires}"] if requires else []
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        if url:
            (info / "direct_url.json").write_text(f'{{"url": "{url}"}}', encoding="utf-8")
        monkeypatch.syspath_prepend(info.parent)
        importlib.invalidate_caches()
        return info.parent

    yield put
    tops = {path.name.partition(".")[0] for path in fakes.glob("*/*")}
    for name in set(sys.modules) - before:
        inside = str(getattr(sys.modules[name], "__file__", "")).startswith(f"{fakes}/")
        if inside or name.partition(".")[0] in tops or name.startswith(own):
            del sys.modules[name]
