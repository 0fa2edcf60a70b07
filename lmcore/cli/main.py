"""Entry point of the command `lmcore`: it runs the chosen command and prints its errors.

An expected error (`LmcoreError`) becomes a message here, without a traceback; every other exception
is a bug and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lmcore.cli.streams import (
    discard_unread,
    open_closed_streams,
    print_every_character,
    stdout_error,
)

if TYPE_CHECKING:
    from lmcore.base.errors import LmcoreError

__all__ = ["main"]

_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+", re.ASCII)
"""First argument from other launchers, ignored: the rank is read from the environment."""
_TERMINATED_BY_PIPE = 141  # 128 + SIGPIPE, as a shell reports it
_INTERRUPTED = 130  # 128 + SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line *argv*; return its exit status.

    Returns:
        0: success, 1: a failed run, 2: wrong usage or configuration, 130: interrupted, 128 + N:
        ended by signal N, such as 143 for SIGTERM.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_closed_streams()
    print_every_character()
    try:
        with _own_records():
            status = _start(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        if not discard_unread():
            raise  # another pipe than the output is a failure, unlike the end of `| head`
        return _TERMINATED_BY_PIPE
    except KeyboardInterrupt as interrupt:
        if not _is_launched():  # the launcher says it, once
            sys.stderr.write(f"interrupted\n{_notes(interrupt)}")
        if argv is None:  # a further Ctrl-C ends the program, and not Python's own ending
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        return _INTERRUPTED
    except Exception as error:
        failed = stdout_error(error) or _path_error(error) or _torch_error(error)
        if _is_launched():
            from lmcore.runtime.launch.worker_protocol import report_error

            return report_error(failed or error, os.environ).status
        if failed is None:
            raise
        sys.stderr.write(f"{failed.render()}\n{_notes(error)}")
        return failed.exit_status
    return status


@contextlib.contextmanager
def _own_records() -> Iterator[None]:
    """Take the records that a command's plugins add out of the core's registries at its end.

    A program may run several commands, with other plugins each.
    """
    name = "lmcore.plugin.registrations"  # not imported for a command without plugins
    before = sys.modules[name].added_records() if name in sys.modules else {}
    try:
        yield
    finally:
        if name in sys.modules:
            sys.modules[name].restore_records(before)


def _notes(error: BaseException) -> str:
    """Return the notes of an error that is shown without its traceback, after a blank line each."""
    from lmcore.base.errors import printable

    return printable("".join(f"\n{note}\n" for note in getattr(error, "__notes__", ())))


def _is_launched() -> bool:
    """Return True if lmcore's launcher started this process, which then reports its errors."""
    from lmcore.runtime.launch.worker_protocol import launch_info

    return bool(launch_info(os.environ).report_file)


def _path_error(error: Exception) -> LmcoreError | None:
    """Return the message for a path that the system refuses, unlike a bug; else None."""
    if isinstance(error, RecursionError) and _is_of_pathlib(error):  # it recurses to make parents
        from lmcore.base.errors import LmcoreError

        return LmcoreError("a path has too many directories within each other")
    refused = {errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP}
    if not isinstance(error, OSError) or error.errno not in refused or error.filename is None:
        return None
    from lmcore.base.errors import LmcoreError

    shown = os.fsdecode(error.filename) if not isinstance(error.filename, int) else error.filename
    hint = "check the path and its permissions"
    return LmcoreError(f"cannot use `{shown}`", why=error.strerror, hint=hint)


def _is_of_pathlib(error: RecursionError) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "pathlib" in trace.tb_frame.f_code.co_filename


def _torch_error(error: Exception) -> LmcoreError | None:
    """Return the message for a backend that another package adds to torch and cannot be loaded."""
    from lmcore.plugin.torch_backends import backend_error

    return backend_error(error)


def _start(arguments: list[str]) -> int:
    if arguments and _LOCAL_RANK.fullmatch(arguments[0]):
        arguments = arguments[1:]
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        if arguments[1:] and arguments[0] == "help":
            return _start([arguments[1], *arguments[2:], "--help"])
        print(_help())
        return 0
    if arguments[0] in {"-V", "--version"}:
        print(_version())
        return 0
    from lmcore.base.errors import HostMemoryError, LmcoreError

    try:
        return _run(arguments[0], arguments[1:])
    except (LmcoreError, MemoryError) as found:
        if _is_launched():
            raise
        error = HostMemoryError(found) if isinstance(found, MemoryError) else found
        with contextlib.suppress(OSError):  # `main` reports it
            sys.stdout.flush()
        sys.stderr.write(f"{error.render()}\n{_notes(found)}")
        return error.exit_status
    except SystemExit as exit_:  # from printed help, a plugin's command, or SIGTERM
        return _exit_status(exit_)


def _exit_status(exit_: SystemExit) -> int:
    """Return the exit status of a `SystemExit`; a code that is no number is a message."""
    from lmcore.base.signals import TerminatedError, end_word

    code = exit_.code
    if isinstance(exit_.__context__, BrokenPipeError):  # rich's console ends with status 1
        return _TERMINATED_BY_PIPE
    if isinstance(exit_, TerminatedError) and not _is_launched():  # the launcher says it, once
        sys.stderr.write(f"{end_word(exit_.number)}\n{_notes(exit_)}")
    if code is None or isinstance(code, int):
        return code or 0
    from lmcore.base.errors import printable

    sys.stderr.write(f"{printable(str(code))}\n")
    return 1


def _run(name: str, arguments: list[str]) -> int:
    from lmcore.base import log
    from lmcore.cli.commands import known_commands

    log.configure()
    if name.startswith("-"):
        from lmcore.base.errors import ConfigError

        hint = "`lmcore --help` lists the commands"
        raise ConfigError(f"unknown flag `{name}` before a command", hint=hint)
    if not {"-h", "--help"} & {*arguments}:
        _require_directory()
    command = known_commands().get(name)
    if command is None or not command.load:
        from lmcore.cli.plugin_commands import run_command

        return run_command(name, arguments)
    from lmcore.cli.group import load_own

    return load_own(command)(arguments)


def _require_directory() -> None:
    """Raise a `ConfigError` if the current directory was removed.

    The libraries of torch end a process there, with a message about a file of torch.
    """
    try:
        os.getcwd()  # noqa: PTH109  # pathlib is not needed otherwise
    except FileNotFoundError as error:
        from lmcore.base.errors import ConfigError

        raise ConfigError(
            "the current directory does not exist any more",
            why="it was removed, or replaced by another one of its name",
            hint='change to a directory that exists, also to one of the same name: `cd "$PWD"`',
        ) from error


def _help() -> str:
    from lmcore.base import log
    from lmcore.cli.plugin_commands import commands_for_help, help_groups
    from lmcore.config.options.help import fitted

    log.configure()

    lines = [
        "lmcore trains language models; its core knows no hardware: accelerators are plugins.",
        "",
        "usage: lmcore COMMAND [arguments]",
    ]
    for title, rows in help_groups(commands_for_help()).items():
        lines += ["", f"{title}:", *rows]
    lines += [
        "",
        "`lmcore COMMAND --help` explains a command, `lmcore --version` names the version.",
        "`lmcore train` alone needs no data and no settings: start there.",
    ]
    return fitted("\n".join(lines))


def _version() -> str:
    from importlib import metadata

    try:
        return f"lmcore {metadata.version('lmcore')}"
    except metadata.PackageNotFoundError:
        return "lmcore (not installed, run from its sources)"


if __name__ == "__main__":
    raise SystemExit(main())
