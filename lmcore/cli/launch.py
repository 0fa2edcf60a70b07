"""`lmcore launch`: scripts and manifests that start a command on a host, hosts or a cluster."""

from __future__ import annotations

import logging
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmcore.base.durable import write_atomically
from lmcore.base.errors import AbsentFileError, ConfigError, LmcoreError, RunError
from lmcore.cli.commands import known_commands, known_inner
from lmcore.cli.group import run_group
from lmcore.cli.selection import find_plugins
from lmcore.config.foreign.megatron_flags import train_flags
from lmcore.config.load import load_config
from lmcore.config.option import INPUT_PATH, OUTPUT_PATH, Option, option, options_of
from lmcore.config.options.command_line import parse_flags, render_help, wants_help
from lmcore.config.section import AcceleratorSection, run_options
from lmcore.config.settings import LoadedConfig
from lmcore.config.validate import problems_of
from lmcore.plugin.registrations import plugin_sections
from lmcore.runtime.launch.job.command import JobCommand
from lmcore.runtime.launch.job.kinds import JOBS, JobKind
from lmcore.runtime.launch.job.profile import JobProfile, read_profile
from lmcore.train.resume.foreign import ForeignModels, not_a_run
from lmcore.train.resume.saved_run import read_saved_settings

__all__ = ["LaunchSection", "hostfile", "k8s", "local", "pbs", "run", "slurm", "split_launch"]

logger = logging.getLogger(__name__)

_USAGE = "[--flags] [COMMAND] [arguments of the command]"
_EPILOG = """\
Flags of lmcore launch precede the command; `--` may separate them. COMMAND is a command of lmcore;
without one the words are arguments of `lmcore train`. Keys of the profile are the flags above, with
underscores: `wall_time: 04:00:00`. A flag overrides the profile; a flag with several values is
repeated.

  lmcore launch {kind} --profile cluster.yaml train run.yaml --save runs/a
  lmcore launch {kind} --profile cluster.yaml --output job{suffix} run.yaml --save runs/a
  lmcore launch {kind} --profile cluster.yaml --submit run.yaml --save runs/a"""
_MODULES = frozenset({"lmcore", "lmcore.cli.main"})
"""Modules that `python -m` runs as lmcore."""
_SEVERAL = frozenset({"train", "run", "evaluate"})
"""Commands that several processes may share."""
_ON_NODES = frozenset({"train", "run"})
"""Commands that start the processes of a node, where the job starts one process for each node."""
_OF_NODES = frozenset({"hostfile", "k8s"})
"""Kinds of jobs that start one process for each node."""
_MARK = "# Written by `lmcore launch"
_MAX_MARK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class LaunchSection:
    """Options of the command itself."""

    profile: str | None = option(
        None, "YAML file that describes the cluster.", metavar="FILE", paths=INPUT_PATH
    )
    output: str | None = option(
        None,
        "File for the script or manifest; default: the standard output, or with --submit a file "
        "with the name of the job.",
        metavar="FILE",
        paths=OUTPUT_PATH,
    )
    submit: bool = option(False, "Submit the job, or start it.")
    dry_run: bool = option(False, "With --submit, only print what would be run.")


def run(argv: list[str]) -> int:
    """Run `lmcore launch ...` and return the exit status."""
    return run_group("launch", argv)


def local(argv: list[str]) -> int:
    """Run `lmcore launch local` and return the exit status."""
    return _launch("local", argv)


def hostfile(argv: list[str]) -> int:
    """Run `lmcore launch hostfile` and return the exit status."""
    return _launch("hostfile", argv)


def slurm(argv: list[str]) -> int:
    """Run `lmcore launch slurm` and return the exit status."""
    return _launch("slurm", argv)


def k8s(argv: list[str]) -> int:
    """Run `lmcore launch k8s` and return the exit status."""
    return _launch("k8s", argv)


def pbs(argv: list[str]) -> int:
    """Run `lmcore launch pbs` and return the exit status."""
    return _launch("pbs", argv)


def split_launch(kind: str, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags of `lmcore launch`, each with one value, and the words of the command."""
    options = _options(kind).values()
    switches = {flag for one in options if one.type is bool for flag in one.flags}
    passed_on = {flag for one in options if one.metavar == "OPTION" for flag in one.flags}
    flags: list[str] = []
    index = 0
    while index < len(argv) and argv[index].startswith("-") and argv[index] != "--":
        name = argv[index].partition("=")[0].replace("_", "-")
        alone = name in switches or name in {"-h", "--help"} or "=" in argv[index]
        given = argv[index : index + (1 if alone else 2)]
        index += len(given)
        if len(given) == 2 and name in passed_on:  # its value may look like a flag
            given = [f"{name}={given[1]}"]
        flags += given
    rest = list(argv[index:])
    return flags, rest[1:] if rest[:1] == ["--"] else rest


def _options(kind: str) -> dict[str, Option]:
    sections = (LaunchSection, JOBS[kind].section)
    return {one.name: one for section in sections for one in options_of(section)}


def _launch(name: str, argv: list[str]) -> int:
    """Render the job; write, print or submit it."""
    kind = JOBS[name]
    flags, words = split_launch(name, argv)
    if wants_help(flags):
        print(_help(kind))
        return 0
    parsed = parse_flags(flags, _options(name))
    if parsed.problems:
        raise _flag_error(parsed.problems)
    for notice in parsed.notices:
        logger.info("%s", notice)
    own = {one.name for one in options_of(LaunchSection)}
    chosen = LaunchSection(**{key: parsed.values[key] for key in own & parsed.values.keys()})
    keys = {key: value for key, value in parsed.values.items() if key not in own}
    profile = read_profile(kind.section, chosen.profile, keys, name)
    command = _command(words, profile, name)
    profile = _with_resource(profile, command, name)
    text = kind.render(profile, command)
    output = chosen.output
    if output is None and chosen.submit:
        output = f"{profile.job_name}{kind.suffix}"
    if output is None or chosen.dry_run:
        sys.stdout.write(text)
    else:
        _write(Path(output), text)
        if not chosen.submit:
            print(f"wrote {output}; submit it by: {_shown(kind, output, profile)}")
    if not chosen.submit:
        return 0
    assert output is not None
    if chosen.dry_run:
        print(f"# would be written to {output}, then: {_shown(kind, output, profile)}")
        return 0
    return _submit(kind, output, profile)


def _flag_error(problems: Sequence[LmcoreError]) -> ConfigError:
    """Return the error for wrong flags; one of `lmcore train` follows the word `train`."""
    known = {flag for one in run_options().values() for flag in one.flags}
    meant = [one.what for one in problems if one.what.rpartition(" ")[2].strip("`") in known]
    if not meant:
        return ConfigError.collect(problems)
    first = ", ".join(what.removeprefix("unknown flag ") for what in meant[:3])
    return ConfigError(
        f"flags of `lmcore train` without its name: {first}{', ...' * (len(meant) > 3)}",
        why="flags before the command are for `lmcore launch`",
        hint="write `lmcore launch ... train FLAGS`",
    )


def _help(kind: JobKind) -> str:
    summary = known_inner("launch")[kind.name].summary
    groups = [
        ("options", "", options_of(LaunchSection)),
        ("profile", "", options_of(kind.section)),
    ]
    return render_help(
        f"lmcore launch {kind.name}",
        summary,
        groups,
        usage=_USAGE,
        positionals=[("COMMAND", "Command of lmcore, and its arguments; default: `train`.")],
        epilog=_EPILOG.format(kind=kind.name, suffix=kind.suffix),
    )


def _command(words: Sequence[str], profile: JobProfile, kind: str) -> JobCommand:
    """Return the command of the job, after its settings have been checked.

    Raises:
        ConfigError: There is no command, it takes one process only, or a setting is wrong.
    """
    if not words:
        raise ConfigError(
            "the command to launch is missing",
            hint="give a file of settings or options of `lmcore train`, or another command of "
            "lmcore with its arguments, after the flags of `lmcore launch`",
        )
    if program := _program(words):
        own = words[len(program) :]
        raise ConfigError(
            f"the command to launch begins with `{shlex.join(program)}`",
            why="the job starts a command of lmcore, given without the word `lmcore`",
            hint=f"write `lmcore launch {kind} ... {shlex.join(own) or 'train ...'}`",
        )
    name = words[0] if words[0] in known_commands() and words[0] != "launch" else "train"
    given = tuple(words) if words[0] == name else ("train", *words)
    several = profile.nodes != 1 or (profile.processes_per_node or 1) > 1
    if several and name not in (_ON_NODES if kind in _OF_NODES else _SEVERAL):
        raise ConfigError(
            f"`lmcore launch {kind}` starts `lmcore {name}` in one process only",
            why=f"the profile has {profile.nodes or 'all'} nodes with "
            f"{profile.processes_per_node or 'all'} processes",
            hint="give `--nodes 1 --processes-per-node 1`",
        )
    if name != "train":
        device = {one.name: one for one in options_of(AcceleratorSection) if one.name == "device"}
        return JobCommand(given, device=parse_flags(given[1:], device).values.get("device"))
    _refuse_late_flags(given, kind)
    return _training(given, profile, is_here=kind == "local")


def _program(words: Sequence[str]) -> Sequence[str]:
    """Return the first words up to lmcore itself, as in `python -m lmcore train`; else none.

    The path of the program further on may be a value, unless one of its commands follows.
    """
    commands = known_commands()
    if words[0] in commands or words[0].startswith("-"):
        return ()
    for index, word in enumerate(words):
        is_module = word in _MODULES and index > 0 and words[index - 1] == "-m"
        is_command = index == 0 or (index + 1 < len(words) and words[index + 1] in commands)
        if is_module or (is_command and Path(word).name == "lmcore"):
            return words[: index + 1]
    return ()


def _refuse_late_flags(words: Sequence[str], kind: str) -> None:
    """Refuse flags of `lmcore launch` among the arguments of `lmcore train`.

    Raises:
        ConfigError: There is one that `lmcore train` does not have.
    """
    own = {flag for one in _options(kind).values() for flag in one.flags}
    own -= {flag for one in run_options().values() for flag in one.flags} | {*train_flags()}
    names = [word.partition("=")[0].replace("_", "-") for word in words]
    late = list(dict.fromkeys(name for name in names if name in own))
    if late:
        raise ConfigError(
            f"flags of `lmcore launch {kind}` after the command: {', '.join(late)}",
            why="flags after the command are for `lmcore train`",
            hint=f"write `lmcore launch {kind} {' '.join(late)} ... train ...`",
        )


def _training(words: tuple[str, ...], profile: JobProfile, *, is_here: bool) -> JobCommand:
    """Return the command of a training run; other hosts may have files that this one lacks."""
    arguments = list(words[1:])
    plugins = plugin_sections(find_plugins(arguments, probe=False))
    size = None
    if profile.nodes is not None and profile.processes_per_node is not None:
        size = profile.nodes * profile.processes_per_node

    def hint(multiple: int) -> str:
        return _processes_hint(multiple, profile)

    def check(loaded: LoadedConfig) -> list[LmcoreError]:
        found = problems_of(loaded, world_size=size, processes_hint=hint)
        return [one for one in found if is_here or not isinstance(one, AbsentFileError)]

    foreign = ForeignModels()
    loaded = load_config(
        arguments,
        plugins=plugins,
        saved_settings=read_saved_settings,
        foreign_settings=foreign.settings,
        foreign_run=not_a_run,
        check=check,
    )
    if problems := check(loaded):
        raise ConfigError.collect(problems)
    for problem in problems_of(loaded, world_size=size, processes_hint=hint):
        logger.warning("%s on this host; the job needs it where it runs", problem.what)
    settings = loaded.config.checkpoint
    again = bool(profile.restarts or getattr(profile, "requeue", False))
    continued = any(word.partition("=")[0] == "--continue" for word in arguments)
    if again and settings.save is None and not continued:
        raise ConfigError(
            "a job that is started again needs a run directory",
            why="`requeue` and `restarts` continue the run from its checkpoints",
            hint="give `--save DIR` among the arguments of `lmcore train`",
        )
    same = _same(settings.save, settings.load) or continued
    return JobCommand(
        words,
        settings.save if again else None,
        continues=same,
        ends_itself=loaded.provenance["exit_duration_in_mins"].kind != "default",
        device=loaded.config.accelerator.device,
    )


def _processes_hint(multiple: int, profile: JobProfile) -> str:
    """Return the numbers of processes on each node that make a multiple over all nodes."""
    assert profile.nodes is not None
    assert profile.processes_per_node is not None
    step = multiple // math.gcd(multiple, profile.nodes)
    lower = profile.processes_per_node // step * step
    numbers = " or ".join(f"`--processes-per-node {n}`" for n in (lower, lower + step) if n)
    nodes = ", other `--nodes`" if profile.nodes > 1 else ""
    return f"use {numbers} before the command{nodes}"


def _with_resource(profile: Any, command: JobCommand, kind: str) -> Any:
    """Return the profile with the name of its devices, from the plugin of the command's device.

    No device is looked for: a job runs on other hosts.

    Raises:
        ConfigError: Plugins of several devices give different names.
    """
    if getattr(profile, "devices_per_node", None) is None or profile.device_resource is not None:
        return profile
    names: dict[str, list[str]] = {}
    for record in find_plugins(command.words[1:], probe=False).usable:
        assert record.info is not None
        name = record.info.device_resources.get(kind)
        if name is not None and command.device in {None, record.name, *record.info.provides}:
            names.setdefault(name, []).append(record.name)
    if len(names) > 1:
        listed = "; ".join(f"`{name}` by `{'`, `'.join(owners)}`" for name, owners in names.items())
        raise ConfigError(
            "the profile has `devices_per_node` and no `device_resource`",
            why=f"installed plugins have several names for the devices of a node: {listed}",
            hint="add `device_resource` to the profile, or choose by `--device TYPE` after the "
            "command",
        )
    for name, owners in names.items():
        logger.info("devices are requested as `%s`, as plugin `%s` names them", name, owners[0])
        return replace(profile, device_resource=name)
    return profile


def _same(save: str | None, load: str | None) -> bool:
    return save is not None and load is not None and os.path.abspath(save) == os.path.abspath(load)  # noqa: PTH100


def _write(path: Path, text: str) -> None:
    """Write the file, over an earlier one of this command only.

    Raises:
        ConfigError: Another file is there.
    """
    if path.exists():
        with path.open("rb") as stream:
            known = _MARK.encode() in stream.read(_MAX_MARK_BYTES)
        if not known:
            raise ConfigError(
                f"`{path}` exists, and `lmcore launch` did not write it",
                hint="give another `--output`",
            )
    write_atomically(path, text.encode())


def _shown(kind: JobKind, path: str, profile: JobProfile) -> str:
    return "; ".join(shlex.join(words) for words in kind.submit(path, profile))


def _submit(kind: JobKind, path: str, profile: Any) -> int:
    """Run the commands that submit a file; return the exit status of the first that fails."""
    previous = ""
    commands = list(kind.submit(path, profile))
    for words in commands:
        line = [word.replace("PREVIOUS", previous) for word in words]
        try:
            if len(commands) == 1:
                return subprocess.run(line, check=False).returncode  # noqa: S603  # as asked
            done = subprocess.run(line, check=False, stdout=subprocess.PIPE, text=True)  # noqa: S603
        except OSError as error:
            raise RunError(
                f"cannot run `{line[0]}`",
                why=error.strerror,
                hint=f"run `{shlex.join(line)}` where the command is installed; the file is "
                f"`{path}`",
            ) from None
        sys.stdout.write(done.stdout)
        if done.returncode:
            return done.returncode
        previous = done.stdout.strip()
    return 0
