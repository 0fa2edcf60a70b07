"""Makes the plugin importable from its sources where it is not; puts a driver under `torch.xpu`."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.version import Version

if importlib.util.find_spec("lmcore_xpu") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

FAKES = Path(__file__).parent / "fakes"
sys.path.insert(0, str(FAKES / "torch-xpu"))

if TYPE_CHECKING:
    from fake_torch_xpu import XpuDriver


SIGNATURES = Path(__file__).parent / "signatures"
TORCH_VERSIONS = sorted(
    (file.stem.removeprefix("torch-") for file in SIGNATURES.glob("torch-*.json")), key=Version
)


def recorded(version: str) -> Mapping[str, Any]:
    """Return the record of a version of torch."""
    file = SIGNATURES / f"torch-{version}.json"
    return json.loads(file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.fixture
def recorded_torch() -> Callable[[str], Mapping[str, Any]]:
    """Return the function that reads the record of a version of torch."""
    return recorded


@pytest.fixture(params=TORCH_VERSIONS)
def each_recorded_torch(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    """Return the record of each version of torch in turn."""
    return recorded(request.param)


@pytest.fixture
def installed_torch() -> Mapping[str, Any]:
    """Return the record of the installed version of torch."""
    import torch

    found = re.match(r"\d+\.\d+", str(torch.__version__))
    assert found is not None
    version = f"{found[0]}.0"
    if version not in TORCH_VERSIONS:
        pytest.skip(f"no record of torch {version} in {SIGNATURES.name}/")
    return recorded(version)


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch, installed_torch: Mapping[str, Any]) -> XpuDriver:
    """Return a driver for `torch.xpu` with one card; a test changes its cards and its faults."""
    from fake_torch_xpu import XpuDriver

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return XpuDriver(monkeypatch, installed_torch)


@pytest.fixture
def xpu_of_each_torch(each_recorded_torch: Mapping[str, Any], xpu: XpuDriver) -> XpuDriver:
    """Return the driver under each recorded version of torch, without the names that it lacks."""
    version = each_recorded_torch
    if Version(version["torch"]) > Version(xpu.recorded["torch"]):
        pytest.skip(f"torch {xpu.recorded['torch']} lacks names of {version['torch']}")
    xpu.become(version)
    return xpu


_SPEC = importlib.util.spec_from_file_location(
    "package_stand_ins",
    Path(__file__).parents[2] / "tests/unit/contract/package_stand_ins.py",
)
assert _SPEC is not None
assert _SPEC.loader is not None
package_stand_ins = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(package_stand_ins)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that puts the stand-in of a package on the path, with metadata."""
    own = ("lmcore_xpu.kernel.ipex",)
    for name in list(sys.modules):
        if name == "triton" or name.startswith((*own, "intel_extension_for_pytorch")):
            monkeypatch.delitem(sys.modules, name)
    with package_stand_ins.stand_ins(FAKES / "packages", tmp_path, monkeypatch, own) as put:
        yield put


@pytest.fixture(scope="session")
def put_bindings() -> Callable[..., Mapping[str, str]]:
    """Return `_put_bindings`."""
    return _put_bindings


def _put_bindings(folder: Path, version: str, *, run_path: bool = True) -> Mapping[str, str]:
    """Install the stand-in of oneCCL's bindings, and of oneCCL; return oneCCL's environment.

    Its libraries are compiled, from nothing, and linked to oneCCL's, which a loader must find.

    Args:
        folder: Folder of packages.
        version: Version in the metadata.
        run_path: Have the libraries name the folder of oneCCL's.
    """
    package, oneccl = folder / "oneccl_bindings_for_pytorch", folder / "oneccl" / "lib"
    shutil.copytree(FAKES / "packages" / "bindings" / package.name, package)
    (package / "lib").mkdir()
    oneccl.mkdir(parents=True)
    library = oneccl / "libccl.so.1"
    link = ["-Wl,--no-as-needed", str(library), *([f"-Wl,-rpath,{oneccl}"] if run_path else [])]
    libraries = {
        library: ["-Wl,-soname,libccl.so.1"],
        package / "lib" / "liboneccl_bindings_for_pytorch.so": link,
        package / "lib" / "liboneccl_bindings_for_pytorch_xpu.so": link,
    }
    for path, options in libraries.items():
        command = ["gcc", "-shared", "-nostdlib", "-x", "c", "/dev/null", "-x", "none", *options]
        subprocess.run([*command, "-o", str(path)], check=True)
    record = folder / f"oneccl_bind_pt-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: oneccl-bind-pt\nVersion: {version}\nRequires-Dist: torch\n"
    )
    return {"CCL_ROOT": str(oneccl.parent)}
