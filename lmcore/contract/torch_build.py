"""Version and build of the installed torch, read without importing it, for probes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TorchBuild", "torch_build"]


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch, as its metadata and version file give it.

    Attributes:
        version: With its local part; empty where torch is not installed.
        toolkit: Version of the accelerator's toolkit it was built with, None for a build without.
    """

    version: str
    toolkit: str | None

    @property
    def release(self) -> str:
        """The version without its local part."""
        return self.version.partition("+")[0]


def torch_build(toolkit: str, version_file: Path | None = None) -> TorchBuild:
    """Return which torch is installed.

    Args:
        toolkit: The name in torch's `version.py` that holds the toolkit's version.
        version_file: path of torch's `version.py`; default: the installed distribution's.
    """
    import importlib.metadata  # 25 ms, which only probes spend

    try:
        installed = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return TorchBuild("", None)
    if version_file is None:
        version_file = Path(str(installed.locate_file("torch/version.py")))
    try:
        text = version_file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return TorchBuild(_assigned(text, "__version__") or installed.version, _assigned(text, toolkit))


def _assigned(text: str, name: str) -> str | None:
    """Return the string that a line `name = '...'` (or with a type) assigns; None for others."""
    found = re.search(rf"^{name}\s*(?::[^=\n]+)?=\s*['\"]([^'\"\n]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None
