"""`lmcore config show`: every value with its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcore.cli.config import run
from lmcore.config.section import SECTIONS, run_options
from lmcore.errors import ConfigError


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is installed, the CPU's plugin is the only one."""
    monkeypatch.setenv("LMCORE_PLUGINS", "")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of settings in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("preset: gpt2-124m\nmodel:\n  num_layers: 2\n", encoding="utf-8")
    return "run.yaml"


def test_text(settings: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option is a row: a mark where it was given, name, value, source."""
    assert run(["show", settings, "--lr", "1e-3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[2:].split()[0]: line for line in lines if line[:2] in {"* ", "  "} and line[2:]}
    assert set(run_options()) <= set(rows)
    assert rows["num_layers"].split() == ["*", "num_layers", "2", "run.yaml:3"]
    assert rows["hidden_size"].split() == ["*", "hidden_size", "768", "preset:", "gpt2-124m"]
    assert rows["lr"].split() == ["*", "lr", "0.001", "--lr"]
    assert rows["seed"].split() == ["seed", "1234", "default"]
    assert [line[:-1] for line in lines if line.endswith(":")] == [*SECTIONS, "cpu"]
    assert rows["peak_seconds"].split() == ["peak_seconds", "0.5", "default"]


def test_columns_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    """Sources stand below each other."""
    run(["show"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.endswith("  default")]
    assert len(rows) > len(run_options())  # those of the CPU plugin, too
    assert len({line.index("  default") for line in rows}) == 1


def test_json(settings: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` has values of their types with kind and detail of the source."""
    assert run(["show", "--json", settings, "--lr", "1e-3"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["preset"] == "gpt2-124m"
    assert shown["files"] == ["run.yaml"]
    assert shown["sections"]["optimizer"]["lr"] == {
        "value": 0.001,
        "source": "flag",
        "detail": "--lr",
    }
    assert shown["sections"]["model"]["num_layers"]["detail"] == "run.yaml:3"
    assert list(shown["sections"]) == [*SECTIONS, "cpu"]
    assert shown["sections"]["cpu"]["keep_freed_memory"] == {
        "value": True,
        "source": "default",
        "detail": "",
    }


def test_problems_are_not_shown_as_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong flags are an error, and nothing is printed."""
    with pytest.raises(ConfigError, match="unknown flag `--lrr`"):
        run(["show", "--lrr", "1"])
    with pytest.raises(ConfigError, match="unknown command `lmcore config shw`"):
        run(["shw"])
    assert capsys.readouterr().out == ""
