"""The command `lmcore run`: a Python script of the user in one process for each device.

The process that the user starts chooses the device, without torch.  For several processes it starts
this command again, once for each; the script runs in those, otherwise in this process.  A flag of
torchrun that changes nothing on one host is accepted.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore.base import log
from lmcore.base.errors import ConfigError
from lmcore.base.signals import clean_termination
from lmcore.cli.commands import known_commands
from lmcore.cli.device_count import default_process_count
from lmcore.cli.processes import start_on_node
from lmcore.cli.selection import find_plugins
from lmcore.config.option import option, options_of
from lmcore.config.options.command_line import (
    ForeignFlag,
    Translation,
    UnsupportedFlagError,
    parse_section,
    render_help,
    wants_help,
)
from lmcore.runtime.device_choice import prepare_environment, select_device

if TYPE_CHECKING:
    from lmcore.plugin import Selection
    from lmcore.runtime.launch.rank import RankInfo
    from lmcore.runtime.launch.script import Script

__all__ = ["RunSection", "run"]

_SUMMARY = known_commands()["run"].summary
_USAGE = "[--flags] SCRIPT [arguments of the script]"
_EPILOG = """\
Flags of lmcore precede the script, or follow its arguments from --nproc-per-node on; all other \
words after the script are passed to it unchanged, and all of them after `--` or a \
--nproc-per-node before the script. Under torchrun, srun or mpirun the command runs the script as \
one process of that launcher.

  lmcore run --nproc-per-node 2 train.py --lr 3e-4
  lmcore run train.py --lr 3e-4 --nproc-per-node 2 --device cpu
  lmcore run --device cpu -m my_package.train --lr 3e-4
  lmcore run -- train.py --nproc-per-node 2"""
_MODULE = ("-m", "--module")
_PROCESSES = "--nproc-per-node"


@dataclass(frozen=True)
class RunSection:
    """Run a Python script of your own in one process for each device."""

    nproc_per_node: int | None = option(
        None,
        "Processes to start on this host; default: one for each device. Under a launcher only its "
        "own number is allowed.",
        minimum=1,
        maximum=4096,
    )
    device: str | None = option(
        None, "Device type, as listed by `lmcore plugins`; default: detected.", metavar="TYPE"
    )
    plugin_off: tuple[str, ...] = option(
        (), "Installed plugin to turn off; the flag is repeated for each plugin.", metavar="NAME"
    )
    output: str = option(
        "all",
        "Processes whose standard output is shown: all, with the rank before each line of ranks "
        "other than 0, or rank 0 alone. Standard error is always shown.",
        choices=("all", "rank0"),
    )


def run(argv: list[str]) -> int:
    """Run `lmcore run ...` and return the exit status of the script."""
    from lmcore.runtime.launch.script import execute
    from lmcore.runtime.launch.worker_protocol import launch_info
    from lmcore.runtime.user_line import error_text

    flags, words = _split(argv)
    if not launch_info(os.environ).report_file:  # the launcher starts workers without flags
        flags, words = _with_flags_at_end(flags, words, argv)
    if wants_help(flags):
        groups = [("options", "", options_of(RunSection))]
        arguments = [
            ("SCRIPT", "Path of a Python script; or `-m MODULE`, as for python."),
            ("arguments", "Arguments of the script, unchanged."),
        ]
        print(
            render_help(
                "lmcore run",
                _SUMMARY,
                groups,
                usage=_USAGE,
                positionals=arguments,
                epilog=_EPILOG,
            )
        )
        return 0
    with clean_termination():  # the script itself has Python's own handlers
        section = parse_section(RunSection, flags, command="lmcore run", foreign=torchrun_flags())
        script = _script(words)
        try:
            script.check()
        except (SyntaxError, ValueError) as error:
            sys.stderr.write(error_text(error.with_traceback(None)) + "\n")
            return 1
        status = _start(flags, words, section)
    return execute(script, os.environ) if status is None else status


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags of lmcore, and the words from the script, or `-m`, on.

    Each flag takes one value, so that the script need not be guessed.
    """
    taking = {option.flag for option in options_of(RunSection)}
    taking |= {flag for flag, foreign in torchrun_flags().items() if foreign.values == "1"}
    index = 0
    while index < len(argv) and argv[index].startswith("-"):
        if argv[index] == "--" or argv[index].partition("=")[0] in _MODULE:
            break
        index += 2 if _flag(argv[index]) in taking and "=" not in argv[index] else 1
    rest = list(argv[index:])
    return list(argv[:index]), rest[1:] if rest[:1] == ["--"] else rest


def _with_flags_at_end(
    flags: list[str], words: list[str], argv: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the flags of lmcore with the ones at the end of the line, and the script's words.

    Args:
        flags: Flags of lmcore before the script.
        words: The script, or `-m` and the module, and the words after it.
        argv: The whole line.

    Raises:
        ConfigError: Words of the script follow `--nproc-per-node`.
    """
    first = 2 if words[:1] and words[0] in _MODULE else 1
    places = [
        index for index, word in enumerate(words) if index >= first and _flag(word) == _PROCESSES
    ]
    if not places or _PROCESSES in map(_flag, flags) or argv[len(flags) : len(flags) + 1] == ["--"]:
        return flags, words
    known = {option.flag for option in options_of(RunSection)} | torchrun_flags().keys()
    late, rest = _split(words[places[0] :])
    names = [_flag(word) for word in late if word.startswith("-")]
    before = words[: places[0]]
    strange = [name for name in names if name not in known] + rest
    if not strange:
        return flags + late, before
    count = late[: 2 if "=" not in late[0] else 1]
    script = before + words[places[0] + len(count) :]
    line = shlex.join(["lmcore", "run", *flags, *count, *script])
    hint = f"`{line}` sets the number of processes"
    if first == 1:
        line = shlex.join(["lmcore", "run", *flags, "--", *words])
        hint = f"{hint}; `{line}` passes it to the script"
    raise ConfigError(
        f"`{_PROCESSES}` among the arguments of `{words[first - 1]}`",
        why=f"`{strange[0]}` follows, which is no flag of `lmcore run`",
        hint=hint,
    )


def _flag(word: str) -> str:
    """Return the name of a flag in lmcore's spelling, without a value."""
    return word.partition("=")[0].replace("_", "-")


def _script(words: Sequence[str]) -> Script:
    from lmcore.runtime.launch.script import Script

    is_module = bool(words) and words[0] in _MODULE
    words = words[1:] if is_module else words
    if not words:
        raise ConfigError(
            f"the {'name of the module' if is_module else 'script'} is missing",
            hint=f"`lmcore run {_USAGE}`, such as `lmcore run --nproc-per-node 2 train.py --lr 1`",
        )
    return Script(words[0], tuple(words[1:]), is_module)


def _start(flags: list[str], words: list[str], section: RunSection) -> int | None:
    """Start the processes of the script, or prepare the environment for it in this one.

    Args:
        flags: Flags of lmcore.
        words: The script, or `-m` and the module, and its arguments.
        section: Values of the flags.

    Returns:
        Exit status of the processes; None if the script is to run in this process.
    """
    from lmcore.runtime.launch.node_place import node_place
    from lmcore.runtime.launch.rank import rank_info, started_by_launcher
    from lmcore.runtime.launch.scheduler_env import translate
    from lmcore.runtime.launch.worker_protocol import end_with_launcher, launch_info

    end_with_launcher(os.environ)
    if (node := node_place(os.environ)) is not None:
        script = words if words[0] in _MODULE else ["--", *words]
        return start_on_node(["run", *flags, *script], node, all_output=section.output == "all")
    os.environ.update(translate(os.environ))
    rank = rank_info(os.environ)
    log.configure(rank=rank.rank, world_size=rank.world_size)
    is_worker = bool(launch_info(os.environ).report_file)
    plugins = find_plugins(flags)
    selection = select_device(plugins, section.device, rank)
    if not is_worker:
        _hand_down(section, selection)
    if not started_by_launcher(os.environ):
        count = section.nproc_per_node or default_process_count(plugins, selection, rank)
        if count > 1:
            return _launch(words, count, section)
        _set_only_process(rank)
    elif section.nproc_per_node not in {None, rank.local_world_size}:
        raise ConfigError(
            f"`--nproc-per-node {section.nproc_per_node}`: a launcher started "
            f"{rank.local_world_size} here",
            why="LOCAL_WORLD_SIZE says so, and the launcher decides",
            hint="leave `--nproc-per-node` to the launcher, or start `lmcore run` without one",
        )
    prepare_environment(plugins, selection, rank)
    if is_worker and rank.rank > 0:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a pipe
    return None


def _launch(words: list[str], count: int, section: RunSection) -> int:
    """Start this command once for each process, on the device chosen here."""
    from lmcore.runtime.launch.launcher import launch

    # Programs, not forks: a script may set variables before it imports torch, and leave files to be
    # closed by the interpreter's end.
    safe_path = ["-P"] if sys.flags.safe_path else []
    module = words[0] in _MODULE
    return launch(
        [
            *(sys.executable, *safe_path, "-m", "lmcore.cli.main"),
            *("run", *([] if module else ["--"]), *words),
        ],
        count,
        os.environ,
        all_output=section.output == "all",
    )


def _hand_down(section: RunSection, selection: Selection) -> None:
    """Leave the choice of the device to the workers, and to `lmcore.start` in the script."""
    from lmcore.plugin import HANDED_DOWN
    from lmcore.plugin.discovery import OFF

    os.environ[HANDED_DOWN] = selection.to_json()
    names = [os.environ.get(OFF, ""), *section.plugin_off]
    if section.plugin_off:
        os.environ[OFF] = ",".join(filter(None, names))


def _set_only_process(rank: RankInfo) -> None:
    """Set the variables of a launcher for the only process of a run."""
    from lmcore.runtime.launch.launcher import reserved_port

    reserved = reserved_port()
    os.environ.update(rank.to_env())
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(reserved.getsockname()[1]))
    reserved.detach()  # open as long as this process


_HOSTS = (
    *("--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
    *("--master-addr", "--master-port", "--local-addr"),
)
_ONE_HOST = {
    ("--nnodes", "1"),
    ("--nnodes", "1:1"),
    ("--node-rank", "0"),
    ("--rdzv-backend", "c10d"),
    ("--max-restarts", "0"),
}
"""Flags and values that ask for what `lmcore run` does."""


def torchrun_flags() -> dict[str, ForeignFlag]:
    """Return the flags of torchrun that have no equivalent in `lmcore run`, by name."""
    return {
        "--standalone": ForeignFlag(
            "0", lambda _: Translation(no_effect="the processes of one host find each other")
        ),
        **{name: _translated(name) for name in (*_HOSTS, "--max-restarts")},
    }


def _translated(name: str) -> ForeignFlag:
    def translate(values: tuple[str, ...]) -> Translation:
        if (name, *values) in _ONE_HOST:
            return Translation(no_effect="`lmcore run` does nothing else")
        if name == "--max-restarts":
            why = "processes that fail are not restarted"
            hint = "leave it out, and restart the command: the script loads its last checkpoint"
        else:
            why = "`lmcore run` starts the processes of this host, which find each other"
            hint = "leave it out on one host; on several use torchrun, or srun with `lmcore run`"
        text = f"`{' '.join((name, *values))}` is not supported"
        return Translation(problem=UnsupportedFlagError(text, why=why, hint=hint))

    return ForeignFlag("1", translate)
