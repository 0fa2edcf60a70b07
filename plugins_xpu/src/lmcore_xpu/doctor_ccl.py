"""Checks of `lmcore doctor` on oneCCL's environment: incomplete pairs of variables, known hangs.

All are for runs of several processes.  Variables that lmcore sets (`launch_env`) may be unset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lmcore.accelerator import Check, CheckStatus
from lmcore_xpu.detection.cards import Card
from lmcore_xpu.detection.host import Host

__all__ = ["ccl_checks"]

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
    _Needs("CCL_PROCESS_LAUNCHER", "pmix", "CCL_ATL_TRANSPORT", ("mpi",)),
    _Needs("CCL_ATL_TRANSPORT", "mpi", "CCL_PROCESS_LAUNCHER", ("pmix", "hydra")),
    _Needs("CCL_KVS_MODE", "mpi", "CCL_ATL_TRANSPORT", ("mpi",)),
    _Needs("CCL_KVS_USE_MPI_RANKS", "1", "CCL_ATL_TRANSPORT", ("mpi",)),
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


def _halves(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield variables that are set without their counterpart, and the fix."""
    for rule in _RULES:
        value = env.get(rule.name)
        if not value or rule.value not in {None, value}:
            continue
        other = env.get(rule.other, "")
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
