"""Profile of a cluster: a short YAML file, whose keys are also flags of `lmcore launch`.

Each kind of job has a section of keys; `read_profile` merges a file and flags into it. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lmcore.base.errors import ConfigError, LmcoreError, suggestion
from lmcore.base.missing_path import missing_path_hint
from lmcore.config.file.yaml_file import Entry, read_file
from lmcore.config.option import INPUT_PATH, Option, option, options_of, refuse_unexpanded
from lmcore.config.preset import PRESET_OPTION
from lmcore.config.section import SECTION_NAMES

__all__ = [
    "BatchProfile",
    "ContainerProfile",
    "JobProfile",
    "one_line",
    "read_profile",
    "seconds_of",
    "variables_of",
]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WALL_TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,4}):([0-5]\d):([0-5]\d)", re.ASCII)
_MAPPINGS = ("env",)
"""Keys whose value may be a mapping of names to texts."""


@dataclass(frozen=True, kw_only=True)
class JobProfile:
    """Keys that every kind of job has."""

    job_name: str = option("lmcore", "Name of the job.", metavar="NAME")
    nodes: int | None = option(1, "Number of nodes.", minimum=1, maximum=100_000)
    processes_per_node: int | None = option(
        1, "Processes of the run on each node.", minimum=1, maximum=4096
    )
    before: tuple[str, ...] = option(
        (), "Lines of shell that precede the command, such as `source venv/bin/activate`."
    )
    env: tuple[str, ...] = option(
        (),
        "Environment variables, quoted exactly: NAME=VALUE, or in a file a mapping.",
        metavar="NAME=VALUE",
    )
    master_port: int | None = option(
        None,
        "Port of the rendezvous on the first node; default: derived from the job.",
        minimum=1,
        maximum=65535,
    )
    interface: str | None = option(
        None, "Network interface for gloo's connections, such as eth0.", metavar="NAME"
    )
    restarts: int = option(
        0,
        "Number of times that the job is started again after a failure, to continue the run.",
        minimum=0,
        maximum=1000,
    )


@dataclass(frozen=True, kw_only=True)
class ContainerProfile(JobProfile):
    """Keys of jobs that run on hosts with a shell and modules."""

    modules: tuple[str, ...] = option((), "Environment modules to load.", metavar="MODULE")
    directory: str | None = option(
        None, "Working directory; default: where the job is submitted.", metavar="PATH"
    )
    container: str | None = option(
        None, "Image in which the command runs; default: none.", metavar="IMAGE"
    )
    mounts: tuple[str, ...] = option(
        (), "Paths to mount in the container.", metavar="HOST:CONTAINER"
    )


@dataclass(frozen=True, kw_only=True)
class BatchProfile(ContainerProfile):
    """Keys of jobs of a batch system."""

    account: str | None = option(None, "Account, or project.", metavar="NAME")
    queue: str | None = option(None, "Queue, or partition.", metavar="NAME")
    wall_time: str | None = option(None, "Longest time of the job.", metavar="[D-]HH:MM:SS")
    save_seconds: int = option(
        120,
        "Seconds before the wall time at which the run saves a checkpoint and ends.",
        minimum=1,
        maximum=86_400,
    )
    requeue: bool = option(
        False, "Start the job again, to continue the run, after the wall time or a preemption."
    )
    directives: tuple[str, ...] = option(
        (), "Further options of the batch system, each on a line.", metavar="OPTION"
    )


Section = TypeVar("Section", bound=JobProfile)


def read_profile(
    section: type[Section], path: str | None, flags: Mapping[str, Any], kind: str
) -> Section:
    """Return the profile in a file, with the values of flags in place of the file's.

    Args:
        section: Keys of this kind of job.
        path: YAML file; None: flags alone.
        flags: Values of flags by key.
        kind: Kind of job, for messages.

    Raises:
        ConfigError: Every wrong line of the file, at once; or values that contradict each other.
    """
    options = {one.name: one for one in options_of(section)}
    problems: list[LmcoreError] = []
    values: dict[str, Any] = {}
    if path is not None and not Path(path).is_file():
        hint = missing_path_hint(path, "check the path of `--profile`")
        raise ConfigError(f"there is no profile `{path}`", hint=hint)
    entries = [] if path is None else read_file(path, problems).entries
    if path is not None:
        _refuse_settings(entries, options, path, kind)
    for entry in entries:
        try:
            _take(entry, options, values, path or "", kind)
        except ConfigError as problem:
            problems.append(problem)
    if problems:
        raise ConfigError.collect(problems)
    profile = section(**{**values, **flags})
    variables_of(profile)
    _check_container(profile)
    return profile


def _refuse_settings(
    entries: Sequence[Entry], options: Mapping[str, Option], path: str, kind: str
) -> None:
    """Refuse a file with sections of a run's settings, or a preset, and no key of a profile.

    Raises:
        ConfigError: The file is such a one.
    """
    keys = {entry.section or entry.key.replace("-", "_") for entry in entries}
    settings = [name for name in (PRESET_OPTION.name, *SECTION_NAMES) if name in keys]
    if settings and not keys & options.keys():
        raise ConfigError(
            f"`{path}` is not a profile",
            why=f"`{settings[0]}` belongs to a file of a run's settings; a profile "
            "describes a cluster",
            hint="a file of a run's settings follows the flags, without `--profile`: "
            f"`lmcore launch {kind} ... train {path}`",
        )


def _take(
    entry: Entry, options: Mapping[str, Option], values: dict[str, Any], path: str, kind: str
) -> None:
    """Add an entry of the file at *path* to *values*; paths to read are relative to the file."""
    where = f"{path}:{entry.line}"
    if entry.section:
        if entry.section not in _MAPPINGS and not entry.key:  # once for the section
            hint = "a profile's keys are at the top level; only `env` is a mapping"
            if entry.section in SECTION_NAMES:
                hint = "move it into a file of a run's settings, which follows the flags"
            raise ConfigError(f"{where}: `{entry.section}` has no keys in a profile", hint=hint)
        if entry.section not in _MAPPINGS:
            return
        if entry.key:
            text = "" if entry.value is None else entry.value
            values["env"] = (*values.get("env", ()), f"{entry.key}={text}")
        return
    name = entry.key.replace("-", "_")
    if name not in options:
        raise ConfigError(
            f"{where}: unknown key `{entry.key}`",
            why=f"a profile for `lmcore launch {kind}` has no such key",
            hint=suggestion(entry.key, options),
        )
    shown = entry.value if isinstance(entry.value, str) else ""
    value = options[name].convert(entry.value, where=f"{where}: `{entry.key}: {shown}`")
    if options[name].paths == INPUT_PATH and value is not None:
        value = str(Path(path).parent / value)
    values[name] = value


def _check_container(profile: JobProfile) -> None:
    mounts, image = getattr(profile, "mounts", ()), getattr(profile, "container", None)
    for name in ("directory", "container"):
        if path := getattr(profile, name, None):
            refuse_unexpanded(path, f"`{name}: {path}`")
    for mount in mounts:
        refuse_unexpanded(mount, f"`mounts`: `{mount}`")
        parts = mount.split(":")
        if len(parts) not in {2, 3} or not all(parts) or not parts[1].startswith("/"):
            raise ConfigError(
                f"`mounts`: `{mount}` is not SOURCE:/PATH",
                hint="write the path on the host, a colon, and the absolute path in the container",
            )
    if mounts and image is None:
        raise ConfigError(
            "the profile has `mounts` and no `container`",
            why="paths are mounted in a container",
            hint="give the image as `container`, or remove `mounts`",
        )


def variables_of(profile: JobProfile) -> dict[str, str]:
    """Return the environment variables of a job: the profile's, and for its rendezvous.

    Raises:
        ConfigError: A text is not NAME=VALUE.
    """
    found: dict[str, str] = {}
    if profile.interface is not None:
        found["GLOO_SOCKET_IFNAME"] = profile.interface
    if profile.master_port is not None:
        found["MASTER_PORT"] = str(profile.master_port)
    for text in profile.env:
        name, equals, value = text.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise ConfigError(
                f"`env`: `{text}` is not NAME=VALUE",
                hint="a name has letters, digits and underscores",
            )
        found[name] = value
    return found


def seconds_of(wall_time: str, save_seconds: int) -> int:
    """Return a wall time in seconds.

    Raises:
        ConfigError: It is malformed, or has no time left before the save.
    """
    found = _WALL_TIME.fullmatch(wall_time)
    if found is None:
        raise ConfigError(
            f"`wall_time`: `{wall_time}` is not [D-]HH:MM:SS", hint="such as 04:00:00 or 2-00:00:00"
        )
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total <= save_seconds:
        raise ConfigError(
            f"`wall_time` {wall_time} is not longer than `save_seconds` {save_seconds}",
            why="the run would save and end at once",
            hint="give a longer wall time, or fewer seconds to save",
        )
    return total


def one_line(texts: Sequence[str], key: str) -> None:
    """Refuse texts with control characters, such as a line break, which would end a directive.

    Raises:
        ConfigError: A text has one.
    """
    for text in texts:
        if not text.isprintable():
            raise ConfigError(f"`{key}`: {text!r} is not one printable line")
