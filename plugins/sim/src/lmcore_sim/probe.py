"""Probe of the simulated devices: their number, and the fit of their library; torch-free."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from lmcore.base.errors import ConfigError, counted
from lmcore.contract import Probe, ProbeState, torch_build
from lmcore_sim.build import LIBRARY, PACKAGE, RECORD
from lmcore_sim.settings import DEVICES, Settings, read_settings

__all__ = ["library_problem", "probe"]

REBUILD = "python -m lmcore_sim.build"
PRIORITY = -100  # any real accelerator comes first


def probe(env: Mapping[str, str], folder: Path = PACKAGE) -> Probe:
    """Return the findings from the environment and the package's files; loads no library."""
    try:
        settings = read_settings(env)
    except ConfigError as error:
        return _answer(ProbeState.BROKEN, error.what, fix=error.hint)
    if settings.num_devices == 0:
        return _answer(ProbeState.ABSENT, f"`{DEVICES}=0` says that there are none")
    problem = library_problem(folder)
    if problem is not None:
        return _answer(ProbeState.BROKEN, _devices(settings), problem, fix=f"run `{REBUILD}`")
    facts = {"memory_bytes": settings.memory_bytes, "misbehaves": settings.faults.any}
    return _answer(ProbeState.PRESENT, _devices(settings), count=settings.num_devices, facts=facts)


def library_problem(folder: Path = PACKAGE) -> str | None:
    """Return why the compiled library in *folder* cannot be loaded by the installed torch."""
    if not (folder / LIBRARY).is_file():
        libraries = [file.name for file in sorted(folder.glob("_C.*.so"))]
        found = f"; there is `{libraries[0]}`, for another Python" if libraries else ""
        return f"its library is not compiled: `{LIBRARY}` is missing in {folder}{found}"
    try:
        built = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        torch, python = str(built["torch"]), str(built["python"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"`{RECORD}`, which says what its library was compiled for, cannot be read"
    installed = torch_build("cpu").version
    if torch != installed:
        return f"its library was compiled for torch {torch}; torch {installed} is installed"
    if python != sysconfig.get_python_version():
        return f"its library was compiled for Python {python}"
    return None


def _devices(settings: Settings) -> str:
    memory = f"{settings.memory_bytes / 2**30:.4g} GiB"
    faulty = ", told to misbehave" if settings.faults.any else ""
    return f"{counted(settings.num_devices, 'simulated device')} of {memory}{faulty}"


def _answer(
    state: ProbeState,
    *evidence: str,
    fix: str | None = None,
    count: int = 0,
    facts: Mapping[str, object] | None = None,
) -> Probe:
    return Probe("sim", state, count, PRIORITY, evidence, fix, dict(facts or {}))
