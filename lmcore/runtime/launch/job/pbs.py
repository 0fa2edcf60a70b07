"""PBS: a script whose `mpiexec` starts the processes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
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
from lmcore.runtime.launch.job.profile import BatchProfile, one_line, seconds_of, variables_of
from lmcore.runtime.launch.launchers import LAUNCHERS

__all__ = ["PbsProfile", "render", "submit"]

_MPI = {one.word: one for one in LAUNCHERS if one.word in {"pals", "mpich", "openmpi"}}
_PREVIOUS = "PREVIOUS"


@dataclass(frozen=True, kw_only=True)
class PbsProfile(BatchProfile):
    """Keys of a profile for PBS."""

    mpi: str = option("pals", "Launcher that `mpiexec` belongs to.", choices=tuple(sorted(_MPI)))
    mpi_options: tuple[str, ...] = option(
        (), "Further options of mpiexec, such as --cpu-bind=depth.", metavar="OPTION"
    )
    chunk: str | None = option(
        None, "Resources of each node, as in `select=N:CHUNK`.", metavar="CHUNK"
    )
    filesystems: tuple[str, ...] = option((), "File systems of the job.", metavar="NAME")


def render(profile: PbsProfile, command: JobCommand) -> str:
    """Return the script for qsub.

    Raises:
        ConfigError: The profile contradicts itself.
    """
    nodes, processes = profile.nodes or 1, profile.processes_per_node or 1
    lines = ["#!/bin/bash -l", *(f"#PBS {one}" for one in _directives(profile, nodes))]
    lines += [*header("pbs", "qsub FILE"), "", "set -eo pipefail"]
    if profile.directory is None:
        lines.append('cd "$PBS_O_WORKDIR"')
    lines += [*preamble(profile), ""]
    more = []
    if profile.wall_time is not None and command.is_training and not command.ends_itself:
        seconds = seconds_of(profile.wall_time, profile.save_seconds) - profile.save_seconds
        more = ["--exit-duration-in-mins", str(max(1, seconds // 60))]
    lines += [*run_lines(command, container_words(profile), more), ""]
    launcher = _MPI[profile.mpi]
    assert launcher.start is not None
    exported = ["PATH", *variables_of(profile)]
    words = [*launcher.start(nodes, processes, exported), *profile.mpi_options]
    lines.append(f'{shlex.join(words)} "${{run[@]}}"')
    return "\n".join(lines) + "\n"


def _directives(profile: PbsProfile, nodes: int) -> Iterator[str]:
    named = {
        "-N": profile.job_name,
        "-A": profile.account,
        "-q": profile.queue,
        "select": profile.chunk,
        "-l filesystems": ":".join(profile.filesystems),
    }
    for name, value in named.items():
        if value is not None and (" " in value or not value.isprintable()):
            raise ConfigError(
                f"PBS reads no spaces in `{name} {value}`", hint="choose a value without spaces"
            )
    chunk = f":{profile.chunk}" if profile.chunk else ""
    yield f"-N {profile.job_name}"
    yield from (f"{name} {named[name]}" for name in ("-A", "-q") if named[name])
    yield f"-l select={nodes}{chunk}"
    if nodes > 1:
        yield "-l place=scatter"
    if profile.wall_time is not None:
        total = seconds_of(profile.wall_time, profile.save_seconds)
        yield f"-l walltime={total // 3600:02d}:{total // 60 % 60:02d}:{total % 60:02d}"
    if profile.filesystems:
        yield f"-l filesystems={':'.join(profile.filesystems)}"
    yield f"-r {'y' if profile.requeue else 'n'}"
    yield "-j oe"
    one_line(profile.directives, "directives")
    yield from profile.directives


def submit(path: str, profile: PbsProfile) -> Iterator[list[str]]:
    """Yield the commands that submit the script: once, and for each restart after the job before.

    A later job continues the run, or ends at once if the run is finished.  `PREVIOUS` is
    replaced by the identifier that the command before printed.
    """
    yield ["qsub", path]
    for _ in range(profile.restarts):
        yield ["qsub", "-W", f"depend=afterany:{_PREVIOUS}", path]
