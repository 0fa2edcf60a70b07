"""`lmcore config show`: every value with its source, and the problems of the settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.cli.config import run
from lmcore.config.file.run_file import write_run_file
from lmcore.config.load import load_config
from lmcore.config.resolve import resolve
from lmcore.config.section import SECTIONS, run_options
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the CPU's plugin is loaded, even if others are installed."""
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


def test_first_source(settings: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A value of a run's file is shown with its line and its first source."""
    plan = resolve(validate(load_config(["--lr", "0.1"])), tokenizer=TokenizerIdentity(257))
    Path("config.yaml").write_text(write_run_file(plan))
    assert run(["show", "config.yaml"]) == 0
    (row,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("* lr ")]
    lines = Path("config.yaml").read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.startswith("  lr:"))
    assert row.endswith(f"  config.yaml:{line}, from --lr")
    assert run(["show", "config.yaml", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["sections"]["optimizer"]
    assert shown["lr"]["origin"] == "--lr"
    assert "origin" not in shown["min_lr"]


def test_columns_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    """Sources are in one column."""
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


@pytest.mark.parametrize(
    "flags,problem",
    [
        (
            "--hidden-size 8192 --num-attention-heads 48",
            "`--hidden-size 8192` is not divisible by `--num-attention-heads 48`",
        ),
        (
            "--seq-length 2048 --max-position-embeddings 1024",
            "`--seq-length 2048` exceeds `--max-position-embeddings 1024`",
        ),
        ("--epochs 3", "`--epochs 3` is not supported"),
        (
            "--nproc-per-node 3 --tensor-model-parallel-size 2",
            "a multiple of 2 processes; this run has 3",
        ),
    ],
)
def test_settings_are_checked(flags: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Problems of the settings are an error, as in `lmcore train`, and nothing else is printed."""
    with pytest.raises(ConfigError) as caught:
        run(["show", *flags.split()])
    assert problem in caught.value.what
    assert caught.value.hint
    assert capsys.readouterr().out == ""


def test_environment(
    settings: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device that LMCORE_DEVICE names has this source, unless a flag goes before it."""

    def shown(*flags: str) -> list[str]:
        assert run(["show", settings, *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        return next(line for line in lines if line[2:].startswith("device ")).split()

    assert shown() == ["device", "null", "default"]
    monkeypatch.setenv("LMCORE_DEVICE", "cpu")
    assert shown() == ["*", "device", "cpu", "environment:", "LMCORE_DEVICE"]
    assert shown("--device", "cpu") == ["*", "device", "cpu", "--device"]


def test_devices_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Devices and data that `lmcore train` refuses at once are problems of the settings."""
    (tmp_path / "list").write_text("x a\n", "utf-8")
    with pytest.raises(ConfigError) as caught:
        run(["show", "--device", "warp", "--data-file-list", str(tmp_path / "list")])
    problems = [problem.what for problem in (caught.value, *caught.value.others)]
    assert problems[0].endswith("`x` is not a weight")
    assert problems[1] == "`--device warp`: no usable plugin has this device"
    with pytest.raises(ConfigError, match="`--corpus nope`: no text has this name"):
        run(["show", "--corpus", "nope"])
    monkeypatch.setenv("LMCORE_DEVICE", "warp")
    with pytest.raises(ConfigError, match="`LMCORE_DEVICE=warp`: no usable plugin"):
        run(["show"])
    assert capsys.readouterr().out == ""


def test_unknown_number_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    """Without `--nproc-per-node` nothing is concluded about the layout."""
    assert run(["show", *["--tensor-model-parallel-size", "2", "--global-batch-size", "16"]]) == 0
    assert "tensor_model_parallel_size" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"\(7\) is not divisible by micro batch size \(2\)"):
        run(["show", *["--micro-batch-size", "2", "--global-batch-size", "7"]])


def test_problems_are_not_shown_as_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong flags are an error, and nothing is printed."""
    with pytest.raises(ConfigError, match="unknown flag `--lrr`"):
        run(["show", "--lrr", "1"])
    with pytest.raises(ConfigError, match="unknown command `lmcore config shw`"):
        run(["shw"])
    assert capsys.readouterr().out == ""


def test_given_settings_are_bold_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The codes of the command itself stay; those in a value do not."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(["show", "--lr", "1e-3", "--name", "a\x1b[31mb"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("\x1b[1m* lr ") and line.endswith("\x1b[0m") for line in lines)
    assert not any("\x1b[31m" in line for line in lines)


def test_the_checkpoint_is_looked_for(tmp_path: Path) -> None:
    """`--load` of no checkpoint is the error that a run ends with, and its status."""
    missing = tmp_path / "nosuch"
    with pytest.raises(LmcoreError, match="nosuch") as caught:
        run(["show", "--load", str(missing)])
    assert caught.value.exit_status == 2
    assert run(["show", "--load", str(missing), "--save", str(missing)]) == 0
