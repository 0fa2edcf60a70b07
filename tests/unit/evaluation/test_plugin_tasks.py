"""Tasks of plugins in `lmcore evaluate`, with the plugin of docs/how-to/evaluate.md."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import PluginError
from lmcore.evaluation.chosen import named_tasks
from lmcore.evaluation.files import examples_of
from lmcore.evaluation.plugin_tasks import known_tasks
from lmcore.evaluation.task import Continued
from lmcore.plugin import discover

PAGE = Path(__file__).resolve().parents[3] / "docs/how-to/evaluate.md"


class Point:
    """An entry point of a distribution `my-tasks-dist`."""

    dist = types.SimpleNamespace(name="my-tasks-dist", version="1.0")

    def __init__(self, value: str) -> None:
        self.name, self.value = "my-tasks", value

    def load(self) -> Any:
        __import__(self.value)
        return sys.modules[self.value]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package `my_tasks` of the page."""
    blocks = re.findall(r"```python\n# (my_tasks/\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["my_tasks/plugin.py", "my_tasks/capitals.py"]
    assert sum(len(text.splitlines()) for _, text in blocks) < 35
    (tmp_path / "my_tasks").mkdir()
    (tmp_path / "my_tasks/__init__.py").touch()
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [one for one in sys.modules if one.split(".")[0] == "my_tasks"]:
        del sys.modules[name]


def plugins() -> Any:
    return discover(env={}, entry_points=[Point("my_tasks.plugin")], probe=False)


def test_the_task_of_the_page(package: Path) -> None:
    known = known_tasks(plugins())
    ((task, distribution),) = known.added
    assert (task.name, distribution) == ("capitals", "my-tasks-dist")
    (package / "capitals.jsonl").write_text(json.dumps({"country": "Peru", "capital": "Lima"}))
    (chosen,) = named_tasks(["capitals"], known.all)
    expected = [Continued("The capital of Peru is", " Lima")]
    assert examples_of(chosen, [package / "capitals.jsonl"]) == expected


def test_the_list_names_the_distribution(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lmcore.cli import evaluate

    monkeypatch.setattr(evaluate, "find_plugins", lambda _argv, probe: plugins())
    assert evaluate.run(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("capitals"))
    assert lines[at + 2].split() == ["from", "my-tasks-dist"]
    assert evaluate.run(["--list", "--task", "capitals"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[at : at + 3]


@pytest.mark.parametrize(
    "code,why",
    [
        ("raise ValueError('broken')", "raised ValueError: broken"),
        ("CAPITALS = 3", "is 3, not a `lmcore.evaluation.task.Task`"),
        ("", "raised AttributeError"),
        (
            "import lmcore.evaluation.task as t; CAPITALS = t.Task('other', '', (), list, (), '')",
            "the name of `my_tasks.capitals:CAPITALS` is `other`",
        ),
    ],
)
def test_a_task_that_cannot_be_loaded_is_left_out(
    package: Path, caplog: pytest.LogCaptureFixture, code: str, why: str
) -> None:
    (package / "my_tasks/capitals.py").write_text(code)
    assert known_tasks(plugins()).added == ()
    assert "task `capitals` of plugin" in caplog.text
    assert why in caplog.text


def test_two_plugins_with_one_task(package: Path) -> None:
    second = Point("my_second.plugin")
    second.name = "second"
    (package / "my_second").mkdir()
    (package / "my_second/__init__.py").touch()
    text = (package / "my_tasks/plugin.py").read_text()
    (package / "my_second/plugin.py").write_text(text.replace("my-tasks", "second"))
    both = discover(env={}, entry_points=[Point("my_tasks.plugin"), second], probe=False)
    with pytest.raises(PluginError, match=r"`my-tasks` .*`second` .*have a task `capitals` each"):
        known_tasks(both)
