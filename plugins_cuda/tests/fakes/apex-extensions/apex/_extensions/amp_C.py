"""Stand-in for apex's `amp_C` in that folder: the one of `fakes/apex`."""  # noqa: N999 - its name there

from pathlib import Path

_PATH = Path(__file__).parents[3] / "apex/amp_C.py"
exec(compile(_PATH.read_text(encoding="utf-8"), _PATH, "exec"))
