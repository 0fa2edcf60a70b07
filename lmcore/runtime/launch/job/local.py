"""This host: a script that starts the processes here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lmcore.base.errors import ConfigError
from lmcore.config.option import option
from lmcore.runtime.launch.job.command import (
    JobCommand,
    container_words,
    header,
    preamble,
    run_lines,
)
from lmcore.runtime.launch.job.profile import ContainerProfile

__all__ = ["LocalProfile", "render", "restarted", "submit"]


@dataclass(frozen=True, kw_only=True)
class LocalProfile(ContainerProfile):
    """Keys of a profile for this host."""

    processes_per_node: int | None = option(
        None, "Processes of the run; default: one for each device.", minimum=1, maximum=4096
    )


def render(profile: LocalProfile, command: JobCommand) -> str:
    """Return the script.

    Raises:
        ConfigError: The profile has several nodes.
    """
    if (profile.nodes or 1) > 1:
        raise ConfigError(
            f"`nodes` {profile.nodes}: `lmcore launch local` starts processes on this host only",
            hint="use `lmcore launch hostfile` for several hosts",
        )
    count = profile.processes_per_node
    more = [] if count is None else ["--nproc-per-node", str(count)]
    shell = "#!/bin/bash -l" if profile.modules else "#!/bin/bash"
    lines = [shell, *header("local", "bash FILE"), "", "set -eo pipefail", *preamble(profile), ""]
    if command.words[0] == "run":
        command = JobCommand(("run", *more, *command.words[1:]))
        more = []
    elif command.words[0] not in {"train", "evaluate"}:
        more = []
    start = [*run_lines(command, container_words(profile), more), '"${run[@]}"']
    lines += restarted(start, profile.restarts)
    return "\n".join(lines) + "\n"


def restarted(start: Sequence[str], restarts: int) -> Iterator[str]:
    """Yield lines of bash, which are run again if they fail; a signal is no failure."""
    if not restarts:
        yield from start
        return
    yield "start() {"
    yield from (f"    {line}" for line in start)
    yield "}"
    yield "tries=0"
    yield "until start; do"
    yield "    status=$? tries=$((tries + 1))"
    yield f'    if [ "$status" -gt 128 ] || [ "$tries" -gt {restarts} ]; then exit "$status"; fi'
    yield f'    echo "exit status $status; restart $tries of {restarts}" >&2'
    yield "done"


def submit(path: str, _profile: LocalProfile) -> Iterator[list[str]]:
    """Yield the command that runs the script."""
    yield ["bash", path]
