"""The pages on the library: public names of the reference, programs of README and tutorial."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import lmcore

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = (ROOT / "docs/reference/library.md").read_text("utf-8")
TUTORIAL = (ROOT / "docs/tutorial/your-own-loop.md").read_text("utf-8")
EPOCH = re.compile(r"^epoch (\d): loss ([\d.]+)(?:, (\d+) steps on (\S+))?$", re.MULTILINE)


def test_every_name_is_documented() -> None:
    """Names of the package, and attributes of a session by `rt.`."""
    kinds = [one for one in lmcore.Session.__mro__ if one.__module__.startswith("lmcore.")]
    own = {name for one in kinds for name in vars(one) if not name.startswith("_")}
    own -= {"current", "require_none"}
    documented = set(re.findall(r"`rt\.(\w+)", REFERENCE)) | set(
        re.findall(r"with rt\.(\w+)", REFERENCE)
    )
    assert own <= documented
    assert documented - own == {"opened_at"}
    assert all(f"`{name}" in REFERENCE for name in lmcore.__all__)


def test_the_lines_of_the_readme_run(
    start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The lines run as they are printed, without lines before them."""
    start().close()  # the environment of the other tests, restored at the end
    monkeypatch.setenv("LMCORE_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if "lmcore.start" in block]
    exec(compile(block, "README.md", "exec"), {})
    assert (tmp_path / "out" / "iter_0000004").is_dir()


def programs() -> list[str]:
    """Return the programs of the page: plain.py, train.py and use.py."""
    return re.findall(r"^```python\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)


def shown(command: str) -> str:
    """Return the output of a command on the page."""
    (output,) = re.findall(
        rf"^\$ {re.escape(command)}\n(.*?)(?=^\$ |^```)",
        TUTORIAL.partition("## An accelerator")[0],
        re.MULTILINE | re.DOTALL,
    )
    return output


@pytest.mark.usefixtures("start")  # the host alone, and the environment restored
def test_programs_print_what_the_page_shows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The losses of both loops are equal; the last digits depend on the host's processor."""
    monkeypatch.chdir(tmp_path)
    plain, train, use = programs()
    printed = []
    for program in (plain, train, use):
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
        printed.append(capsys.readouterr().out)
    epochs = [EPOCH.findall(text) for text in printed[:2]]
    assert [each[:2] for each in epochs[0]] == [each[:2] for each in epochs[1]]
    assert {each[2:] for each in epochs[1]} == {("32", "cpu")}
    for found, command in zip(epochs, ("python plain.py", "python train.py"), strict=True):
        expected = EPOCH.findall(shown(command))
        assert len(expected) == 5
        assert [each[2:] for each in found] == [each[2:] for each in expected]
        assert [float(each[1]) for each in found] == pytest.approx(
            [float(each[1]) for each in expected], rel=0.02
        )
    assert re.fullmatch(r"update 160 on cpu: sin\(1\) = 0\.[789]\d\d\n", printed[2])
