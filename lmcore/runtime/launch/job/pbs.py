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
_COUNTS = "resubmits={} failures={}"
_TIMED_OUT = shlex.quote('"status": "[^"]* minutes have passed')
"""Status of a run that `--exit-duration-in-mins` has ended, in its summary."""
_DONE = shlex.quote('"status": "(completed|stopped early)')
"""Status of a run that is finished."""


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
    resubmits: int = option(
        100,
        "With `requeue`, number of times that the job submits itself again, at most.",
        minimum=0,
        maximum=100_000,
    )


def render(profile: PbsProfile, command: JobCommand) -> str:
    """Return the script for qsub.

    Raises:
        ConfigError: The profile contradicts itself.
    """
    _check(profile, command)
    nodes, processes = profile.nodes or 1, profile.processes_per_node or 1
    again = profile.requeue and command.run_directory is not None
    lines = ["#!/bin/bash -l", *(f"#PBS {one}" for one in _directives(profile, nodes))]
    lines += [*header("pbs", "qsub FILE"), "", "set -eo pipefail"]
    if again:
        lines += _own_text()
    if profile.directory is None:
        lines.append('cd "$PBS_O_WORKDIR"')
    lines += [*preamble(profile), ""]
    lines += [*run_lines(command, container_words(profile)), ""]
    limit = None
    if profile.wall_time is not None:
        limit = seconds_of(profile.wall_time, profile.save_seconds) - profile.save_seconds
    if limit is not None and command.is_training and not command.ends_itself:
        lines += _limit(limit)
    launcher = _MPI[profile.mpi]
    assert launcher.start is not None
    exported = ["PATH", *variables_of(profile)]
    words = [*launcher.start(nodes, processes, exported), *profile.mpi_options]
    start = f'{shlex.join(words)} "${{run[@]}}"'
    if again:
        assert limit is not None
        lines += _resubmitted(start, profile, command, limit)
    else:
        lines.append(start)
    return "\n".join(lines) + "\n"


def _check(profile: PbsProfile, command: JobCommand) -> None:
    if not profile.requeue or not command.is_training:
        return
    if profile.wall_time is None:
        raise ConfigError(
            "`requeue` needs `wall_time`",
            why="the job ends before its time does, and submits itself again",
            hint="give the time of the job, such as `wall_time: 04:00:00`",
        )
    if command.run_directory is None:
        raise ConfigError(
            "`requeue` needs a run directory",
            why="the job reads there whether the run is finished",
            hint="give `--save DIR` among the arguments of `lmcore train`",
        )


def _limit(seconds: int) -> Iterator[str]:
    """Yield lines that limit the run to the time left, in minutes with decimals."""
    yield "# The run saves and ends before the wall time; lines above may have taken a while."
    yield f"left=$(({seconds} - SECONDS))"
    yield 'if [ "$left" -lt 1 ]; then left=1; fi'
    yield 'printf -v minutes "%d.%03d" $((left / 60)) $((left % 60 * 1000 / 60))'
    yield 'run+=(--exit-duration-in-mins "$minutes")'
    yield ""


def _own_text() -> Iterator[str]:
    """Yield lines that read the script, which PBS runs from a copy, to submit it again."""
    yield "# Jobs that submitted this one, and those that failed; the next job gets other numbers."
    yield _COUNTS.format(0, 0)
    yield 'script=$(cat -- "$0" 2>/dev/null) || script='
    yield 'if [[ $script != *"# Written by"*"lmcore launch pbs"* ]]; then'
    yield '    echo "the job cannot read its script, $0, to submit it again" >&2'
    yield "    exit 1"
    yield "fi"


def _resubmitted(start: str, profile: PbsProfile, command: JobCommand, limit: int) -> Iterator[str]:
    """Yield lines that run the job's command, and submit the script again if it is unfinished.

    It is unfinished if it ended by the time limit, was killed at the wall time, or failed fewer
    times than `restarts`.  A job that saves no checkpoint before the wall time ends the chain.
    """
    summary = shlex.quote(f"{command.run_directory}/summary.json")
    yield "newest() {"
    yield "    local checkpoint found="
    yield f"    for checkpoint in {command.checkpoints}; do"
    yield '        if [ -d "$checkpoint" ]; then found=$checkpoint; fi'
    yield "    done"
    yield '    echo "$found"'
    yield "}"
    yield "before=$(newest)"
    yield 'counts="resubmits=$resubmits failures=$failures"'
    yield "# PBS sends SIGTERM to all processes at the wall time, and for `qdel`; then SIGKILL."
    yield "ended=0"
    yield "trap 'ended=1' TERM"
    yield f"{start} &"
    yield "step=$! status=0"
    yield 'wait "$step" || status=$?'
    yield "for _ in 1 2 3 4 5; do"
    yield '    if [ "$ended" -eq 0 ] || ! kill -0 "$step" 2>/dev/null; then break; fi'
    yield "    sleep 1"
    yield "done"
    yield "again=0"
    yield 'if [ "$ended" -eq 1 ]; then'
    yield "    # `qdel` before the last seconds ends the job for good."
    yield f'    if [ "$SECONDS" -ge {limit} ] && ! grep -Eqs {_DONE} {summary}; then again=1; fi'
    yield f'elif [ "$status" -eq 0 ] && grep -Eqs {_TIMED_OUT} {summary}; then'
    yield "    again=1"
    yield "fi"
    yield 'if [ "$again" -eq 1 ] && [ "$before" = "$(newest)" ]; then'
    yield '    echo "the job saved no checkpoint in its time: it is not submitted again" >&2'
    yield "    again=0"
    yield 'elif [ "$ended$again" = 00 ] && [ "$status" -ne 0 ]; then'
    yield f'    if [ "$failures" -lt {profile.restarts} ]; then again=1; fi'
    yield "    failures=$((failures + 1))"
    yield "fi"
    yield f'if [ "$again" -eq 1 ] && [ "$resubmits" -ge {profile.resubmits} ]; then'
    yield f'    echo "the job was submitted again {profile.resubmits} times, not once more" >&2'
    yield "    again=0"
    yield "fi"
    yield 'if [ "$again" -eq 1 ]; then'
    yield '    next="resubmits=$((resubmits + 1)) failures=$failures"'
    yield '    (cd "$PBS_O_WORKDIR" &&'
    yield '        qsub -W "depend=afterany:$PBS_JOBID" <<<"${script/"$counts"/"$next"}")'
    yield "fi"
    yield 'exit "$status"'


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

    With `requeue` the job submits itself.  Otherwise a later job continues the run, or ends at
    once if the run is finished.  `PREVIOUS` is replaced by the identifier that the command before
    printed.
    """
    yield ["qsub", path]
    if profile.requeue:  # the job submits itself
        return
    for _ in range(profile.restarts):
        yield ["qsub", "-W", f"depend=afterany:{_PREVIOUS}", path]
