"""Launcher of the processes of a run on this host, which end together.

They are all processes of the run, or of one node (`NodePlace`) among several with launchers.

Rank 0 has the terminal; standard error of the other ranks, and standard output if it is wanted, is
copied line by line, with the rank.
The first process that fails ends the run: its error is shown first and in full, later errors in a
line each.  Signals are passed on; after the second one processes that do not end are killed.  In a
dialogue Ctrl-C is for rank 0 alone, as often as the user likes.
Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lmcore.base.child_process import kill_group, signal_name
from lmcore.base.durable import is_abandoned, process_token
from lmcore.base.errors import RunError, printable
from lmcore.base.signals import (
    END_SIGNALS,
    SAME_SIGNAL_SECONDS,
    end_status,
    end_word,
    handle_signals,
    raise_swallowed_signal,
    restore_signals,
)
from lmcore.runtime.launch.fork import ForkedProcess, can_fork, fork
from lmcore.runtime.launch.node_place import NodePlace
from lmcore.runtime.launch.output import CopiedOutput
from lmcore.runtime.launch.rank import AGENT_STORE, RankInfo, named_ranks
from lmcore.runtime.launch.worker_protocol import (
    FAILED,
    LaunchInfo,
    Report,
    complete_summary,
    read_report,
    summary_path,
)
from lmcore.runtime.store import StoreServer, new_secret

__all__ = ["launch", "reserved_port"]

_HOST = "127.0.0.1"
_FOLDER = "lmcore-launch-"
_BACKLOG = 4096
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 6.0
"""Time in which the other processes may end after one has failed, before they are stopped."""


@dataclass
class _Worker:
    """Worker process.

    Attributes:
        ended: Time at which its end was seen.
        stopped: True if it was stopped, as by SIGSTOP, when another had failed.
    """

    rank: int
    process: subprocess.Popen[bytes] | ForkedProcess
    report_file: Path
    ended: float | None = None
    report: Report | None = None
    stopped: bool = False

    def __post_init__(self) -> None:
        pipes = {"stdout": self.process.stdout, "stderr": self.process.stderr}
        self.outputs = [CopiedOutput(pipe, name, self.rank) for name, pipe in pipes.items() if pipe]

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self.process.poll()

    def copy_output(self) -> None:
        """Copy new lines of the pipes from its standard output and error."""
        for output in self.outputs:
            output.copy()

    def close(self) -> None:
        """Close this side of its standard output and error."""
        for output in self.outputs:
            output.source.close()


def launch(
    command: Sequence[str],
    num_processes: int,
    env: Mapping[str, str],
    *,
    function: Callable[[], int] | None = None,
    load: Callable[[], None] = lambda: None,
    all_output: bool = False,
    dialogue: bool = False,
    failed: Callable[[Path], None] = lambda _directory: None,
    node: NodePlace | None = None,
) -> int:
    """Run *command* in *num_processes* processes, as the ranks of one run; return its exit status.

    Args:
        command: Program and arguments, the same for all ranks.
        num_processes: Number of processes, at least one.
        env: Environment of the processes; the variables of a launcher are added.
        function: Function that does the same as *command* and returns its exit status, for
            processes that are forked; None: none are.
        load: Called before processes are forked, to import their modules once: torch, without
            using it.
        all_output: True to copy the standard output of every rank of a program; it is dropped for
            forked processes other than rank 0.
        dialogue: True if rank 0 answers a user, for whom SIGINT ends an answer and not the run.
        failed: Called with the run directory, after the error was shown, if a training run that
            had begun failed or was interrupted.
        node: Place of this host among several; None: the processes are the whole run.

    Returns:
        0 when all succeed, else the status of the process that failed first; 128 + N if signal N
        ended the run before it could save.

    Raises:
        RunError: A process could not be started.
    """
    if function is not None and not _can_fork_workers(load):
        function = None
    with (
        tempfile.TemporaryDirectory(prefix=f"{_FOLDER}{process_token()}-") as folder,
        socket.create_server((_HOST, 0), backlog=_BACKLOG) as server,
        reserved_port() as reserved,
        _Workers(
            command,
            function,
            num_processes,
            env,
            Path(folder),
            (server, reserved),
            all_output=all_output,
            dialogue=dialogue,
            node=node,
        ) as workers,
    ):
        _remove_abandoned(Path(folder).parent)
        status = workers.wait()
        summary = summary_path(Path(folder))
        if status and summary is not None:
            failed(summary.parent)
        return status


def reserved_port() -> socket.socket:
    """Return a socket whose port is free for a server on this host while the socket is open.

    The server must set SO_REUSEADDR, as torch's store does; the system gives the port to no other
    program.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def _remove_abandoned(directory: Path) -> None:
    """Remove the temporary folders of this user's launchers that were killed."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if not entry.name.startswith(_FOLDER) or not entry.is_dir(follow_symlinks=False):
                continue
            if entry.name.startswith(f"{_FOLDER}{process_token()}-"):
                continue  # in use
            name = entry.name.rpartition("-")[0]  # without the random letters of `tempfile`
            ours = entry.stat(follow_symlinks=False).st_uid == os.getuid()
            if ours and is_abandoned(Path(directory, name)):
                shutil.rmtree(entry.path, ignore_errors=True)


def _can_fork_workers(load: Callable[[], None]) -> bool:
    """Return True if processes may be forked; their modules are then loaded."""
    if "torch" in sys.modules or not can_fork():  # torch may have been used
        return False
    load()
    raise_swallowed_signal()
    return can_fork()


class _Workers:
    """Processes of a run; a context manager that leaves none behind."""

    def __init__(
        self,
        command: Sequence[str],
        function: Callable[[], int] | None,
        num_processes: int,
        env: Mapping[str, str],
        folder: Path,
        sockets: tuple[socket.socket, socket.socket],
        *,
        all_output: bool,
        dialogue: bool,
        node: NodePlace | None,
    ) -> None:
        self.command, self.function = command, function
        self.env, self.folder = env, folder
        self.all_output, self.dialogue = all_output, dialogue
        self.server, self.reserved = sockets
        self.size = num_processes
        self.node = node
        self.world_size = num_processes * (node.nodes if node else 1)
        self.secret = new_secret()
        self.workers: list[_Worker] = []
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._is_repeated = False  # the user wants the run to end at once

    def __enter__(self) -> Self:
        try:
            for rank in range(self.size):
                self.workers.append(self._start(rank))
        except BaseException as cause:
            self._kill()
            if not isinstance(cause, OSError):
                raise
            raise RunError(
                f"process {len(self.workers) + 1} of {self.size} cannot be started",
                why=cause.strerror or str(cause),
                hint="start fewer with `--nproc-per-node`",
            ) from cause
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def _start(self, rank: int) -> _Worker:
        local_rank, first = rank, self.node.rank * self.size if self.node else 0
        rank += first
        info = RankInfo(rank, local_rank, self.world_size, self.size)
        report_file = self.folder / f"{rank}.json"
        port, store_port = (server.getsockname()[1] for server in (self.reserved, self.server))
        address: Mapping[str, str] = {"MASTER_ADDR": _HOST, "MASTER_PORT": str(port)}
        own = LaunchInfo(str(report_file), self.secret, store_port, os.getpid())
        if self.node is not None:  # rank 0 has the store of the run
            address, own = self.node.address, LaunchInfo(str(report_file), launcher=os.getpid())
        env = {**self.env, **info.to_env(), **address, **own.to_env()}
        env.pop(AGENT_STORE, None)  # of an earlier launcher: here this process has the store
        if self.function is not None:

            def close() -> None:
                for worker in self.workers:
                    worker.close()
                self.server.close()
                self.reserved.close()

            forked = fork(self.function, env, shown=local_rank == 0, close=close)
            return _Worker(rank, forked, report_file)
        others = subprocess.PIPE if self.all_output else subprocess.DEVNULL
        process = subprocess.Popen(  # noqa: S603  # this very program
            self.command,
            env=env,
            stdin=None if local_rank == 0 else subprocess.DEVNULL,
            stdout=None if local_rank == 0 else others,
            stderr=None if local_rank == 0 else subprocess.PIPE,
            # A terminal's Ctrl-C comes here alone, and is passed on once.  In a new session rank 0
            # may read from the terminal all the same, as it could not in a new process group.
            start_new_session=True,
        )
        return _Worker(rank, process, report_file)

    def wait(self) -> int:
        """Wait for all processes and return the run's status; if one fails, end all others."""
        deadline: float | None = None
        # Made after the processes, which must not have its files.
        store = StoreServer(self.server, bytes.fromhex(self.secret))
        with self._signals_passed_on(), contextlib.closing(store):
            while not self._all_ended(store):
                for worker in self.workers:
                    worker.copy_output()
                ends = self._is_repeated or any(worker.status for worker in self.workers)
                if deadline is None and ends:
                    deadline = time.monotonic() + _GRACE_SECONDS
                if deadline is not None and (time.monotonic() > deadline or self._others_stopped()):
                    break
                store.serve(_POLL_SECONDS)
        ended = [worker for worker in self.workers if worker.ended is not None]
        for worker in self.workers:
            worker.stopped = worker.ended is None and _is_stopped(worker.process.pid)
        self._kill()
        for worker in self.workers:
            worker.report = read_report(worker.report_file)
        return self._status(ended)

    def _all_ended(self, store: StoreServer) -> bool:
        for worker in self.workers:
            if worker.ended is None and worker.status is not None:
                worker.ended = time.time()
                if worker.status:
                    self._end_others(worker, store)
        return all(worker.ended is not None for worker in self.workers)

    def _end_others(self, failed: _Worker, store: StoreServer) -> None:
        """Make the other processes end soon: they may wait for one that has never connected."""
        number = _signal_of(failed)
        if number is not None and self.received is None:  # sent to that process alone
            self.received, self._received_at = number, time.monotonic()
            self._send(number)
        failed.report = read_report(failed.report_file)
        what = _in_one_line(failed, self.world_size)
        failure = {"rank": failed.rank, "what": what, "why": None, "hint": None}
        store.put(FAILED, json.dumps(failure))

    def _others_stopped(self) -> bool:
        """Return True if every process that has not ended is stopped, and so will not end."""
        return all(_is_stopped(worker.process.pid) for worker in self.workers if not worker.ended)

    def _send(self, number: int) -> None:
        for worker in self.workers:
            if worker.status is None:
                worker.process.send_signal(number)

    @contextlib.contextmanager
    def _signals_passed_on(self) -> Iterator[None]:
        def pass_on(number: int, _frame: object) -> None:
            if self.dialogue and number == signal.SIGINT:
                self.workers[0].process.send_signal(number)
                return
            now = time.monotonic()
            if self.received is None:
                self._received_at = now
            elif now - self._received_at > SAME_SIGNAL_SECONDS:
                self._is_repeated = True
            self.received = signal.Signals(number)
            self._send(number)

        before = handle_signals(pass_on)
        try:
            yield
        finally:
            restore_signals(before)

    def _kill(self) -> None:
        for worker in self.workers:
            worker.process.send_signal(signal.SIGKILL)  # a fork may not lead its session yet
            kill_group(worker.process)
            worker.copy_output()
            worker.close()

    def _status(self, ended: Sequence[_Worker]) -> int:
        """Show what failed, and return the exit status."""
        failed = [worker for worker in ended if worker.status]
        if not failed and len(ended) == len(self.workers):
            return 0
        if self.received and all(_ended_by_signal(worker) for worker in failed):
            sys.stderr.write(f"{end_word(self.received)}\n")
            complete_summary(self.folder, end_word(self.received))
            return end_status(self.received)
        first = min(failed, key=_precedence)
        sys.stderr.write(printable(_failure_text(first, self.workers, self.world_size)) + "\n")
        main = self.workers[0]  # wrote the summary, before it explained its own error
        text = first.report.text if first.report else ""
        differs = text.startswith("error: ") if first is main else _in_short(main, text) != _SAME
        status = _summary_status(first, self.world_size)
        complete_summary(self.folder, status, replace=differs)
        return first.report.status if first.report else 1


def _is_stopped(pid: int) -> bool:
    """Return True if the process is stopped by a signal or a debugger; False if unknown."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] in "Tt"
    return False


def _precedence(worker: _Worker) -> tuple[int, float]:
    """Order failures: causes before their effects, earlier before later."""
    if worker.report is None:  # it died, which may be the cause of the other failures
        return 0, worker.ended or 0.0
    return 1 + worker.report.secondary, worker.report.at


def _ended_by_signal(worker: _Worker) -> bool:
    """Return True if a signal that was passed on ended the worker, or another such worker did."""
    if worker.report is not None:
        return worker.report.secondary
    return _signal_of(worker) is not None


def _signal_of(worker: _Worker) -> signal.Signals | None:
    """Return the signal that ended the worker, if it is one that ends a run in order."""
    numbers = (number for number in END_SIGNALS if worker.status in {end_status(number), -number})
    return next(numbers, None)


_SAME = "the same error"


def _failure_text(first: _Worker, workers: Sequence[_Worker], size: int) -> str:
    """Return the first failure in full, and a line for each group of other endings."""
    shown = first.report.text if first.report else _ending(first, size)
    groups: dict[str, list[int]] = {}
    for worker in workers:
        if worker is not first:
            groups.setdefault(_in_short(worker, shown), []).append(worker.rank)
    if len(workers) > 1 and groups.keys() == {_SAME}:
        those = f"all {size} ranks" if len(workers) == size else f"all {len(workers)} ranks here"
        return f"{shown}\n\n{those} report the same error"
    lines = [shown, "", f"from rank {first.rank} of {size}"]
    lines += [f"  {named_ranks(ranks)}: {text}" for text, ranks in groups.items()]
    return "\n".join(lines)


def _summary_status(first: _Worker, size: int) -> str:
    """Return the status of a failed run for its summary: the first failure, on one line."""
    rank = f"rank {first.rank}: " if first.report and first.rank else ""
    return f"failed: {rank}{_in_one_line(first, size)}"


def _in_one_line(failed: _Worker, size: int = 0) -> str:
    """Return the failure of a worker without its traceback, reason and hint."""
    lines = (failed.report.text if failed.report else _ending(failed, size)).splitlines()
    return lines[-1] if lines[0].startswith("Traceback") else lines[0].removeprefix("error: ")


def _ending(worker: _Worker, size: int) -> str:
    status = worker.status or 0
    if status >= 0:
        message = f"rank {worker.rank} of {size} ended with exit status {status}, "
        message += "without an error message"
        return RunError(message, why="its last lines are above").render()
    name = signal_name(-status)
    why = "its last lines are above"
    if -status == signal.SIGKILL:
        why = "most often the kernel's out-of-memory killer, or a manual `kill -9`"
    return RunError(f"rank {worker.rank} of {size} was killed by {name}", why=why).render()


def _in_short(worker: _Worker, shown: str) -> str:
    if worker.report is not None:
        if worker.report.text == shown:
            return _SAME
        return "stopped because of it" if worker.report.secondary else _in_one_line(worker)
    if worker.stopped:
        return "stopped by a signal, as by SIGSTOP or a debugger, and ended"
    if worker.ended is None:
        return "still running; terminated"
    status = worker.status or 0
    return f"killed by {signal_name(-status)}" if status < 0 else f"exit status {status}"
