"""A Python program of the user, run as Python runs it, with its errors reported as lmcore's are.

`lmcore run` calls `execute` in each process, after the environment is prepared.  Torch-free.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import importlib.util
import io
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from lmcore.base.errors import ConfigError, LmcoreError, RunError, nearest, printable
from lmcore.base.signals import END_SIGNALS, end_status
from lmcore.runtime.launch.worker_protocol import Report, launch_info, write_report
from lmcore.runtime.user_line import error_text, install_excepthook, previous_hook

__all__ = ["Script", "execute"]

_NOT_REPORTED = {None, 0, *map(end_status, END_SIGNALS)}
"""Exit statuses of a script that succeeded, or that a signal ended, which the launcher names."""


@dataclass(frozen=True)
class Script:
    """A script or module, and its arguments.

    Attributes:
        name: Path of the script, or name of the module.
        arguments: `sys.argv` from the second element on.
        is_module: True for a module, as of `python -m`.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def check(self) -> None:
        """Read and compile a script; a module is found only when it runs.

        Raises:
            ConfigError: There is no such file.
            SyntaxError: The text is not Python.
            ValueError: The text has null bytes.
        """
        if not self.is_module:
            self._compile()

    def load(self) -> tuple[CodeType, dict[str, Any]]:
        """Set `sys.argv`, `sys.path` and `__main__` as `python` does.

        Returns:
            The code to execute, and the globals of `__main__`.

        Raises:
            ConfigError: There is no such script or module.
        """
        if self.is_module:
            return self._load_module()
        code = self._compile()
        _set_path(os.path.dirname(os.path.realpath(self.name)))  # noqa: PTH120
        file = code.co_filename
        loader = SourceFileLoader("__main__", file)
        found = {"__file__": file, "__cached__": None, "__loader__": loader, "__spec__": None}
        return code, self._main({**found, "__package__": None}, self.name)

    def _compile(self) -> CodeType:
        path = Path(self.name)
        if path.is_dir():
            raise ConfigError(
                f"`{self.name}` is a directory",
                hint="give the path of a script in it, or the name of a package by `-m`",
            )
        if not path.is_file():
            raise ConfigError(f"there is no script `{self.name}`", hint=self._meant())
        file = os.path.join(os.getcwd(), self.name)  # noqa: PTH109, PTH118  # as Python does
        return compile(path.read_bytes(), file, "exec", dont_inherit=True)

    def _meant(self) -> str | None:
        path = Path(self.name)
        with_suffix = path.with_name(f"{path.name}.py") if path.name else path
        if with_suffix.is_file():
            return f"did you mean `{with_suffix}`?"
        if path.parent.is_dir():
            close = nearest(path.name, (other.name for other in path.parent.glob("*.py")))
            if close is not None:
                return f"did you mean `{path.with_name(close)}`?"
        return "options of `lmcore run` precede the script, each with its value"

    def _load_module(self) -> tuple[CodeType, dict[str, Any]]:
        if self.name.endswith(".py"):
            hint = "give the path of a script without `-m`"
            raise ConfigError(f"`-m {self.name}`: this is not the name of a module", hint=hint)
        _set_path(os.getcwd())  # noqa: PTH109
        name = self.name
        spec = _find(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = _find(name)
        code = None
        if spec is not None and isinstance(spec.loader, InspectLoader):
            code = spec.loader.get_code(name)
        if spec is None or code is None:
            hint = "check the name, the current folder and PYTHONPATH"
            raise ConfigError(f"there is no Python module `{name}`", hint=hint)
        variables = {
            "__file__": spec.origin,
            "__cached__": spec.cached,
            "__loader__": spec.loader,
            "__package__": spec.parent,
            "__spec__": spec,
        }
        return code, self._main(variables, spec.origin or self.name)

    def _main(self, variables: Mapping[str, object], first: str) -> dict[str, Any]:
        sys.argv = [first, *self.arguments]
        main = ModuleType("__main__")
        vars(main).update(variables, __builtins__=builtins)
        sys.modules["__main__"] = main
        return vars(main)


def _find(name: str) -> ModuleSpec | None:
    """Return the spec of a module, after an import of its package; None if there is none."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # of an import in a package
        return None
    except ValueError:  # "a..b"
        return None


def _set_path(folder: str) -> None:
    """Replace the folder of the program that Python itself put first, if it put one there."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def execute(script: Script, env: Mapping[str, str]) -> int:
    """Run a script as `__main__` and return its exit status.

    An uncaught exception is shown, or reported to lmcore's launcher if it started this process: an
    `LmcoreError` with the line of the script, any other by its traceback within the script.

    Args:
        script: The script.
        env: Environment of this process, for `launch_info`.

    Raises:
        KeyboardInterrupt: The script did not catch it.
        SystemExit: The script raised it, and lmcore's launcher did not start this process.
    """
    is_worker = bool(launch_info(env).report_file)
    hook = previous_hook()
    try:
        code, variables = script.load()
        exec(code, variables)  # noqa: S102  # the purpose of the command
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        status = error.code if isinstance(error.code, int | None) else 1  # others are messages
        if status:
            sys.last_value = error  # as the interpreter does, for functions at its exit
        if not is_worker or status in _NOT_REPORTED:
            raise
        report = _exit_report(script, error)
    except BaseException as error:  # noqa: BLE001  # as the interpreter does
        error.__traceback__ = _within_script(error.__traceback__)
        sys.last_value = error
        if not is_worker:
            return _show(error)
        if previous_hook() is not hook and not isinstance(error, LmcoreError):
            with contextlib.redirect_stderr(io.StringIO()):  # the launcher shows the error
                previous_hook()(type(error), error, error.__traceback__)
        report = _report(error)
    else:
        return 0
    write_report(report, env)
    return report.status


def _show(error: BaseException) -> int:
    """Show an uncaught exception of the only process, or of another launcher's."""
    if isinstance(error, LmcoreError):
        install_excepthook()
    sys.excepthook(type(error), error, error.__traceback__)
    return error.exit_status if isinstance(error, LmcoreError) else 1


def _report(error: BaseException) -> Report:
    return dataclasses.replace(Report.of(error), text=error_text(error))


def _exit_report(script: Script, error: SystemExit) -> Report:
    """Return the report of a script that ended with an exit status, or with a message."""
    if not isinstance(error.code, int):
        return Report(time.time(), printable(str(error.code)), 1, secondary=False)
    status = error.code & 0xFF  # as the system does
    message = RunError(f"`{script.name}` ended with exit status {status}")
    message.__traceback__ = error.__traceback__
    return Report(time.time(), error_text(message), status, secondary=False)


def _within_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without its first frames, which are of this module and of imports."""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__"))
        if module != __name__ and not module.startswith("importlib."):
            break
        trace = trace.tb_next
    return trace
