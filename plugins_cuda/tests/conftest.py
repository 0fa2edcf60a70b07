"""Makes the plugin importable from its sources where it is not installed; stand-ins of packages."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("lmcore_cuda") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

FAKES = Path(__file__).parent / "fakes"

_SPEC = importlib.util.spec_from_file_location(
    "package_stand_ins",
    Path(__file__).parents[2] / "tests/unit/contract/package_stand_ins.py",
)
package_stand_ins = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(package_stand_ins)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that puts the stand-in of a kernel package on the path, with metadata."""
    own = ("lmcore_cuda.attention.", "lmcore_cuda.kernel.")
    with package_stand_ins.stand_ins(FAKES, tmp_path, monkeypatch, own) as put:
        yield put
