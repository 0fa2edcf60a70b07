"""Stand-in for NVIDIA apex of its pull request 2009: compiled parts are in `apex._extensions`."""

from pathlib import Path

__path__.append(str(Path(__file__).parents[2] / "apex/apex"))  # the rest is that of `fakes/apex`
