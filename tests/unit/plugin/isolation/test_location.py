"""The location of a crash or an exception is the plugin's innermost line."""

from __future__ import annotations

import pytest

from lmcore.plugin.isolation import location
from lmcore.plugin.isolation.location import crash_location, exception_location


@pytest.fixture(autouse=True)
def plugin(monkeypatch, tmp_path):
    """One plugin is installed: the package `chip` in a temporary folder."""
    folder = tmp_path / "chip"
    monkeypatch.setattr(location, "_plugin_folders", lambda: iter([folder]))
    return folder


def stack(head, *frames):
    return "\n".join(
        [head, *(f'  File "{file}", line {line} in {name}' for file, line, name in frames)]
    )


def test_the_innermost_line_of_the_plugin_is_named(plugin):
    """So is the library's function in which the process crashed."""
    log = stack(
        "Current thread 0x01 (most recent call first):",
        ("/usr/lib/python3.11/ctypes/__init__.py", 519, "string_at"),
        (f"{plugin}/inner.py", 7, "load"),
        (f"{plugin}/device.py", 33, "create"),
        ("/lib/lmcore/plugin/record.py", 1, "call"),
    )
    assert crash_location(f"Fatal Python error: Segmentation fault\n\n{log}\n") == (
        "; it was in `load` (chip/inner.py, line 7), "
        "which called `string_at` (__init__.py, line 519)"
    )


def test_a_stack_without_the_plugin_names_its_innermost_line(plugin):
    """The thread that crashed is looked at, else the main thread, which is the last."""
    other = stack("Thread 0x02 (most recent call first):", (f"{plugin}/thread.py", 1, "wait"))
    main = stack("Thread 0x01 (most recent call first):", ("/lib/torch/x.py", 5, "all_reduce"))
    assert crash_location(f"{other}\n\n{main}\n") == "; it was in `all_reduce` (x.py, line 5)"
    crashed = stack("Current thread 0x03 (most recent call first):", ("/lib/y.py", 6, "read"))
    assert crash_location(f"{crashed}\n\n{main}\n") == "; it was in `read` (y.py, line 6)"
    assert crash_location("no stack here") == ""


def test_an_exception_is_located_at_its_cause(plugin):
    """The line of the plugin in the cause counts, not the line that raised the error about it."""
    plugin.mkdir()
    path = plugin / "hooks.py"
    path.write_text("def probe():\n    return int('x')\n", encoding="utf-8")
    names = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)

    def call():
        try:
            names["probe"]()
        except ValueError as cause:
            raise RuntimeError("the probe failed") from cause

    with pytest.raises(RuntimeError) as raised:
        call()
    assert exception_location(raised.value) == "chip/hooks.py, line 2"
    assert exception_location(RuntimeError("elsewhere")) == ""
