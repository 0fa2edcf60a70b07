"""Loggers of a run of `lmcore train`: one of a plugin, and packages that are not installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from example_plugins import installed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "log-a-run.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="needs the sources, not the wheel")
def test_the_documented_logger_of_a_plugin(train, tmp_path, monkeypatch):
    """The page's module, installed as it says, logs every step, and how the run ended."""
    (module,) = re.findall(r"```python\n(from lmcore\.contract.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(module.strip().splitlines()) <= 27
    package = tmp_path / "sources/my_logger"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(module)
    installed("my_logger", "mine", package.parent, tmp_path / "site", monkeypatch)
    run = train("run", "--train-iters 3 --eval-iters 0")
    assert run.status == 0, run.err
    losses = [f"{row['step']} {row['loss']}" for row in run.rows]
    assert (run.directory / "losses.txt").read_text().splitlines() == [*losses, "completed"]
    assert not (run.directory / "loggers.json").exists()
    off = train("off", "--train-iters 1 --eval-iters 0 --plugin-off mine")
    assert off.status == 0, off.err
    assert not (off.directory / "losses.txt").exists()


@pytest.mark.parametrize(
    "flag,package",
    [
        ("--wandb-project p", "wandb"),
        ("--mlflow-experiment e", "mlflow"),
        ("--codecarbon-dir {folder}", "codecarbon"),
    ],
)
def test_a_missing_package_is_one_warning(train, tmp_path, flag, package):
    """The run completes; the warning has the command that installs the package."""
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    run = train("run", f"--train-iters 2 {flag.format(folder=tmp_path)}")
    assert run.status == 0, run.err
    assert run.err.count(f"pip install 'lmcore[{package}]'") == 1
    assert "loggers" not in run.summary
