"""The page of environment variables, which lists exactly the variables that the code reads."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/environment.md"
SOURCES = (
    *("lmcore", "native", "plugins/cpu", "plugins/data-tools", "plugins/deepspeed"),
    *("plugins/serve", "plugins/xla", "plugins_cuda", "plugins_xpu"),
)
"""Code for users of lmcore; the kit for plugins' authors documents its own variables."""

_OWN = re.compile(r"\bLMCORE_[A-Z][A-Z_]*[A-Z]\b")


def read_by_the_code() -> set[str]:
    """Return lmcore's variables that any source file names."""
    found: set[str] = set()
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT).parts
            if path.suffix in {".py", ".cpp", ".h", ".txt", ".toml"} and "tests" not in inside:
                found |= set(_OWN.findall(path.read_text(encoding="utf-8")))
    return found


def listed() -> list[str]:
    """Return the variables of the page's tables, in their order."""
    rows = re.findall(r"^\| (`[^|]*`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_every_variable_is_listed_and_every_listed_one_is_read():
    """A new variable needs its row; a row needs a variable."""
    own = [name for name in listed() if name.startswith("LMCORE_")]
    assert sorted(own) == sorted(read_by_the_code())
    assert len(own) == len(set(own))


def test_the_launchers_variables_are_listed():
    """The variables of a process's place that the runtime reads are listed."""
    page = PAGE.read_text(encoding="utf-8").partition("## What a launcher sets")[2]
    page = page.partition("## Backends that other packages add to torch")[0]
    names = set(re.findall(r"`([A-Z][A-Za-z0-9_]+_[A-Za-z_]+|RANK)`", page))
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "lmcore/runtime").rglob("*.py")
        if path.parent.name != "job"  # scripts that it writes read further variables
    )
    ours = r"MASTER_[A-Z]+|TORCHELASTIC_[A-Z_]+|PET_[A-Z_]+"
    theirs = r"(?:OMPI|PMIX?|PALS|MPI|SLURM|PBS|MV2|MVP|JSM|FLUX|LSB)_\w+"
    asked = set(re.findall(rf"\b(?:{ours}|{theirs})\b", text))
    torchrun = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    unknown = {"HOROVOD_RANK", "MPIRUN_RANK", "NODE_RANK"}  # found by their ending
    assert names == asked | torchrun | unknown | {"LOCAL_SIZE"}
