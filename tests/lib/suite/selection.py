"""Selection of tests: the fast set, the full set, and a rotating share of what only the latter has.

A test marked `full` runs in the full set.  The fast set takes one share in twenty of those tests as
well, chosen by the hash of the commit, so that other commits try other tests.  The variable
TEST_SET says which tests run, and reproduces another run's choice:

    fast      every test that is not marked `full`
    fast+7    these, and share 7 of the others
    full      all tests

Without it the fast set runs with the share of the commit that is checked out.  A test that is named
on the command line runs in any case.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SHARES = 20
VARIABLE = "TEST_SET"


@dataclass(frozen=True)
class TestSet:
    """Set of tests that runs.

    Attributes:
        full: True if all tests run.
        share: Number of the share that the fast set takes of the others; None for no share.
    """

    __test__ = False  # not a class of tests

    full: bool = False
    share: int | None = None

    @classmethod
    def parse(cls, text: str) -> TestSet:
        """Read a value of TEST_SET.

        Raises:
            pytest.UsageError: It is none.
        """
        if text == "full":
            return cls(full=True)
        match = re.fullmatch(r"fast(?:\+(\d+))?", text)
        if match is None or int(match[1] or 0) >= SHARES:
            raise pytest.UsageError(
                f"{VARIABLE}={text}: expected `fast`, `full`, or `fast+N` with N under {SHARES}"
            )
        return cls(share=int(match[1]) if match[1] else None)

    @classmethod
    def of_commit(cls, commit: str) -> TestSet:
        """Return the fast set with the share of a commit, given its hash in hexadecimal digits."""
        return cls(share=int(commit[:8], 16) % SHARES) if commit else cls()

    def __str__(self) -> str:
        if self.full:
            return "full"
        return "fast" if self.share is None else f"fast+{self.share}"

    def takes(self, nodeid: str) -> bool:
        """Return whether a test runs that is marked `full`."""
        return self.full or share_of(nodeid) == self.share


def share_of(nodeid: str) -> int:
    """Return the number of the share that has a test; it depends on the test's name alone."""
    digest = hashlib.blake2b(nodeid.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SHARES


def current_commit(root: Path) -> str:
    """Return the hash of the commit that is checked out at *root*; "" if there is none."""
    command = ["git", "-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def test_set(env: Mapping[str, str], root: Path) -> TestSet:
    """Return the set that the environment asks for, or the commit's."""
    text = env.get(VARIABLE, "")
    return TestSet.parse(text) if text else TestSet.of_commit(current_commit(root))


test_set.__test__ = False  # type: ignore[attr-defined]  # not a test

_FULL_TIMEOUT = 1200
"""Time limit of a test of the full set, in seconds: ten times what the longest takes."""

SET = pytest.StashKey[TestSet]()


def pytest_configure(config: pytest.Config) -> None:
    """Decide once, and let xdist's workers inherit the decision."""
    chosen = test_set(os.environ, config.rootpath)
    config.stash[SET] = chosen
    os.environ[VARIABLE] = str(chosen)


def pytest_report_header(config: pytest.Config) -> str:
    """Say which set runs, and how to run it again."""
    chosen = config.stash[SET]
    note = "" if chosen.full else "; `full`: all tests"
    return f"test set: {VARIABLE}={chosen}{note}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the full set, except the share and named tests; set time limits."""
    chosen = config.stash[SET]
    left = [item for item in items if is_full(item) and not chosen.takes(item.nodeid)]
    named = named_tests(config.args, config.invocation_params.dir, config.rootpath)
    left = [item for item in left if not is_named(item.nodeid, named)]
    if left:
        without = set(left)
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in without]
    for item in items:
        if (chosen.full or is_full(item)) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_FULL_TIMEOUT))


def is_full(item: pytest.Item) -> bool:
    """Return whether a test belongs to the full set alone."""
    return item.get_closest_marker("full") is not None


def named_tests(arguments: Sequence[str], here: Path, root: Path) -> list[str]:
    """Return the arguments that name tests, and not only a file or a folder, as pytest's names."""
    found = []
    for argument in arguments:
        file, colons, test_id = argument.partition("::")
        if colons:
            path = Path(os.path.relpath(here / file, root))
            found.append(f"{path.as_posix()}::{test_id}")
    return found


def is_named(nodeid: str, names: Sequence[str]) -> bool:
    """Return whether a name is this test's, its function's or its class's."""
    return any(nodeid == name or nodeid.startswith((f"{name}[", f"{name}::")) for name in names)


def selected(request: pytest.FixtureRequest, parameter: str) -> list[object]:
    """Return a parameter's values in the selected tests of the module that asks, without repeats.

    A fixture that prepares many cases at once prepares these only.
    """
    path = request.path
    values = [
        item.callspec.params[parameter]
        for item in request.session.items
        if item.path == path
        and isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and parameter in item.callspec.params
    ]
    return list(dict.fromkeys(values))


def peer(package: str) -> Any:
    """Import another framework; skip the test if it is not installed.

    An error in the import of an installed one, as if a package that it needs is missing, fails the
    test.
    """
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: see `tox -e library`, `clients` and `peers`")
    return importlib.import_module(package)
