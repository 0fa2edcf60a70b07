"""Intel's extension for PyTorch (IPEX): whether its build for CPUs fits, and its operators.

IPEX was archived in March 2026; its last release, 2.8, is for torch 2.8.  Its import takes seven
seconds, nearly all of them for modules that the kernels here do not need.  So only the library with
its operators is loaded, in a quarter of a second.  Like the import of the package, that replaces
torch's own CPU kernels of `cat`, `index_select`, `matmul`, `mean`, `sum` and poolings in the
process.  For `layer_norm` and `group_norm`, torch's kernels are restored.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.contract import torch_build
from lmcore.contract.op.packages import Package

if TYPE_CHECKING:
    from torch.library import Library

__all__ = ["NAME", "load_operators", "misfit", "package"]

NAME = "intel-extension-for-pytorch"
_MODULE = "intel_extension_for_pytorch"
_VERSION = re.compile(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_NOTICE = re.compile(
    rb"^(?:\[rank\d+\]:)?\[W[^\n]*Warning only once for all operators.*?new kernel:[^\n]*\n",
    re.MULTILINE | re.DOTALL,
)
_LIBRARY = "lib/libintel-ext-pt-cpu.so"
_OPERATORS = ("rmsnorm", "rotary_position_embedding")
_NORMS = ("layer_norm", "group_norm")


def package() -> Package | None:
    """Return the installed package, with the reason if it cannot be used on this CPU.

    Reads the package's version file: the distribution's version does not name the kind of build.
    """
    folder = _folder()
    if folder is None:
        return None
    try:
        text = (folder / "_version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = _VERSION.search(text)
    version = found[1] if found else ""
    return Package(version, _problem(folder, version))


def misfit() -> str | None:
    """Return why the package cannot be used on this CPU; None if it is installed and fits."""
    installed = package()
    return f"needs `{NAME}`, not installed" if installed is None else installed.problem


def _problem(folder: Path, version: str) -> str | None:
    """Return the contradiction between a package's files and this CPU's torch."""
    torch, shown = torch_build("cpu").version, version or "of an unknown version"
    if not version.endswith("+cpu"):
        return f"the installed `{NAME}` {shown} is not a build for CPUs (`+cpu`)"
    releases = [".".join(re.findall(r"\d+", text)[:2]) for text in (version, torch)]
    if releases[0] != releases[1]:
        return f"`{NAME}` {version} is for torch {releases[0]}, and torch {torch} is installed"
    library = folder / _LIBRARY
    if not library.is_file():
        return f"the installed `{NAME}` {version} lacks its file `{_LIBRARY}`"
    size, recorded = library.stat().st_size, _recorded_size(folder)
    if recorded not in {None, size}:
        return (
            f"the installed `{NAME}` {version} is damaged: its file `{_LIBRARY}` has {size:,} of "
            f"{recorded:,} bytes"
        )
    return None


def _recorded_size(folder: Path) -> int | None:
    """Return the size of the library that the installer recorded; None if there is no record.

    A truncated library would end the process that loads it.
    """
    line = re.compile(rf"^{folder.name}/{re.escape(_LIBRARY)},[^,]*,(\d+)$", re.MULTILINE)
    for record in folder.parent.glob(f"{folder.name}-*.dist-info/RECORD"):
        found = line.search(record.read_text(encoding="utf-8", errors="replace"))
        if found is not None:
            return int(found[1])
    return None


def load_operators() -> None:
    """Load the operators `torch.ops.torch_ipex`.

    Raises:
        ImportError: The package does not fit, or its library cannot be loaded or lacks an operator.
    """
    import torch

    problem, folder = misfit(), _folder()
    if problem is not None or folder is None:
        raise ImportError(problem)
    try:
        with _without_notice():
            torch.ops.load_library(str(folder / _LIBRARY))
    except OSError as error:
        raise ImportError(f"`{NAME}`: {error.__cause__ or error}") from error
    lacking = [name for name in _OPERATORS if not hasattr(torch.ops.torch_ipex, name)]
    if lacking:
        raise ImportError(f"`{NAME}` lacks the operators {', '.join(lacking)}")
    _keep_torch_semantics()


@contextlib.contextmanager
def _without_notice() -> Iterator[None]:
    """Remove torch's notice that kernels are replaced from what is written to stderr meanwhile.

    C++ writes it, so that Python's filters of warnings do not apply.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            os.write(2, _NOTICE.sub(b"", written.read()))


@functools.cache
def _keep_torch_semantics() -> Library:
    """Register torch's own decompositions for the norms that IPEX replaces.

    IPEX registers kernels below autograd, where torch has none: torch warns of possibly wrong
    gradients, and within a `TorchDispatchMode` there are no gradients at all.  IPEX's `layer_norm`
    also fails for tensors without elements, and its kernel for autocast rounds the input of
    `group_norm`.  The registrations last as long as the returned object.
    """
    import torch
    from torch.library import Library, fallthrough_kernel

    library = Library("aten", "IMPL")
    for name in _NORMS:
        decompose = getattr(torch.ops.aten, name).default.decompose
        for key in ("AutogradCPU", "CPU"):
            library.impl(name, decompose, key, allow_override=True)
    library.impl("group_norm", fallthrough_kernel, "AutocastCPU")
    return library


def _folder() -> Path | None:
    """Return the folder of the installed package; its code is not run."""
    try:
        spec = importlib.util.find_spec(_MODULE)
    except (ImportError, ValueError):  # a loaded module without a spec
        return None
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(folders))) if folders else None
