"""Hosts of a hostfile: a script that starts a process on each by ssh, which starts the others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import ConfigError, unreadable
from lmcore.base.missing_path import missing_path_hint
from lmcore.config.option import INPUT_PATH, option
from lmcore.runtime.launch.job.command import (
    JobCommand,
    bash_array,
    container_words,
    header,
    preamble,
    run_lines,
)
from lmcore.runtime.launch.job.local import restarted
from lmcore.runtime.launch.job.profile import ContainerProfile

__all__ = ["HostfileProfile", "read_hostfile", "render", "submit"]

_MAX_BYTES = 1 << 22
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@%-]*", re.ASCII)
_SLOTS = re.compile(r"slots=(\d{1,4})", re.ASCII)
_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below the ports that systems assign


@dataclass(frozen=True, kw_only=True)
class HostfileProfile(ContainerProfile):
    """Keys of a profile for the hosts of a hostfile."""

    nodes: int | None = option(
        None, "Number of hosts, the first of the file; default: all.", minimum=1, maximum=100_000
    )
    processes_per_node: int | None = option(
        None,
        "Processes of the run on each host; default: the slots of the hosts.",
        minimum=1,
        maximum=4096,
    )
    hostfile: str | None = option(
        None, "File with lines `HOST slots=N`.", metavar="FILE", paths=INPUT_PATH
    )
    ssh: tuple[str, ...] = option(
        ("ssh", "-tt", "-o", "BatchMode=yes"),
        "Words that run a command on a host, before the host's name.",
        metavar="WORD",
    )


def read_hostfile(path: str) -> list[tuple[str, int | None]]:
    """Return the hosts of a file with lines `HOST slots=N`, and their slots; None if not given.

    Raises:
        ConfigError: The file cannot be read, has no host, or a line is malformed.
    """
    try:
        text = read_bounded_file(path, _MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the hostfile `{path}`",
            why=unreadable(error),
            hint=missing_path_hint(path, "give a file with a line `HOST slots=N` for each host"),
        ) from None
    hosts: dict[str, int | None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}:{number}"
        slots = _SLOTS.fullmatch(words[1]) if len(words) > 1 else None
        if not _HOST.fullmatch(words[0]) or len(words) > 2 or (len(words) == 2 and slots is None):
            raise ConfigError(
                f"{where}: `{line.strip()}` is not `HOST slots=N`",
                hint="write a host on each line, and how many processes it takes",
            )
        if words[0] in hosts:
            raise ConfigError(
                f"{where}: the host `{words[0]}` is listed twice",
                hint="give all its slots in one line",
            )
        hosts[words[0]] = int(slots[1]) if slots else None
    if not hosts:
        raise ConfigError(f"the hostfile `{path}` names no host", hint="write `HOST slots=N` lines")
    return list(hosts.items())


def render(profile: HostfileProfile, command: JobCommand) -> str:
    """Return the script.

    Raises:
        ConfigError: There is no hostfile, or it contradicts the profile.
    """
    hosts, processes = _hosts(profile)
    node = [
        "set -eo pipefail",
        *preamble(profile),
        f"export PET_NNODES={len(hosts)} PET_NPROC_PER_NODE={processes}",
        *run_lines(command, container_words(profile)),
        'exec "${run[@]}"',
    ]
    shell = "bash -lc" if profile.modules else "bash -c"
    text = f"{shell} {shlex.quote(chr(10).join(node))}"
    port = profile.master_port or f"$(({_FIRST_PORT} + RANDOM % {_NUM_PORTS}))"
    directory = [] if profile.directory is not None else ['directory=$(printf %q "$PWD")']
    change = "" if profile.directory is not None else "cd $directory && "
    lines = [
        "#!/bin/bash",
        *header("hostfile", "bash FILE"),
        "",
        bash_array("hosts", hosts),
        bash_array("ssh", profile.ssh),
        *directory,
        "# What each host runs, quoted for its shell.",
        f"command={shlex.quote(text)}",
        "",
    ]
    lines += restarted(_start(str(port), change), profile.restarts)
    return "\n".join(lines) + "\n"


def _hosts(profile: HostfileProfile) -> tuple[list[str], int]:
    """Return the hosts of the run, and the number of processes of each."""
    if profile.hostfile is None:
        raise ConfigError(
            "`lmcore launch hostfile` needs a hostfile",
            hint="give `--hostfile FILE`, with lines `HOST slots=N`",
        )
    listed = read_hostfile(profile.hostfile)
    nodes = profile.nodes or len(listed)
    if nodes > len(listed):
        raise ConfigError(
            f"`nodes` {nodes} is more than the {len(listed)} hosts of `{profile.hostfile}`",
            hint="list more hosts, or use fewer nodes",
        )
    listed = listed[:nodes]
    counts = {slots if slots is not None else 1 for _, slots in listed}
    processes = profile.processes_per_node
    if processes is None and len(counts) > 1:
        raise ConfigError(
            f"the hosts of `{profile.hostfile}` have different numbers of slots: "
            f"{', '.join(map(str, sorted(counts)))}",
            why="every node of a run has as many processes",
            hint=f"give `processes_per_node: {min(counts)}`, or other hosts",
        )
    processes = processes or next(iter(counts))
    for host, slots in listed:
        if slots is not None and processes > slots:
            raise ConfigError(
                f"`processes_per_node` {processes} is more than the {slots} slots of `{host}`",
                hint="use fewer processes, or give the host more slots",
            )
    return [host for host, _ in listed], processes


def _start(port: str, change: str) -> list[str]:
    """Return lines that start the command on all hosts, and wait for it to end on all of them.

    If it fails on a host, it gets 15 seconds to end on the others.  A signal ends the connections:
    the processes of a host are then sent SIGHUP, for which lmcore saves a checkpoint.
    """
    return [
        f"port={port}",
        "pids=()",
        'for node in "${!hosts[@]}"; do',
        '    place="PET_NODE_RANK=$node MASTER_ADDR=${hosts[0]} MASTER_PORT=$port TERM=dumb"',
        f'    "${{ssh[@]}}" "${{hosts[$node]}}" "{change}env $place $command" </dev/null &',
        '    pids+=("$!")',
        "done",
        """trap 'kill "${pids[@]}" 2>/dev/null' HUP INT TERM USR1 USR2""",
        "status=0 left=75",
        'while [ "${#pids[@]}" -gt 0 ]; do',
        "    running=()",
        '    for pid in "${pids[@]}"; do',
        '        if kill -0 "$pid" 2>/dev/null; then',
        '            running+=("$pid")',
        "        else",
        "            code=0",
        '            wait "$pid" || code=$?',
        '            if [ "$status" -eq 0 ]; then status=$code; fi',
        "        fi",
        "    done",
        '    pids=("${running[@]}")',
        '    if [ "$status" -ne 0 ]; then left=$((left - 1)); fi',
        '    if [ "$left" -eq 0 ]; then kill "${pids[@]}" 2>/dev/null; fi',
        "    sleep 0.2",
        "done",
        '(exit "$status")',
    ]


def submit(path: str, _profile: HostfileProfile) -> Iterator[list[str]]:
    """Yield the command that runs the script."""
    yield ["bash", path]
