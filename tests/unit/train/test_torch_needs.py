"""Settings that need a newer torch: refused before anything is read or built."""

from __future__ import annotations

import pytest

from lmcore.cli.main import main
from lmcore.contract import torch_versions

PIPELINE = "--pipeline-model-parallel-size 2 --nproc-per-node 2 --global-batch-size 16"
SETTINGS = {
    "`--optimizer muon` needs torch 2.9 or newer": "--optimizer muon",
    "`--pipeline-schedule zero-bubble` needs torch 2.13": "--pipeline-schedule zero-bubble",
    "`--pipeline-schedule zero-bubble-v` needs": "--pipeline-schedule zero-bubble-v",
}


@pytest.mark.parametrize("message", SETTINGS)
@pytest.mark.parametrize("command", ["train", "config show"])
def test_an_older_torch(
    command: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error has the installed version and another setting, among all other problems."""
    monkeypatch.setattr(torch_versions, "_installed", lambda: "2.8.0+cpu")
    argv = f"{command} {PIPELINE} {SETTINGS[message]} --num-attention-heads 3"
    assert main(argv.split()) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "torch 2.8.0+cpu has no" in shown
    assert "`--optimizer adam`" in shown or "`--pipeline-schedule 1f1b`" in shown
    assert "--num-attention-heads 3" in shown


@pytest.mark.parametrize("flags", SETTINGS.values())
def test_a_newer_torch(
    flags: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has everything."""
    monkeypatch.setattr(torch_versions, "_installed", lambda: torch_versions.NEWEST)
    assert main(f"config show {PIPELINE} {flags}".split()) == 0, capsys.readouterr().err
