# ruff: noqa: INP001 - pip runs it; it is in no package
"""Build of the device's library as a part of the wheel; the rest is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

SOURCE = Path(__file__).parent / "src"


class BuildWithLibrary(build_py):
    """Copies the package, then compiles its library into the copy."""

    def run(self) -> None:
        """Do both; an editable install gets the library in place."""
        super().run()
        sys.path.insert(0, str(SOURCE))
        from lmcore_sim.build import build

        target = SOURCE if self.editable_mode else Path(self.build_lib)
        build(target / "lmcore_sim")


class BinaryDistribution(Distribution):
    """A distribution whose wheel is for one Python and one platform."""

    def has_ext_modules(self) -> bool:
        """Say that there is compiled code, which is all that the wheel's tag asks."""
        return True


setup(cmdclass={"build_py": BuildWithLibrary}, distclass=BinaryDistribution)
