"""Kinds of jobs of `lmcore launch`: a record for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lmcore.runtime.launch.job import hostfile, kubernetes, local, pbs, slurm
from lmcore.runtime.launch.job.command import JobCommand
from lmcore.runtime.launch.job.profile import JobProfile

__all__ = ["JOBS", "JobKind"]


class JobKind(NamedTuple):
    """Kind of job.

    Attributes:
        name: Word after `lmcore launch`.
        section: Keys of its profile.
        render: Function that returns the script or manifest for a profile and a command.
        submit: Function that yields the commands that submit a file with it; the word
            `PREVIOUS` in one is replaced by what the command before printed.
        suffix: Suffix of the file.
    """

    name: str
    section: type[JobProfile]
    render: Callable[[Any, JobCommand], str]
    submit: Callable[[str, Any], Iterator[list[str]]]
    suffix: str


JOBS = {
    one.name: one
    for one in (
        JobKind("local", local.LocalProfile, local.render, local.submit, ".sh"),
        JobKind("hostfile", hostfile.HostfileProfile, hostfile.render, hostfile.submit, ".sh"),
        JobKind("slurm", slurm.SlurmProfile, slurm.render, slurm.submit, ".sbatch"),
        JobKind("k8s", kubernetes.KubernetesProfile, kubernetes.render, kubernetes.submit, ".yaml"),
        JobKind("pbs", pbs.PbsProfile, pbs.render, pbs.submit, ".pbs"),
    )
}
"""Kinds by name."""
