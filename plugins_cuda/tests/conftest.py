"""Makes the plugin importable from its sources where it is not installed; stand-ins of packages."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("lmcore_cuda") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

FAKES = Path(__file__).parent / "fakes"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that puts the stand-in of a kernel package on the path, with metadata.

    What is imported from it, and the kernels that import it, are forgotten afterwards.
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
    ) -> None:
        monkeypatch.syspath_prepend(FAKES / folder)
        if not name:
            return
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

    yield put
    own = ("lmcore_cuda.attention_", "lmcore_cuda.apex_", "lmcore_cuda.kernels_")
    tops = {path.name.partition(".")[0] for path in FAKES.glob("*/*")}
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in tops or name.startswith(own):
            del sys.modules[name]
