"""Compile the device's library from `csrc/` with the torch that is installed.

`pip install` does it once; after an upgrade of torch, ``python -m lmcore_sim.build`` does it again
in place.  Needs g++ (or `$CXX`) and nothing else: files are compiled side by side without ninja.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["LIBRARY", "RECORD", "build"]

PACKAGE = Path(__file__).parent
LIBRARY = "_C" + str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")
RECORD = "_built.json"
"""Beside the library: the torch and Python that it was built for."""

_FLAGS = (
    *("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    # g++ 12 sees an overflow in the null object of c10::intrusive_ptr, which cannot be.
    "-Wno-stringop-overflow",
)


def build(folder: Path = PACKAGE) -> Path:
    """Compile the library into *folder* and note for which torch; return its path.

    Raises:
        RuntimeError: There is no torch or no compiler, or a file does not compile.
    """
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as cause:
        raise RuntimeError(
            "lmcore-sim is compiled with the torch that is installed, and there is none here; "
            "install torch first and pass `--no-build-isolation` to pip"
        ) from cause
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    # Classes of another library are found only with its names of compiler and ABI; newer versions
    # of torch have none, and need none.
    names = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    pybind = {name: getattr(torch._C, f"_PYBIND11_{name}", None) for name in names}  # noqa: SLF001
    defines = [f'-DPYBIND11_{name}="{value}"' for name, value in pybind.items() if value]
    flags = [*_FLAGS, abi, *defines, *(f"-isystem{path}" for path in includes)]
    with tempfile.TemporaryDirectory() as scratch:
        objects = _compile([*compiler, *flags], Path(scratch))
        library = folder / LIBRARY
        fresh = Path(scratch) / LIBRARY
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        rpaths = [f"-Wl,-rpath,{path}" for path in cpp_extension.library_paths()]
        needed = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        _run([*compiler, "-shared", "-o", str(fresh), *objects, *libraries, *rpaths, *needed])
        folder.mkdir(parents=True, exist_ok=True)
        # Not over the old file: a process may have it loaded.
        library.unlink(missing_ok=True)
        library.write_bytes(fresh.read_bytes())
    record = {"torch": str(torch.__version__), "python": sysconfig.get_python_version()}
    (folder / RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")
    return library


def _compile(command: Sequence[str], scratch: Path) -> list[str]:
    # The largest take longest; started first, they end together with the others.
    sources = sorted((PACKAGE / "csrc").glob("*.cpp"), key=lambda path: -path.stat().st_size)
    objects = [str(scratch / f"{source.stem}.o") for source in sources]

    def compile_one(source: Path, target: str) -> None:
        _run([*command, "-c", str(source), "-o", target])

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, sources, objects))
    return objects


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError as cause:
        raise RuntimeError(
            f"the C++ compiler `{command[0]}` cannot be started: {cause}; "
            "install g++ (such as by `apt-get install g++`) or set `CXX`"
        ) from cause
    if done.stderr:
        sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(f"`{shlex.join(command)}` failed with status {done.returncode}")


if __name__ == "__main__":
    print(build())  # noqa: T201
