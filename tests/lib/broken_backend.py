"""A package whose backend torch cannot load."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["HINT", "WHAT", "WHY", "install_broken_backend"]

WHAT = "torch cannot load the backend `acme` of `acme-ext` 1.2"
WHY = "ImportError: libacme.so.3 is missing"
HINT = "set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to use torch without such backends"


def install_broken_backend(folder: Path) -> dict[str, str]:
    """Install the package in a folder; return the environment of a process with it."""
    (folder / "acme_ext.py").write_text(
        "def autoload():\n    raise ImportError('libacme.so.3 is missing')\n", "utf-8"
    )
    info = folder / "acme_ext-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-ext\nVersion: 1.2\n", "utf-8")
    (info / "entry_points.txt").write_text("[torch.backends]\nacme = acme_ext:autoload\n", "utf-8")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}
