"""The programs of the tutorial `your-own-loop.md` print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs/tutorial/your-own-loop.md"
EPOCH = re.compile(r"^epoch (\d): loss ([\d.]+)(?:, (\d+) steps on (\S+))?$", re.MULTILINE)


def programs() -> list[str]:
    """Return the programs of the page: plain.py, train.py and use.py."""
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def shown(command: str) -> str:
    """Return the output of a command on the page."""
    (output,) = re.findall(
        rf"^\$ {re.escape(command)}\n(.*?)(?=^\$ |^```)",
        PAGE.read_text("utf-8").partition("## An accelerator")[0],
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
