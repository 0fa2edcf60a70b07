"""The pytest plugin: options, one test for each check, the table at the end, the JSON report.

Without `--accelerator` and `--plugin` it does nothing, wherever it is installed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lmcore.base.errors import PluginError
    from lmcore_conformance.declaration import Declaration
    from lmcore_conformance.registry import Check
    from lmcore_conformance.result import Result
    from lmcore_conformance.runner import Runner
    from lmcore_conformance.target import Target

__all__ = ["Conformance", "Trial", "TrialCheck"]

_SUITE = Path(__file__).with_name("suite.py")
_PROPERTY = "lmcore_conformance"
_BROKEN = 2
"""Exit status where the accelerator cannot be tested at all."""


@dataclass
class Trial:
    """Plugins under test on one device, with the results.

    Attributes:
        target: Plugins and device.
        declaration: abilities that are declared to be lacking.
        runner: Runs the checks.
        touched: ids of the checks that apply.
    """

    target: Target
    declaration: Declaration
    runner: Runner
    touched: Collection[str]


@dataclass(frozen=True)
class TrialCheck:
    """A check, to be made in a trial.

    Attributes:
        check: The check.
        number: number of the trial.
    """

    check: Check
    number: int


@dataclass
class Conformance:
    """A session's trials: one, or with `--plugin` one for each device.

    Attributes:
        trials: The trials.
        checks: All of the suite.
        levels: levels to run.
    """

    trials: Sequence[Trial]
    checks: Sequence[Check]
    levels: Sequence[str]

    def judge(self, chosen: TrialCheck, request: pytest.FixtureRequest) -> None:
        """Make a check, if its group was not made before, and end the test as it ended."""
        from lmcore_conformance.result import Status

        check, runner = chosen.check, self.trials[chosen.number].runner
        result = runner.result(check.id)
        found = {"trial": chosen.number, "result": result.to_dict()}
        request.node.user_properties.append((_PROPERTY, json.dumps(found)))
        if result.status is Status.FAILED:
            pytest.fail(_failure_text(check, result, runner.logs.get(check.id, "")), pytrace=False)
        if result.status is Status.GAP:
            pytest.skip(f"declared gap: {result.detail}")
        if result.status in {Status.NOT_RUN, Status.NOT_APPLICABLE}:
            pytest.skip(f"{result.status}: {result.detail}")


_STATE: pytest.StashKey[Conformance] = pytest.StashKey()
_RECORDER: pytest.StashKey[_Recorder] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("lmcore conformance")
    group.addoption(
        "--accelerator",
        metavar="NAME",
        help="the plugin to test, by its name or device type; "
        "`python -m pytest --pyargs lmcore_conformance --accelerator NAME` runs the whole suite",
    )
    group.addoption(
        "--with",
        dest="companions",
        action="append",
        metavar="NAME",
        help="with --accelerator, a plugin without a device to test beside it, as a run uses both; "
        "can be repeated; default: all installed ones take part, and none is tested itself",
    )
    group.addoption(
        "--plugin",
        metavar="NAME",
        help="the plugin without a device to test: what it offers, on each device that is present",
    )
    group.addoption(
        "--levels", metavar="L0,L1", help="the levels to run, separated by commas; default: all"
    )
    group.addoption(
        "--requirements",
        metavar="FILE",
        help="what the device lacks, and why, as --requirements=FILE; default: conformance.toml in "
        "the plugin's package",
    )
    group.addoption(
        "--patience",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="multiply the time limits of checks, for a slow device; default: 1",
    )
    group.addoption(
        "--shapes-of",
        metavar="NAME",
        help="also check ops at the shapes of this preset, run directory or settings file, in its "
        "precision",
    )
    group.addoption("--conformance-json", metavar="FILE", help="write the report there")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run the suite without a plugin to test."""
    arguments = [str(arg).partition("::")[0] for arg in config.invocation_params.args]
    named = {"lmcore_conformance", "lmcore_conformance.suite"} & set(arguments)
    accelerator, plugin = config.getoption("--accelerator"), config.getoption("--plugin")
    if named and not accelerator and not plugin:
        raise pytest.UsageError(
            "the conformance suite needs `--accelerator NAME`, or `--plugin NAME` for a plugin "
            "without a device; `lmcore plugins` lists the names"
        )
    if plugin and accelerator:
        raise pytest.UsageError(
            "`--plugin` and `--accelerator` cannot be combined; `--accelerator "
            f"{accelerator} --with {plugin}` tests both together"
        )
    if config.getoption("--shapes-of") and not accelerator and not plugin:
        raise pytest.UsageError("`--shapes-of NAME` needs `--accelerator NAME` or `--plugin NAME`")
    if config.getoption("companions") and not accelerator:
        raise pytest.UsageError("`--with NAME` needs `--accelerator NAME`, whose device is used")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Find the plugin under test; without a device that can be used there is no session."""
    config = session.config
    if not _is_wanted(config):
        return
    from lmcore.base.errors import LmcoreError

    try:
        config.stash[_STATE] = _start(config)
    except LmcoreError as error:
        pytest.exit(f"\n{error.render()}", returncode=_BROKEN)
    config.stash[_RECORDER] = recorder = _Recorder()
    config.pluginmanager.register(recorder, "lmcore-conformance-recorder")


def _is_wanted(config: pytest.Config) -> bool:
    return bool(config.getoption("--accelerator") or config.getoption("--plugin"))


def _start(config: pytest.Config) -> Conformance:
    from lmcore.base.errors import ConfigError, suggestion
    from lmcore_conformance.declaration import declaration_of, read_declaration
    from lmcore_conformance.op.run_shapes import read_shapes
    from lmcore_conformance.registry import LEVELS, all_checks
    from lmcore_conformance.runner import Runner
    from lmcore_conformance.target import find_plugin_targets, find_target

    levels = [
        level.strip() for level in (config.getoption("--levels") or ",".join(LEVELS)).split(",")
    ]
    for level in levels:
        if level not in LEVELS:
            raise ConfigError(f"`--levels {level}`: no such level", hint=suggestion(level, LEVELS))
    contract_only = levels == ["L0"]
    if config.getoption("--plugin"):
        targets = find_plugin_targets(config.getoption("--plugin"), contract_only=contract_only)
    else:
        companions = config.getoption("companions")
        targets = [
            find_target(
                config.getoption("--accelerator"),
                companions=companions,
                contract_only=contract_only,
            )
        ]
    named = config.getoption("--shapes-of")
    shapes = read_shapes(named) if named else None
    checks = all_checks(*(("--shapes-of",) if named else ()))
    given = config.getoption("--requirements")
    trials: list[Trial] = []
    for target in targets:
        declaration = (
            read_declaration(Path(given), checks) if given else declaration_of(target, checks)
        )
        patience = config.getoption("--patience")
        runner = Runner(target, declaration, checks, patience=patience, shapes=shapes)
        if target.fault and "L0" not in levels:
            raise _unusable(target)
        touched = set(runner.touched)
        if trials:  # level 0 does not depend on the device
            touched -= {check.id for check in checks if check.group == "contract"}
            if not runner.offers_something:
                continue
        trials.append(Trial(target, declaration, runner, touched))
    return Conformance(trials, checks, levels)


def _unusable(target: Target) -> PluginError:
    from lmcore.base.errors import PluginError

    return PluginError(
        f"plugin {target.record.label} cannot be used; level 0 alone can be tested",
        why=target.fault,
        hint=f"`lmcore plugin check {target.name}` shows its faults",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the suite's own module, whose name no pattern of test files has."""
    if file_path == _SUITE and _is_wanted(parent.config):
        module: pytest.Collector = pytest.Module.from_parent(parent, path=file_path)
        return module
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each check of a chosen level."""
    if "conformance_check" not in metafunc.fixturenames:
        return
    state = metafunc.config.stash.get(_STATE, None)
    if state is None:  # one test, whose message names what is missing
        metafunc.parametrize("conformance_check", [None], ids=["no accelerator"])
        return
    level = getattr(metafunc.cls, "level", "")
    found = [
        TrialCheck(check, number)
        for number, trial in enumerate(state.trials)
        for check in state.checks
        if check.level == level and level in state.levels and check.id in trial.touched
    ]
    several = len(state.trials) > 1
    ids = [
        f"{one.check.id}-{state.trials[one.number].target.device_type}" if several else one.check.id
        for one in found
    ]
    metafunc.parametrize("conformance_check", found, ids=ids)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the empty tests of levels that were not chosen, or that do not apply."""
    state = config.stash.get(_STATE, None)
    if state is None:
        return
    touched = {name for trial in state.trials for name in trial.touched}
    used = {check.level for check in state.checks if check.id in touched} & set(state.levels)
    unused = {check.level for check in state.checks} - used
    items[:] = [
        item for item in items if getattr(getattr(item, "cls", None), "level", "") not in unused
    ]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave time limits to the suite: the first test of a group waits for the whole group."""
    if _check_of(item) is not None and item.config.pluginmanager.hasplugin("timeout"):
        item.add_marker(pytest.mark.timeout(0))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make only the checks that were selected."""
    state = session.config.stash.get(_STATE, None)
    if state is not None:
        chosen = [_check_of(item) for item in session.items]
        for number, trial in enumerate(state.trials):
            own = [one.check.id for one in chosen if one is not None and one.number == number]
            trial.runner.choose(own)


def _check_of(item: pytest.Item) -> TrialCheck | None:
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("conformance_check") if callspec else None
    return found if isinstance(found, TrialCheck) else None


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
        self.results: dict[int, dict[str, Result]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the report of a check."""
        from lmcore_conformance.result import Result

        for name, value in report.user_properties:
            if name == _PROPERTY and report.when == "call":
                found = json.loads(str(value))
                result = Result.from_dict(found["result"])
                self.results.setdefault(found["trial"], {})[result.id] = result


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show the levels, and write the report."""
    state = config.stash.get(_STATE, None)
    if state is None or config.option.collectonly:
        return
    from lmcore_conformance.report import make_report, render

    reports = []
    contract = {check.id for check in state.checks if check.group == "contract"}
    shared: dict[str, Result] = {}
    for number, trial in enumerate(state.trials):
        own = config.stash[_RECORDER].results.get(number, {})
        results = {**shared, **trial.runner.results, **own}
        shared = shared or {name: results[name] for name in contract & results.keys()}
        report = make_report(
            trial.target,
            trial.declaration,
            state.checks,
            results,
            touched={*trial.touched, *shared},
            contributions=trial.runner.contributions,
        )
        reports.append(report)
        terminalreporter.section("lmcore conformance")
        for line in render(report):
            terminalreporter.write_line(line)
        if trial.target.fault:
            terminalreporter.write_line(f"\n{_unusable(trial.target).render()}")
    path = config.getoption("--conformance-json")
    if path:
        values: Any = [report.to_dict() for report in reports]
        if config.getoption("--plugin"):
            values = {"plugin": reports[0].plugin, "devices": values}
        else:
            (values,) = values
        Path(path).write_text(f"{json.dumps(values, indent=2)}\n", encoding="utf-8")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if no check could be made because the device or the plugin cannot be used."""
    state = session.config.stash.get(_STATE, None)
    if state is None or session.exitstatus != pytest.ExitCode.OK:
        return
    for trial in state.trials:
        if trial.target.fault:  # the checks that say so may be deselected
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        created = trial.runner.results.get("device.create")
        if created is not None and created.status == "failed":
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _as_gap(check: Check) -> str:
    """Return how a check without a requirement is declared as a gap."""
    return (
        f"no requirement covers it: fix it, or declare the check under `[closed]` in "
        f'conformance.toml: `"{check.id}" = "the reason"`'
    )


def _failure_text(check: Check, result: Result, log: str) -> str:
    lines = [f"{check.id}: {check.title}", *(f"  {line}" for line in result.findings)]
    if not check.requires:  # no ability to close; a level with such a gap is reached in part
        lines.append(f"  {_as_gap(check)}")
    if log:
        lines += ["", "what its process wrote last:", *log.splitlines()[-25:]]
    return "\n".join([*lines, "", f"why it matters: {check.reason}"])
