"""Makes the plugin importable from its sources, and skips what needs its library where it is not.

Tests that load the device into this process ask for `sim`; whole runs are separate processes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from suite import warm

SOURCE = Path(__file__).parents[1] / "src"
ROOT = Path(__file__).parents[3]

if importlib.util.find_spec("lmcore_sim") is None:
    sys.path.insert(0, str(SOURCE))

from lmcore_sim.probe import library_problem  # noqa: E402 - found only now


@pytest.fixture(scope="session")
def built() -> None:
    """Skip where the library is not compiled for this torch."""
    problem = library_problem()
    if problem is not None:
        pytest.skip(f"{problem}; run `python -m lmcore_sim.build`")


@pytest.fixture
def sim(built: None) -> Iterator[ModuleType]:
    """Return torch's module of the device; faults of a test are removed afterwards."""
    import torch

    from lmcore_sim import _C, torch_backend
    from lmcore_sim.faults import Faults

    module = torch.get_device_module("sim")
    module.set_device(0)
    yield module
    torch_backend.apply_faults(Faults())
    _C.restore_devices()
    module.synchronize(0)
    module.synchronize(1)


@pytest.fixture
def misbehave(sim: ModuleType) -> Callable[[str], None]:
    """Return what makes the devices follow `LMCORE_SIM_FAULTS` from here to the test's end."""
    from lmcore_sim.faults import parse_faults
    from lmcore_sim.torch_backend import apply_faults

    return lambda text: apply_faults(parse_faults(text))


@pytest.fixture(scope="session")
def environment(built: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a process in which the plugin is installed, for lmcore too.

    A stream that does not wait for another one is an error there.
    """
    paths = [str(ROOT), str(ROOT / "plugins" / "cpu" / "src"), str(SOURCE)]
    try:
        found = importlib.metadata.distribution("lmcore-sim")
        if Path(str(found.locate_file(""))).resolve() != SOURCE:  # where a build left its record
            paths = []
    except importlib.metadata.PackageNotFoundError:
        site = tmp_path_factory.mktemp("site")
        record = site / "lmcore_sim-2026.11.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcore-sim\nVersion: 1\n")
        (record / "entry_points.txt").write_text("[lmcore.plugins]\nsim = lmcore_sim.plugin\n")
        paths.append(str(site))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LMCORE_")}
    before = [kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else []
    strict = {"OMP_NUM_THREADS": "1", "LMCORE_SIM_MISSING_WAIT": "error"}
    return kept | strict | {"PYTHONPATH": os.pathsep.join(paths + before)}


@pytest.fixture
def run_python(
    environment: dict[str, str], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return what runs Python with arguments in a separate process."""

    def run(*arguments: str, seconds: float = 100, **env: str) -> subprocess.CompletedProcess[str]:
        return warm.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=tmp_path,
            env=environment | env,
        )

    return run
