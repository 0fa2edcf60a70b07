"""Isolated calls (`lmcore.plugin.isolation`) in processes forked as `suite.warm` does.

`install` has this process make its calls so.  As a plugin of pytest (`-p suite.calls`) it does so
for a pytest that a test starts by `suite.warm`, and has there some commands forked, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import types
from collections.abc import Mapping, Sequence
from typing import Any

from lmcore.plugin.isolation import subprocess_call as isolated
from suite import warm

COLD = {"contract"}
"""Groups of conformance checks that look at what is imported: their processes begin empty."""
COLD_TARGETS = {
    "lmcore_conformance.plugin_check.trial:check_plugin",
    "lmcore_conformance.plugin_check.launcher_cost:watch_launcher",
}
"""Functions that do so."""
NESTED = {"command"}
"""Groups whose checks make calls in their turn."""


def popen(command: Sequence[str], **more: Any) -> subprocess.Popen[Any]:
    """Start the process of a call."""
    target, arguments = command[5], json.loads(command[6])
    group = arguments[0] if target.endswith(":run_group") else None
    if group in COLD or target in COLD_TARGETS:
        return _Popen(command, **more)
    if group in NESTED:
        statement = "from suite.calls import install; install(nested=True)"
        command = [*command[:3], f"{statement}\n{command[3]}", *command[4:]]
    return warm.WarmPopen(command, **more)


_Popen = subprocess.Popen

SUBPROCESS = types.SimpleNamespace(**{**vars(warm.SUBPROCESS), "Popen": popen})
"""Takes the place of `subprocess` in `lmcore.plugin.isolation.subprocess_call`."""


class CopiedServer(warm._Server):
    """A server that is a copy of this process, which is itself forked and has done nothing yet."""

    def __init__(self) -> None:
        self.env = dict(os.environ)
        self._socket, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if not os.fork():
            self._socket.close()
            try:
                warm._serve(peer)
            finally:
                os._exit(0)  # the client is gone, or sees that this process is
        peer.close()


def install(*, nested: bool = False) -> None:
    """Make this process's calls in forked processes from here on.

    Args:
        nested: True if this process is itself forked, so that it can be copied.
    """
    if nested:
        warm._STARTED[os.getpid()] = CopiedServer()
    isolated.subprocess = SUBPROCESS  # type: ignore[assignment]
    with contextlib.suppress(ImportError):
        from lmcore_conformance import runner

        runner.ForkServer = NoForkServer  # type: ignore[assignment,misc]


class NoForkServer:
    """`ForkServer` of the conformance suite that starts none, as one serves all tests here."""

    start = staticmethod(isolated.start_program)

    def __init__(self, env: Mapping[str, str]) -> None:
        """Take the environment of the processes, and do nothing with it."""


FORKED = (["lmcore.cli.main", "train"], ["pytest", "--pyargs"])
"""First arguments of `python -m` in commands that the tests of a forked pytest may fork."""


class Popen(warm.WarmPopen):
    """`subprocess.Popen`, which forks for some commands."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        if isinstance(args, list) and args[1:2] == ["-m"] and args[2:4] in FORKED:
            super()._execute_child(args, *rest)
        else:
            _Popen._execute_child(self, args, *rest)


def pytest_configure() -> None:
    """Have the pytest that this is a plugin of make its calls so, and fork what is in `FORKED`."""
    install(nested=True)
    subprocess.Popen = Popen  # type: ignore[misc]
