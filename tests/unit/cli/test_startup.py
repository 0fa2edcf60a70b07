"""Help is instant: no command loads torch to explain itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lmcore.cli.commands import GROUPS, known_commands
from lmcore.cli.group import load_own

NAMES = {one.name: one for one in known_commands().values() if one.load}
INNER = {one.name: one for group in GROUPS.values() for one in group if one.load}

LINES = [
    [],
    ["--version"],
    *([name, "--help"] for name in NAMES),
    ["data", "prepare", "--help"],
    ["data", "inspect", "--help"],
    ["data", "merge", "--help"],
    ["data", "split", "--help"],
    ["data", "weights", "--help"],
    ["data", "repair", "--help"],
    ["data", "corpora", "--help"],
    ["cpu-threads", "--help"],
    ["config", "show", "--help"],
    ["config", "show"],
    ["train", "--lrr", "1"],
]

SCRIPT = """
import sys
from lmcore.cli.main import main
status = main(sys.argv[1:])
heavy = [name for name in ("torch", "numpy", "argparse") if name in sys.modules]
print("loaded:", *heavy, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize("argv", LINES, ids=" ".join)
def test_no_torch(argv: list[str]) -> None:
    """Help and versions need neither torch nor numpy; settings are checked without torch."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *argv], capture_output=True, text=True, check=False
    )
    wrong = "--lrr" in argv
    assert run.returncode == (2 if wrong else 0), run.stderr
    loaded = run.stderr.splitlines()[-1].split()
    assert loaded[0] == "loaded:"
    assert "torch" not in loaded
    checks_data = argv == ["config", "show"]
    assert wrong or checks_data or loaded == ["loaded:"]


@pytest.mark.parametrize("argv,modules", [("--version", 5), ("--help", None)])
def test_little_is_loaded(argv: str, modules: int | None) -> None:
    """`--version` loads entry, streams and former names; `--help` the plugins, but nothing slow."""
    script = SCRIPT.replace(
        'print("loaded:", *heavy, file=sys.stderr)', "print(*sys.modules, file=sys.stderr)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, argv], capture_output=True, text=True, check=True
    )
    loaded = set(run.stderr.split())
    assert not loaded & {"torch", "numpy", "yaml", "rich", "psutil", "lmcore.config.load"}
    own = {name for name in loaded if name.partition(".")[0] == "lmcore"}
    assert "lmcore.cli.main" in own
    assert modules is None or len(own) == modules


def test_package_as_module() -> None:
    """`python -m lmcore` is the command line, with its exit status."""
    for argv, status in ((["--version"], 0), (["nonesuch"], 2)):
        run = subprocess.run(
            [sys.executable, "-m", "lmcore", *argv], capture_output=True, text=True, check=False
        )
        assert run.returncode == status, run.stderr
    assert "unknown command `nonesuch`" in run.stderr


def test_package_loads_nothing() -> None:
    """`import lmcore` loads none of its modules, and no torch."""
    script = "import sys, lmcore; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert "torch" not in loaded
    own = {name for name in loaded if name.partition(".")[0] == "lmcore"}
    assert own == {"lmcore", "lmcore.old_paths"}


def test_no_collection_traverses_torch(tmp_path: Path) -> None:
    """A run leaves the objects of `import torch`, which are never garbage, out of collection."""
    script = """
import gc, sys
from lmcore.cli.main import main
shape = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"]
status = main(["train", *shape, "--seq-length", "8", "--train-iters", "1", "--eval-iters", "0",
    "--sample-tokens", "0", "--no-tensorboard", "--device", "cpu", "--save", sys.argv[1]])
print(status, gc.get_freeze_count() > 100_000, gc.isenabled())
"""
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 True True"


@pytest.mark.parametrize("name", [*NAMES, *INNER])
def test_every_command_has_a_function(name: str) -> None:
    """The target of a record is there."""
    assert callable(load_own((NAMES | INNER)[name]))
