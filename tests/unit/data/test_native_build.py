"""The build of `lmcore._native` and `lmcore_cpu._kernels`, with a C++ compiler and without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

pytestmark = [
    pytest.mark.skipif(CMAKE is None, reason="needs cmake"),
    pytest.mark.skipif(
        not (ROOT / "CMakeLists.txt").is_file(), reason="needs the sources, not the wheel"
    ),
]


def cmake(*arguments: object, **environment: str) -> str:
    """Run cmake; return what it printed, fail with it."""
    done = subprocess.run(
        [CMAKE, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def configure(build: Path, *options: str, **environment: str) -> str:
    return cmake(
        "-S", ROOT, "-B", build, f"-DPython_EXECUTABLE={sys.executable}", *options, **environment
    )


def installed(build: Path, prefix: Path) -> list[str]:
    cmake("--build", build, "--parallel", 2)
    cmake("--install", build, "--prefix", prefix)
    return [path.name for path in prefix.rglob("*") if path.is_file()]


def test_without_a_compiler_nothing_is_built_and_the_install_goes_on(tmp_path):
    """No C++ compiler: a warning says so, and what is installed is the Python alone."""
    printed = configure(tmp_path / "b", CXX="/nowhere/c++", CMAKE_GENERATOR="Unix Makefiles")
    assert "without its C++ parts: no working C++ compiler" in " ".join(printed.split())
    assert installed(tmp_path / "b", tmp_path / "p") == []


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_without_pybind11_nothing_is_built_and_the_install_goes_on(tmp_path):
    """Without pybind11 nothing is built, and the installation succeeds."""
    printed = configure(tmp_path / "b", "-DCMAKE_DISABLE_FIND_PACKAGE_pybind11=ON")
    assert "pybind11 was not found" in " ".join(printed.split())
    assert installed(tmp_path / "b", tmp_path / "p") == []


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_with_a_compiler_the_module_is_going_to_be_built(tmp_path):
    """With a compiler, and pybind11 where this Python has it, the module is a target."""
    pytest.importorskip("pybind11", reason="needs pybind11")
    printed = configure(tmp_path / "b", CMAKE_GENERATOR="Unix Makefiles")
    assert "without its C++ parts" not in " ".join(printed.split())
    targets = cmake("--build", tmp_path / "b", "--target", "help")
    assert "... _native\n" in targets
    assert "... _kernels\n" in targets


@pytest.mark.full  # compiling takes 50 s, and a wheel build does the same
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_with_a_compiler_the_module_is_built_and_works(tmp_path):
    """With a compiler the module is installed in the package and builds the published index."""
    pytest.importorskip("pybind11", reason="needs pybind11")
    quick = ("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0")  # optimizing takes minutes
    configure(tmp_path / "b", *quick)
    kernels, native = sorted(installed(tmp_path / "b", tmp_path / "p"))
    assert native.startswith("_native.")
    assert (tmp_path / "p/lmcore" / native).is_file()
    assert kernels.startswith("_kernels.")
    assert (tmp_path / "p/lmcore_cpu" / kernels).is_file()
    check = (
        "import _native, numpy as np\n"
        "sizes, documents = np.int32([3, 5, 2, 7, 4]), np.int32([4, 0, 1, 2, 3])\n"
        "index = _native.build_sample_index(sizes, documents, 4, 5)\n"
        "assert index.tolist() == [[0, 0], [1, 0], [2, 1], [3, 0], [4, 2], [4, 6]]\n"
        "import _kernels\n"
        "assert set(_kernels.blocks()) <= {'amx', 'avx512_bf16', 'avx512', 'avx2'}\n"
    )
    places = os.pathsep.join(str(tmp_path / "p" / name) for name in ("lmcore", "lmcore_cpu"))
    env = os.environ | {"PYTHONPATH": places}
    subprocess.run([sys.executable, "-c", check], env=env, check=True)
