"""Slurm: an sbatch script whose `srun` starts one task for each process."""

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
from lmcore.runtime.launch.job.profile import (
    BatchProfile,
    one_line,
    seconds_of,
    variables_of,
)
from lmcore.runtime.launch.launchers import LAUNCHERS

__all__ = ["SlurmProfile", "render", "submit"]

_RESOURCE = "gpu"
"""Usual name of the devices, of any vendor."""
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.,:/=@%+[]")


@dataclass(frozen=True, kw_only=True)
class SlurmProfile(BatchProfile):
    """Keys of a profile for Slurm."""

    partition: str | None = option(None, "Partition.", metavar="NAME")
    qos: str | None = option(None, "Quality of service.", metavar="NAME")
    devices_per_node: int | None = option(
        None, "Devices to request on each node (`--gres`).", minimum=1, maximum=1024
    )
    device_resource: str | None = option(
        None,
        "Name of the devices among Slurm's generic resources; default: as the device's plugin "
        "names it, or gpu.",
        metavar="NAME",
    )
    cpus_per_process: int | None = option(
        None, "CPU cores of each process.", minimum=1, maximum=4096
    )
    container_runtime: str = option(
        "apptainer",
        "Program that runs the container: apptainer, or the pyxis plugin of srun.",
        choices=("apptainer", "pyxis"),
    )
    srun_options: tuple[str, ...] = option(
        (), "Further options of srun, such as --cpu-bind=cores.", metavar="OPTION"
    )


def render(profile: SlurmProfile, command: JobCommand) -> str:
    """Return the sbatch script.

    Raises:
        ConfigError: The profile contradicts itself.
    """
    _check(profile)
    shell = "#!/bin/bash -l" if profile.modules else "#!/bin/bash"
    lines = [
        shell,
        *(f"#SBATCH {one}" for one in _directives(profile)),
        *header("slurm", "sbatch FILE"),
        "",
        "set -eo pipefail",
        *preamble(profile),
        "",
    ]
    pyxis = _uses_pyxis(profile)
    if pyxis:
        lines += _secret(profile)
    lines += run_lines(command, [] if pyxis else container_words(profile))
    lines += ["", *_step(profile)]
    return "\n".join(lines) + "\n"


def _uses_pyxis(profile: SlurmProfile) -> bool:
    return profile.container is not None and profile.container_runtime == "pyxis"


def _secret(profile: SlurmProfile) -> Iterator[str]:
    """Yield the lines that give several processes one secret, unless the profile does."""
    several = (profile.nodes or 1) * (profile.processes_per_node or 1) > 1
    if several and not {"LMCORE_SECRET", "LMCORE_SECRET_FILE"} & variables_of(profile).keys():
        yield "# The home directory, with the secret that processes share, may not be in the image."
        random = "od -An -N32 -tx1 /dev/urandom | tr -d ' \\n'"
        yield f'export LMCORE_SECRET="${{LMCORE_SECRET:-$({random})}}"'
        yield ""


def _check(profile: SlurmProfile) -> None:
    devices, processes = profile.devices_per_node, profile.processes_per_node or 1
    if devices is not None and processes > devices:
        raise ConfigError(
            f"`processes_per_node` {processes} is more than `devices_per_node` {devices}",
            why="each process uses a device",
            hint="request as many devices as processes",
        )
    if profile.queue is not None and profile.partition is not None:
        raise ConfigError(
            "the profile has `queue` and `partition`",
            why="Slurm's queues are its partitions",
            hint="keep `partition`",
        )
    if profile.requeue and profile.wall_time is None:
        raise ConfigError(
            "`requeue` needs `wall_time`",
            why="Slurm signals the job before its time ends",
            hint="give the time of the job, such as `wall_time: 04:00:00`",
        )


def _directives(profile: SlurmProfile) -> Iterator[str]:
    values = {
        "--job-name": profile.job_name,
        "--nodes": profile.nodes,
        "--ntasks-per-node": profile.processes_per_node,
        "--partition": profile.partition or profile.queue,
        "--account": profile.account,
        "--qos": profile.qos,
        "--cpus-per-task": profile.cpus_per_process,
        "--time": profile.wall_time,
        "--chdir": profile.directory,
    }
    if profile.devices_per_node is not None:
        values["--gres"] = f"{profile.device_resource or _RESOURCE}:{profile.devices_per_node}"
    for name, value in values.items():
        if value is not None:
            yield f"{name}={_quoted(str(value), name)}"
    if profile.wall_time is not None:
        seconds_of(profile.wall_time, profile.save_seconds)
        yield f"--signal=B:USR1@{profile.save_seconds}"
    again = profile.requeue or profile.restarts
    yield "--requeue" if again else "--no-requeue"
    if again:
        yield "--open-mode=append"
    one_line(profile.directives, "directives")
    yield from profile.directives


def _quoted(text: str, name: str) -> str:
    """Return a value as Slurm reads it in an `#SBATCH` line."""
    one_line([text], name)
    if set(text) <= _SAFE:
        return text
    if '"' in text or "\\" in text:
        raise ConfigError(
            f"`{name}`: Slurm reads no quotes and backslashes in `{text}`",
            hint="choose another name",
        )
    return f'"{text}"'


def _step(profile: SlurmProfile) -> Iterator[str]:
    """Yield the lines that run the step, let it save before the wall time, and requeue the job."""
    nodes, processes = profile.nodes or 1, profile.processes_per_node or 1
    launcher = next(one for one in LAUNCHERS if one.word == "srun")
    assert launcher.start is not None
    words = [*launcher.start(nodes, processes, ()), *profile.srun_options]
    if profile.cpus_per_process is not None:
        words.append(f"--cpus-per-task={profile.cpus_per_process}")
    if _uses_pyxis(profile):
        words.append(f"--container-image={profile.container}")
        if profile.mounts:
            words.append(f"--container-mounts={','.join(profile.mounts)}")
    srun = shlex.join(words)
    own = any(one.startswith("--container-workdir") for one in profile.srun_options)
    if _uses_pyxis(profile) and not own:
        srun += ' "--container-workdir=$PWD"'  # otherwise pyxis takes the image's directory
    if profile.wall_time is None and not profile.restarts:
        yield f'{srun} "${{run[@]}}"'
        return
    yield "# Slurm signals this script before the wall time; lmcore saves when it is signalled."
    yield "stopped=0 signalled=0"
    yield 'save() { stopped=1 signalled=1; scancel --signal=USR1 "$SLURM_JOB_ID"; }'
    yield "trap save USR1"
    yield f'{srun} "${{run[@]}}" &'
    yield "step=$!"
    yield "while true; do"
    yield "    signalled=0 status=0"
    yield '    wait "$step" || status=$?'
    yield '    if [ "$signalled" -eq 0 ]; then break; fi'
    yield "done"
    conditions = ['[ "$stopped" -eq 1 ]'] if profile.requeue else []
    if profile.restarts:
        count = f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {profile.restarts} ]'
        conditions.append(f'{{ [ "$status" -ne 0 ] && {count}; }}')
    if conditions:
        yield f"if {' || '.join(conditions)}; then"
        yield '    scontrol requeue "$SLURM_JOB_ID"'
        yield "fi"
    yield 'exit "$status"'


def submit(path: str, _profile: SlurmProfile) -> Iterator[list[str]]:
    """Yield the command that submits the script."""
    yield ["sbatch", path]
