"""Command of a job, and the shell that starts it or continues its run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from lmcore.runtime.launch.job.profile import ContainerProfile, JobProfile, variables_of

__all__ = ["JobCommand", "bash_array", "container_words", "header", "preamble", "run_lines"]

_PROGRAM = "lmcore"


@dataclass(frozen=True)
class JobCommand:
    """Command of a job.

    Attributes:
        words: Words after `lmcore`: a command and its arguments.
        run_directory: Run directory that a training run saves to; None: it has none, or the command
            is another one.
        continues: True if *words* continue the run by themselves if it has a checkpoint.
        ends_itself: True if the words limit the run's time.
        device: Device type, or plugin, that `--device` names; None: the job's hosts decide.
    """

    words: tuple[str, ...]
    run_directory: str | None = None
    continues: bool = False
    ends_itself: bool = False
    device: str | None = None

    @property
    def is_training(self) -> bool:
        """True for `lmcore train`."""
        return self.words[0] == "train"

    def first(self, more: Sequence[str] = ()) -> list[str]:
        """Return the words that start the command."""
        return [_PROGRAM, *self.words, *more]

    def again(self, more: Sequence[str] = ()) -> list[str] | None:
        """Return the words that continue the run; None if they do not differ."""
        if self.continues or self.run_directory is None:
            return None
        return [_PROGRAM, "train", "--continue", self.run_directory, *more]

    @property
    def checkpoints(self) -> str:
        """Pattern of the run's checkpoints, for a shell."""
        assert self.run_directory is not None
        return shlex.quote(str(PurePath(self.run_directory, "checkpoints"))) + "/iter_*"


def header(kind: str, start: str) -> list[str]:
    """Return the comment of a rendered file.

    Args:
        kind: Kind of the job.
        start: Command that submits the file.
    """
    return [f"# Written by `lmcore launch {kind}`; submit it by: {start}"]


def preamble(profile: JobProfile) -> Iterator[str]:
    """Yield the lines before the command: directory, modules, the profile's lines, variables."""
    if isinstance(profile, ContainerProfile):
        if profile.directory is not None:
            yield f"cd {shlex.quote(profile.directory)}"
        for module in profile.modules:
            yield f"module load {shlex.quote(module)}"
    yield from profile.before
    for name, value in variables_of(profile).items():
        yield f"export {name}={shlex.quote(value)}"


def container_words(profile: ContainerProfile) -> list[str]:
    """Return the words that run a command in the profile's container; none without one."""
    if profile.container is None:
        return []
    mounts = [word for mount in profile.mounts for word in ("--bind", mount)]
    return ["apptainer", "exec", *mounts, profile.container]


def bash_array(name: str, words: Sequence[str]) -> str:
    """Return an assignment of words to an array of bash."""
    return f"{name}=({shlex.join(words)})"


def run_lines(
    command: JobCommand, prefix: Sequence[str] = (), more: Sequence[str] = ()
) -> Iterator[str]:
    """Yield lines that set the array `run` to the command, or to its continuation.

    Args:
        command: The command.
        prefix: Words that precede it, such as a container's.
        more: Words that follow it.
    """
    yield bash_array("run", [*prefix, *command.first(more)])
    again = command.again(more)
    if again is not None:
        yield f"for checkpoint in {command.checkpoints}; do"
        yield f'    if [ -d "$checkpoint" ]; then {bash_array("run", [*prefix, *again])}; fi'
        yield "done"
