"""The line of the user's program in messages, and the hook for uncaught errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace, TracebackType

import pytest
from suite import warm

from lmcore.base.errors import ConfigError, OtherRankError
from lmcore.runtime import user_line as module
from lmcore.runtime.launch.rank import rank_info
from lmcore.runtime.user_line import error_text, install_excepthook, previous_hook, user_line

WRONG = {"RANK": "x"}


def raised(source: str, file: str, **variables: object) -> BaseException:
    """Return the exception that a program raises."""
    try:
        exec(compile(source, file, "exec", dont_inherit=True), {"__name__": "__main__"} | variables)
    except Exception as error:  # noqa: BLE001 - compared by the test
        return error
    raise AssertionError


def test_the_line_that_called_lmcore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The innermost line outside of lmcore counts; a path below the current folder is relative."""
    script = tmp_path / "train.py"
    script.write_text("def start():\n    rank_info(WRONG)\n\nstart()\n")
    error = raised(script.read_text(), str(script), rank_info=rank_info, WRONG=WRONG)
    assert user_line(error.__traceback__) == f"{script}, line 2: rank_info(WRONG)"
    monkeypatch.chdir(tmp_path)
    assert error_text(error) == (
        "error: `RANK=x` is not a number of processes or a rank\n"
        "at: train.py, line 2: rank_info(WRONG)\n"
        "why: a launcher such as torchrun sets it to a whole number\n\n"
        "hint: unset `RANK`, or start with a launcher"
    )


def test_lines_of_the_standard_library_do_not_count(tmp_path: Path) -> None:
    """A call through a library of Python's names the user's call of the library."""
    script = tmp_path / "read.py"
    script.write_text("import json\njson.loads('{')\n")
    error = raised(script.read_text(), str(script))
    assert user_line(error.__traceback__) == f"{script}, line 2: json.loads('{{')"


def test_without_a_users_line() -> None:
    """The message is as it is, and an exception that lmcore does not know keeps its traceback."""
    assert user_line(None) is None
    assert error_text(ConfigError("bad", why="w")) == "error: bad\nwhy: w"
    error = raised("1 / 0", "<text>", __name__="lmcore_cpu.plugin")
    assert error.__traceback__ is not None
    assert user_line(error.__traceback__.tb_next) is None
    text = error_text(raised("1 / 0", "job.py"))
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("ZeroDivisionError: division by zero")


def test_every_problem_of_a_collected_error_is_shown(tmp_path: Path) -> None:
    """The line follows the first message; further problems are below."""
    error = raised(
        "raise E",
        str(tmp_path / "a.py"),
        E=ConfigError.collect([ConfigError("one"), ConfigError("two")]),
    )
    assert error_text(error) == (f"error: one\nat: {tmp_path / 'a.py'}, line 1\n\nerror: two")


def test_the_hook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It shows an `LmcoreError`; the program's own hook gets other exceptions, once."""
    seen: list[type[BaseException]] = []

    def before(
        kind: type[BaseException], _error: BaseException, _trace: TracebackType | None
    ) -> None:
        seen.append(kind)

    monkeypatch.setattr(sys, "excepthook", before)
    install_excepthook()
    hook = install_excepthook()
    assert sys.excepthook is hook
    assert previous_hook() is before
    for found in (OtherRankError("rank 1 stopped"), KeyError("x")):
        error = raised("raise E", str(tmp_path / "a.py"), E=found)
        hook(type(error), error, error.__traceback__)
    assert seen == [KeyError]
    shown = capsys.readouterr().err
    assert shown == f"error: rank 1 stopped\nat: {tmp_path / 'a.py'}, line 1\n"


def test_a_hook_that_marks_each_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's, set by its process group, gets other exceptions; a message has the rank once."""

    def marks(kind: type[BaseException], *_: object) -> None:
        sys.stderr.write(f"marked {kind.__name__}\n")

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = previous_hook()
    for _ in range(2):  # sessions
        installed = install_excepthook()
        sys.excepthook = marks
        installed.put_first()
        assert previous_hook() is before
        for error in (ConfigError("bad", why="w"), KeyError("x")):
            sys.excepthook(type(error), error, None)
        assert capsys.readouterr().err == "[rank1]: error: bad\nwhy: w\nmarked KeyError\n"


def test_a_cell_of_a_notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """IPython shows the message with the cell's name, without a traceback of lmcore."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    install_excepthook()
    cell, other = str(tmp_path / "ipykernel/1.py"), str(tmp_path / "a.py")
    names = {cell: ("Cell", "In[3]")}
    compiler = SimpleNamespace(format_code_name=lambda file: names.get(file, ("File", file)))
    shell = SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    for file, place in [(cell, "Cell In[3]"), (other, other)]:
        error = raised("\nrank_info(WRONG)", file, rank_info=rank_info, WRONG=WRONG)
        report = error._render_traceback_()  # type: ignore[attr-defined]
        assert report[:2] == [
            "error: `RANK=x` is not a number of processes or a rank",
            f"at: {place}, line 2",
        ]
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert f"at: {other}, line 2" in error_text(error)


def test_the_line_of_a_cause(tmp_path: Path) -> None:
    """An error that is raised at the end of a block names the line that failed within it."""
    error = raised("raise E", str(tmp_path / "a.py"), E=OtherRankError("rank 1 stopped"))
    error.__cause__ = raised("\n\nx()", str(tmp_path / "a.py"))
    for _ in range(2):
        assert error_text(error) == f"error: rank 1 stopped\nat: {tmp_path / 'a.py'}, line 3"
        error.__cause__.__cause__ = error  # the chain may be a circle


def test_a_program_with_the_hook(tmp_path: Path) -> None:
    """`lmcore.start` sets it: a program ends with a message and its line, and no traceback."""
    script = tmp_path / "train.py"
    script.write_text("import lmcore\nrt = lmcore.start(precission='bf16')\n")
    done = warm.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: `lmcore.start(precission=...)`: unknown argument\n"
        "at: train.py, line 2: rt = lmcore.start(precission='bf16')\n\nhint: did you mean"
    )


def test_folders_of_packages() -> None:
    """The standard library and the packages of this environment are among them."""
    folders = module._installed_folders()
    assert json.__file__.startswith(folders)
    assert pytest.__file__.startswith(folders)
    assert not __file__.startswith(folders)
