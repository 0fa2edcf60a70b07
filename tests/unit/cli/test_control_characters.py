"""Tests that control characters of paths, keys and messages do not reach the terminal."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lmcore.base import log
from lmcore.base.errors import ConfigError
from lmcore.cli.doctor.text import ReportText
from lmcore.cli.main import main
from lmcore.cli.plugin.list import _print_text
from lmcore.contract import Check, CheckStatus
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.plugin import PluginRecord, PluginSet, PluginState
from lmcore.runtime.process.channel import _opened

RED = "\x1b[31m"


def test_of_paths_and_keys(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """In errors about missing files, unknown keys, and in the settings that are shown."""
    path = tmp_path / f"{RED}run.yaml"
    path.write_text('"\\e[31mtraining": {"\\e[31mlr": "\\e[31m1"}\n')
    assert main(["config", "show", f"absent{RED}.yaml"]) == 2
    assert main(["config", "show", str(path)]) == 2
    assert main(["train", "--load", str(tmp_path / f"absent{RED}")]) != 0
    assert main([f"{RED}command"]) != 0
    path.write_text("optimizer: {lr: 1e-4}\n")
    assert main(["config", "show", str(path)]) == 0
    found = capfd.readouterr()
    assert "\x1b" not in found.out + found.err
    assert "\N{REPLACEMENT CHARACTER}[31mrun.yaml" in found.out


def test_of_log_records(capfd: pytest.CaptureFixture[str]):
    """A warning about a path."""
    log.configure()
    logging.getLogger("lmcore.test").warning("cannot read %s", f"a{RED}\x9b2J\r")
    assert capfd.readouterr().err.count("\N{REPLACEMENT CHARACTER}") == 3


def test_of_other_ranks():
    """The message that another process sent."""
    fields = {"rank": 1, "what": f"{RED}what", "why": f"{RED}why", "hint": None}
    with pytest.raises(Exception, match="what") as caught:
        _opened({"failed": fields}, 1)
    assert "\x1b" not in str(caught.value)
    error = ConfigError.collect([ConfigError(f"{RED}a"), ConfigError(f"{RED}b", hint=RED)])
    assert "\x1b" not in error.render()


def test_of_checks(capsys: pytest.CaptureFixture[str]):
    """In the report of `lmcore doctor`: what plugins return."""
    report = ReportText()
    report.group(f"{RED}title", [Check(f"{RED}name", CheckStatus.FAILED, f"{RED}found", f"{RED}x")])
    report.end()
    assert capsys.readouterr().out.count("\N{REPLACEMENT CHARACTER}") == 4


def test_of_plugins(capsys: pytest.CaptureFixture[str]):
    """In the rows of `lmcore plugins`."""
    parts = (f"{RED}name", "x", f"{RED}package", f"{RED}1")
    record = PluginRecord(*parts, PluginState.FAILED, f"{RED}reason", f"{RED}trace")
    _print_text(PluginSet((record,)), None, None, None, verbose=True)
    found = capsys.readouterr().out
    assert "\x1b[31m" not in found
    assert found.count("\N{REPLACEMENT CHARACTER}") >= 5


def test_of_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In the path that `lmcore data inspect` prints."""
    with IndexedDatasetWriter(tmp_path / f"{RED}x", "uint16") as writer:
        writer.add_document([1])
    assert main(["data", "inspect", str(tmp_path / f"{RED}x"), "--scan"]) == 0
    assert "\x1b" not in capsys.readouterr().out
