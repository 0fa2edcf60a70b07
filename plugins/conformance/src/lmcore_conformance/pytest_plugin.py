"""The pytest plugin: options, one test for each check, the table at the end, the JSON report.

Without `--accelerator` it does nothing, wherever it is installed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lmcore_conformance.declaration import Declaration
    from lmcore_conformance.registry import Check
    from lmcore_conformance.result import Result
    from lmcore_conformance.runner import Runner
    from lmcore_conformance.target import Target

__all__ = ["Conformance"]

_SUITE = Path(__file__).with_name("suite.py")
_PROPERTY = "lmcore_conformance"
_BROKEN = 2
"""Exit status where the accelerator cannot be tested at all."""


@dataclass
class Conformance:
    """A session's plugin under test, with its results.

    Attributes:
        target: The plugin.
        declaration: abilities that it is declared to lack.
        checks: All of the suite.
        levels: levels to run.
        runner: Runs the checks.
    """

    target: Target
    declaration: Declaration
    checks: Sequence[Check]
    levels: Sequence[str]
    runner: Runner

    def judge(self, check: Check, request: pytest.FixtureRequest) -> None:
        """Make a check, if its group was not made before, and end the test as it ended."""
        from lmcore_conformance.result import Status

        result = self.runner.result(check.id)
        request.node.user_properties.append((_PROPERTY, json.dumps(result.to_dict())))
        if result.status is Status.FAILED:
            pytest.fail(
                _failure_text(check, result, self.runner.logs.get(check.id, "")), pytrace=False
            )
        if result.status is Status.GAP:
            pytest.skip(f"declared gap: {result.detail}")
        if result.status is Status.NOT_RUN:
            pytest.skip(f"not run: {result.detail}")


_STATE: pytest.StashKey[Conformance] = pytest.StashKey()
_RECORDER: pytest.StashKey[_Recorder] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("lmcore conformance")
    group.addoption(
        "--accelerator",
        metavar="NAME",
        help="the plugin to test, by its name or device type; "
        "`pytest --pyargs lmcore_conformance --accelerator NAME` runs the whole suite",
    )
    group.addoption(
        "--levels", metavar="L0,L1", help="the levels to run, separated by commas; default: all"
    )
    group.addoption(
        "--requirements",
        metavar="FILE",
        help="what the device lacks, and why; default: conformance.toml in the plugin's package",
    )
    group.addoption(
        "--patience",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="multiply the time limits of checks, for a slow device; default: 1",
    )
    group.addoption("--conformance-json", metavar="FILE", help="write the report there")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run the suite on nothing."""
    arguments = [str(arg).partition("::")[0] for arg in config.invocation_params.args]
    named = {"lmcore_conformance", "lmcore_conformance.suite"} & set(arguments)
    if named and not config.getoption("--accelerator"):
        raise pytest.UsageError(
            "the conformance suite needs `--accelerator NAME`; `lmcore plugins` lists the names"
        )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Find the plugin under test; without a device that can be used there is no session."""
    config = session.config
    named = config.getoption("--accelerator")
    if not named:
        return
    from lmcore.errors import LmcoreError

    try:
        config.stash[_STATE] = _start(config, named)
    except LmcoreError as error:
        pytest.exit(f"\n{error.render()}", returncode=_BROKEN)
    config.stash[_RECORDER] = recorder = _Recorder()
    config.pluginmanager.register(recorder, "lmcore-conformance-recorder")


def _start(config: pytest.Config, named: str) -> Conformance:
    from lmcore.errors import ConfigError, suggestion
    from lmcore_conformance.declaration import find_declaration, read_declaration
    from lmcore_conformance.registry import LEVELS, all_checks
    from lmcore_conformance.runner import Runner
    from lmcore_conformance.target import find_target

    levels = [
        level.strip() for level in (config.getoption("--levels") or ",".join(LEVELS)).split(",")
    ]
    for level in levels:
        if level not in LEVELS:
            raise ConfigError(f"`--levels {level}`: no such level", hint=suggestion(level, LEVELS))
    target = find_target(named, contract_only=levels == ["L0"])
    checks = all_checks()
    given = config.getoption("--requirements")
    path = Path(given) if given else find_declaration(target.module)
    declaration = read_declaration(path, checks)
    runner = Runner(target, declaration, checks, patience=config.getoption("--patience"))
    return Conformance(target, declaration, checks, levels, runner)


@pytest.hookimpl(tryfirst=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the suite's own module, whose name no pattern of test files has."""
    if file_path == _SUITE and parent.config.getoption("--accelerator"):
        module: pytest.Collector = pytest.Module.from_parent(parent, path=file_path)
        return module
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each check of a chosen level."""
    if "conformance_check" not in metafunc.fixturenames:
        return
    state = metafunc.config.stash.get(_STATE, None)
    if state is None:  # one test, which says what is missing
        metafunc.parametrize("conformance_check", [None], ids=["no accelerator"])
        return
    level = getattr(metafunc.cls, "level", "")
    found = [check for check in state.checks if check.level == level and level in state.levels]
    metafunc.parametrize("conformance_check", found, ids=[check.id for check in found])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the empty tests of levels that were not chosen."""
    state = config.stash.get(_STATE, None)
    if state is None:
        return
    unasked = {check.level for check in state.checks} - set(state.levels)
    items[:] = [item for item in items if getattr(_class_of(item), "level", "") not in unasked]


def _class_of(item: pytest.Item) -> object:
    return getattr(item, "cls", None)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave time limits to the suite: the first test of a group waits for the whole group."""
    if _check_of(item) is not None and item.config.pluginmanager.hasplugin("timeout"):
        item.add_marker(pytest.mark.timeout(0))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make only the checks that were selected."""
    state = session.config.stash.get(_STATE, None)
    if state is not None:
        chosen = [_check_of(item) for item in session.items]
        state.runner.choose(check.id for check in chosen if check is not None)


def _check_of(item: pytest.Item) -> Check | None:
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("conformance_check") if callspec else None
    return found if hasattr(found, "group") else None


@pytest.fixture(scope="session")
def conformance(pytestconfig: pytest.Config) -> Conformance:
    """Return the plugin under test and the runner of its checks."""
    state = pytestconfig.stash.get(_STATE, None)
    if state is None:
        pytest.fail("name the plugin under test: `--accelerator NAME`", pytrace=False)
    return state


class _Recorder:
    """Keeps results for the table; with pytest-xdist they come from other processes."""

    def __init__(self) -> None:
        self.results: dict[str, Result] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the report of a check."""
        from lmcore_conformance.result import Result

        for name, value in report.user_properties:
            if name == _PROPERTY and report.when == "call":
                result = Result.from_dict(json.loads(str(value)))
                self.results[result.id] = result


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show the levels, and write the report."""
    state = config.stash.get(_STATE, None)
    if state is None or config.option.collectonly:
        return
    from lmcore_conformance.report import make_report, render

    results = {**state.runner.results, **config.stash[_RECORDER].results}
    report = make_report(state.target, state.declaration, state.checks, results)
    terminalreporter.section("lmcore conformance")
    for line in render(report):
        terminalreporter.write_line(line)
    path = config.getoption("--conformance-json")
    if path:
        text = json.dumps(report.to_dict(), indent=2)
        Path(path).write_text(f"{text}\n", encoding="utf-8")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where nothing could be tried because the device cannot be created."""
    state = session.config.stash.get(_STATE, None)
    if state is None or session.exitstatus != pytest.ExitCode.OK:
        return
    created = state.runner.results.get("device.create")
    if created is not None and created.status == "failed":
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _failure_text(check: Check, result: Result, log: str) -> str:
    lines = [f"{check.id}: {check.title}", *(f"  {line}" for line in result.findings)]
    if log:
        lines += ["", "what its process wrote last:", *log.splitlines()[-25:]]
    return "\n".join([*lines, "", f"why it matters: {check.reason}"])
