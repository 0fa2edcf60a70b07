"""Checks of `lmcore doctor` on oneCCL's environment: incomplete pairs of variables, known hangs.

All are for runs of several processes.  Variables that lmcore sets (`launch_env`) may be unset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lmcore.contract import Check, CheckStatus
from lmcore_xpu.detection.cards import Card
from lmcore_xpu.detection.host import Host
from lmcore_xpu.launch_env import LAUNCHER, TRANSPORT, launcher_of, unset_command

__all__ = ["ccl_checks"]

_DEFAULTS = {LAUNCHER: "hydra", TRANSPORT: "mpi"}
"""oneCCL's own defaults (its src/common/env/env.cpp)."""
_LAUNCHERS = ("hydra", "pmix", "torchrun", "torch", "none")
_TRANSPORTS = ("mpi", "ofi")
_EXCHANGE = "CCL_ZE_IPC_EXCHANGE"
_EXCHANGES = ("drmfd", "pidfd", "sockets", "none")
_PIDFD_KERNEL = (5, 6)
_MANY_FILES = 4096
_LITTLE_SHARED = 1 << 30


@dataclass(frozen=True)
class _Needs:
    """A variable with a value (None: any) that has no effect, or hangs, without another.

    Attributes:
        name, value: Variable that is set, and its value.
        other: Variable that it needs.
        values: Allowed values of that variable; empty: any.
    """

    name: str
    value: str | None
    other: str
    values: tuple[str, ...] = ()


_RULES = (
    _Needs(LAUNCHER, "pmix", TRANSPORT, ("mpi",)),
    _Needs("CCL_KVS_USE_MPI_RANKS", "1", TRANSPORT, ("mpi",)),
    _Needs("CCL_LOCAL_RANK", None, "CCL_LOCAL_SIZE"),
    _Needs("CCL_LOCAL_SIZE", None, "CCL_LOCAL_RANK"),
    _Needs("CCL_ROOT", None, "LD_LIBRARY_PATH"),
    _Needs("FI_CXI_RX_MATCH_MODE", None, "FI_PROVIDER", ("cxi",)),
    _Needs("FI_CXI_DEFAULT_CQ_SIZE", None, "FI_PROVIDER", ("cxi",)),
)


def ccl_checks(cards: Sequence[Card], env: Mapping[str, str], host: Host) -> list[Check]:
    """Return the checks for a run over several devices.

    Args:
        cards: Model of each device that torch sees.
        env: Environment of the user.
        host: Limits of this host.
    """
    return [
        _environment(env, host),
        *_launch(env),
        *_exchange(cards, env, host),
        *_limits(cards, host),
    ]


def _environment(env: Mapping[str, str], host: Host) -> Check:
    """Find incomplete groups of variables."""
    wrong = [*_halves(env), *_misplaced(env, host)]
    if wrong:
        messages, fixes = zip(*wrong, strict=True)
        detail = "half set: " + "; ".join(messages)
        return Check("oneccl", CheckStatus.WARNING, detail, "; ".join(dict.fromkeys(fixes)))
    names = sorted(name for name in env if name.startswith("CCL_"))
    detail = f"yours: {', '.join(names)}" if names else "nothing set; lmcore sets what runs need"
    return Check("oneccl", CheckStatus.OK, detail)


def _launch(env: Mapping[str, str]) -> Iterator[Check]:
    """Check that oneCCL gets ranks from the launcher that starts the processes."""
    if not {LAUNCHER, TRANSPORT} & env.keys():
        return
    launcher, transport = (env.get(name) or _DEFAULTS[name] for name in (LAUNCHER, TRANSPORT))
    for name, value, known in (
        (LAUNCHER, launcher, _LAUNCHERS),
        (TRANSPORT, transport, _TRANSPORTS),
    ):
        if value not in known:
            fix = f"set `{name}` to one of {', '.join(known)}, or unset it"
            detail = f"`{name}={value}` is unknown to oneCCL"
            yield Check("oneccl launcher", CheckStatus.FAILED, detail, fix)
            return
    yield _fit(env, launcher, transport)


def _fit(env: Mapping[str, str], launcher: str, transport: str) -> Check:
    """Compare oneCCL's launcher and transport with the launcher of this process."""
    name, started_by = "oneccl launcher", launcher_of(env)
    foreign = started_by == "pmix" or "PALS_RANKID" in env
    setting = f"`{LAUNCHER}={launcher}`{'' if env.get(LAUNCHER) else ' (the default)'}"
    unset = unset_command(env)
    alone = f"{unset} for runs that `lmcore train` starts itself"
    if launcher == "pmix" and started_by != "pmix":
        if foreign:
            detail = f"{setting}, and PALS started this process without PMIx"
            fix = f"start with `mpiexec --pmi=pmix`, or {unset}"
            return Check(name, CheckStatus.FAILED, detail, fix)
        detail = (
            f"{setting} is for processes that `mpiexec --pmi=pmix` starts: there is no PMIx server "
            "here, so that `lmcore train` alone is refused and the all-reduce below fails"
        )
        return Check(name, CheckStatus.WARNING, detail, alone)
    if launcher == "hydra" and transport == "mpi" and started_by != "hydra":
        detail = f"{setting} with the transport `mpi` is for processes of Intel MPI's `mpiexec`"
        if foreign:
            fix = f"`export {LAUNCHER}=pmix` and start with `mpiexec --pmi=pmix`, or {unset}"
            detail += ", and PALS or PMIx started this process"
            return Check(name, CheckStatus.FAILED, detail, fix)
        return Check(name, CheckStatus.WARNING, detail, alone)
    if launcher == "none" and env.get(TRANSPORT) == "mpi" and started_by == "none":
        detail = f"`{TRANSPORT}=mpi` with {setting}: no MPI launcher starts the processes"
        return Check(name, CheckStatus.WARNING, detail, f"`export {TRANSPORT}=ofi`, or {unset}")
    shown = env.get(TRANSPORT, "ofi") if launcher == "none" else transport
    return Check(name, CheckStatus.OK, f"ranks from `{launcher}`, messages over `{shown}`")


def _halves(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield variables that are set without their counterpart, and the fix."""
    for rule in _RULES:
        value = env.get(rule.name)
        if not value or rule.value not in {None, value}:
            continue
        other = env.get(rule.other) or _DEFAULTS.get(rule.other, "")
        if other and (not rule.values or other in rule.values):
            continue
        has = f"`{rule.other}={other}`" if other else f"no `{rule.other}`"
        choice = " or ".join(f"`{rule.other}={value}`" for value in rule.values)
        wanted = choice or f"`{rule.other}`"
        yield (
            f"`{rule.name}={value}` with {has}",
            f"set {wanted}, or unset `{rule.name}`",
        )
    root, path = env.get("CCL_ROOT"), env.get("LD_LIBRARY_PATH")
    if root and path and root.rstrip("/") not in path:
        yield (
            f"`CCL_ROOT={root}`, and `LD_LIBRARY_PATH` has nothing of it",
            "`source $CCL_ROOT/env/vars.sh`, or unset `CCL_ROOT`",
        )


def _misplaced(env: Mapping[str, str], host: Host) -> Iterator[tuple[str, str]]:
    """Yield variables that are set for another host, or for one process of several."""
    if "cxi" in env.get("FI_PROVIDER", "") and not host.slingshot:
        yield (
            f"`FI_PROVIDER={env['FI_PROVIDER']}`, and this host has no Slingshot card",
            "unset `FI_PROVIDER`, or set `FI_PROVIDER=tcp`",
        )
    if env.get("CCL_CONFIGURATION") == "cpu":
        yield (
            "`CCL_CONFIGURATION=cpu` is a oneCCL without GPUs",
            "`source $CCL_ROOT/env/vars.sh --ccl-configuration=cpu_gpu_dpcpp`",
        )
    if env.get("CCL_LOCAL_RANK") and not env.get("LOCAL_RANK"):
        yield (
            f"`CCL_LOCAL_RANK={env['CCL_LOCAL_RANK']}` for every process that starts from here",
            "unset `CCL_LOCAL_RANK` and `CCL_LOCAL_SIZE`: lmcore sets them for each process",
        )


def _exchange(cards: Sequence[Card], env: Mapping[str, str], host: Host) -> Iterator[Check]:
    """Check how processes share memory of GPUs, where sharded training has hung."""
    name, value = _EXCHANGE, env.get(_EXCHANGE, "")
    if value and value not in _EXCHANGES:
        fix = f"set it to one of {', '.join(_EXCHANGES)}, or unset it"
        yield Check(name, CheckStatus.FAILED, f"`{value}` is unknown to oneCCL", fix)
        return
    if len(cards) < 2:
        return
    linked = all(card.is_max for card in cards)
    sockets = f"`export {name}=sockets`"
    if not linked and value not in {"", "sockets"}:
        detail = (
            f"`{value}`: on cards without links, sharded training of a model of 7 billion "
            "parameters hung in its first broadcast with `pidfd` (intel/torch-xpu-ops#4238)"
        )
        yield Check(name, CheckStatus.WARNING, detail, f"{sockets}, or unset it: lmcore sets that")
    elif linked and value in {"", "pidfd"} and (0, 0) < host.kernel < _PIDFD_KERNEL:
        linux = ".".join(str(part) for part in host.kernel)
        detail = f"oneCCL's default, `pidfd`, needs Linux 5.6; this is {linux}"
        yield Check(name, CheckStatus.WARNING, detail, sockets)
    else:
        shown = value or ("oneCCL's default" if linked else "lmcore sets `sockets`")
        yield Check(name, CheckStatus.OK, shown)


def _limits(cards: Sequence[Card], host: Host) -> Iterator[Check]:
    """Check the resources that several processes of a host share."""
    if len(cards) < 2:
        return
    if 0 <= host.open_files < _MANY_FILES:
        detail = (
            f"a process may have {host.open_files} open; oneCCL keeps up to 1000 handles of other "
            "processes' memory, each an open file"
        )
        yield Check("open files", CheckStatus.WARNING, detail, "`ulimit -n 65536` before the start")
    if host.shared_memory is not None and host.shared_memory < _LITTLE_SHARED:
        size = f"{host.shared_memory >> 20} MiB in /dev/shm"
        detail = f"{size}, which collectives over host memory may fill"
        fix = "start the container with `--shm-size=8g`, or `--ipc=host`"
        yield Check("shared memory", CheckStatus.WARNING, detail, fix)
