"""Loggers of runs that a plugin brings, tried by `lmcore plugin check`: right and failing ones."""

from __future__ import annotations

import builtins
import importlib
import importlib.metadata
import sys
import threading

import pytest

from lmcore.contract import Check, CheckStatus
from lmcore.plugin.known_packages import GROUP
from lmcore.plugin.load import load
from lmcore.plugin.record import PluginState
from lmcore_conformance.plugin_check.registrations import REGISTRATION_CHECKS

HOOK = "lmcore_add_loggers"
INFO = """
@hookimpl
def lmcore_plugin_info():
    return PluginInfo("guest", ">=1.3,<2", provides=("guest",))
"""
LOGGER = """
import threading
from lmcore.model.run_logger import OpenLogger, RunLogger

class Rows(OpenLogger):
    def __init__(self, run):
        self.run_id = run.run_id or "first"
        size = run.settings['training']['micro_batch_size']
        (run.directory / "rows.txt").write_text(f"{run.step} {size}")
        self.lines = [threading.current_thread().name, (run.step, run.run_id)]

    def log(self, metrics):
        self.lines.append((metrics.step, metrics.values["train/loss"]))

    def text(self, name, text, step):
        self.lines.append(text)

    def directory_lost(self):
        self.lines.append("again")

    def close(self, status):
        self.lines.append(status)
        return {"rows": 2}

@hookimpl
def lmcore_add_loggers(registry):
    registry.add(RunLogger("rows", "Rows", "guest_plugin:Rows"))
"""


ABSENT_PACKAGE = """
from lmcore.base.errors import MissingPackageError

def absent(run):
    raise MissingPackageError("rows", needed_for="it", install="pip install rows")

"""


@pytest.fixture
def findings(install, monkeypatch):
    """Return a function that checks the loggers of a plugin of this source."""

    def found(source):
        install(INFO, source)
        monkeypatch.delitem(sys.modules, "guest_plugin", raising=False)
        importlib.invalidate_caches()
        (point,) = importlib.metadata.entry_points(group=GROUP, name="guest")
        record = load(point)
        assert record.state is PluginState.USABLE, record.reason
        return list(REGISTRATION_CHECKS[HOOK](record, {}))

    yield found
    sys.modules.pop("guest_plugin", None)


@pytest.mark.parametrize("background", ["", ", in_background=False"])
def test_a_logger_logs_a_run_and_its_continuation(findings, monkeypatch, background):
    """It gets numbers, texts and both statuses, on the thread that a run uses."""
    calls = []
    monkeypatch.setattr(builtins, "guest_calls", calls, raising=False)
    source = LOGGER.replace('Rows"))', f'Rows"{background}))')
    source = source.replace("append(status)", "append(status); guest_calls.append(self.lines)")
    assert findings(source) == [Check(HOOK, CheckStatus.OK, "`rows`")]
    text = "A text, of several\\nlines: ä文".replace("\\n", "\n")
    assert [one[1:] for one in calls] == [
        [(0, None), (1, 2.5), (2, 2.5), text, "again", "completed"],
        [(2, "first"), (3, 2.5), (4, 2.5), text, "again", "failed: out of memory"],
    ]
    on_main = threading.current_thread().name
    assert [one[0] == on_main for one in calls] == [bool(background)] * 2


def test_the_command_names_a_logger_that_fails(install, check):
    """The other logger of the plugin is tried all the same."""
    second = LOGGER.replace(
        'Rows"))', 'Rows"))\n    registry.add(RunLogger("b", "B", "os:getcwd"))'
    )
    install(INFO, second)
    status, found = check("guest")
    assert status == 1
    (plugin,) = found["plugins"]
    failed = [one["detail"] for one in plugin["checks"] if one["status"] == "failed"]
    assert failed == [
        "`b`: `os:getcwd` raised TypeError: posix.getcwd() takes no arguments (1 given)"
    ]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('["train/loss"]', '["loss"]', "`log` raised KeyError: 'loss'"),
        ("self.lines.append(text)", "self.line.append(text)", "`text` raised AttributeError"),
        ("self.lines.append(text)", "raise SystemExit(3)", "`text` raised SystemExit: 3"),
        ('return {"rows": 2}', "pass", "`close` returned None, not a mapping of names to numbers"),
        ('{"rows": 2}', '{"rows": "2"}', "`close` returned {'rows': '2'}, not a mapping"),
        ('run.run_id or "first"', "7", "`run_id` is 7, neither a text nor None"),
        ("['training']", "['trainin']", "`guest_plugin:Rows` raised KeyError: 'trainin'"),
        ("class Rows(OpenLogger)", "class Rows", "not an `OpenLogger`"),
        (
            "    def log(self, metrics):",
            "    def log(self, metrics):\n        metrics.values.pop('valid/loss')",
            "`log` changes the numbers, which other loggers get as well",
        ),
        (
            ':Rows"))',
            ':Rows", lambda config: config.plugins["guest"].rows))',
            "`wanted` raised KeyError: 'guest'",
        ),
    ],
)
def test_a_logger_that_fails(findings, old, new, message):
    """The method is named with the cause; a run would only lose the logger."""
    assert old in LOGGER
    first = findings(LOGGER.replace(old, new))[0]
    assert first.status is CheckStatus.FAILED
    assert first.detail.startswith("`rows`: ")
    assert message in first.detail


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            ':Rows"))',
            ':Rows", wanted=lambda config: False))',
            "`rows`: not opened: it does not want a run without arguments",
        ),
        (
            "class Rows",
            ABSENT_PACKAGE + "class Rows",
            "`rows`: not opened: it needs the package `rows`, which is not installed",
        ),
    ],
)
def test_a_logger_that_is_not_opened(findings, old, new, message):
    """A setting that is off, or a package that is absent, is no fault, and is said."""
    source = LOGGER.replace(old, new)
    found = findings(source.replace(":Rows", ":absent") if ABSENT_PACKAGE in new else source)
    assert found == [
        Check(HOOK, CheckStatus.SKIPPED, message),
        Check(HOOK, CheckStatus.OK, "`rows`"),
    ]
