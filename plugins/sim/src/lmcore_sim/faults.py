"""Injected faults of the simulated devices; torch-free.

`LMCORE_SIM_FAULTS` is a list of rules, separated by semicolons:

    KIND[:TARGET][@COUNT][=VALUE][#RANK]

| kind | what happens | target | value |
|---|---|---|---|
| `fail` | the call raises `RuntimeError` | an op or a collective; any op | |
| `wrong` | its result is multiplied by the value | an op or a collective; any op | 1.01 |
| `slow` | it takes longer | an op or a collective; any op | `1ms` |
| `lose` | the devices are lost: every call from there on raises | an op or a collective; any op | |
| `hang` | it never returns | an op or a collective; any collective | |
| `unhealthy` | `Device.health` reports a fault, from call COUNT on | | |
| `no-rng-restore` | restoring a generator state has no effect | | |
| `no-autocast` | `torch.autocast` is accepted and casts nothing | | |
| `no-synchronize` | `torch.accelerator.synchronize` does not wait | | |
| `no-stream-synchronize` | `Stream.synchronize` does not wait | | |
| `no-event-synchronize` | `Event.synchronize` does not wait | | |
| `no-stream-wait` | `Stream.wait_stream` and `Stream.wait_event` (`Event.wait`) do not wait | | |
| `query-always-true` | `Stream.query` and `Event.query` are always true | | |
| `autocast-only` | of the products, `torch.autocast` casts this op only | `mm`, `bmm`, ... | |

TARGET is the name of an op without namespace, overload and trailing underscore (`mm`, `gelu`,
`native_layer_norm_backward`, `copy`), or `all_reduce`, `all_gather`, `reduce_scatter`,
`all_to_all`, `broadcast`, `reduce`, `gather`, `scatter`, `send`, `recv`, `barrier`.  COUNT is the
number of the matching call, from 1; without it, every call.  RANK is the process with the fault,
by the variable `RANK`; without it, all processes.  `fail:mm@3`, `wrong:gelu=1.5`,
`slow:copy=5ms`, `lose@200#1`, `hang:all_reduce@2#0`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lmcore.base.errors import ConfigError, suggestion

__all__ = ["VARIABLE", "FaultRule", "Faults", "parse_faults"]

VARIABLE = "LMCORE_SIM_FAULTS"
_CALLS = ("fail", "wrong", "slow", "lose", "hang")
_UNHEALTHY = "unhealthy"
_SWITCHES = (
    *("no-rng-restore", "no-autocast", "no-synchronize", "no-stream-synchronize"),
    *("no-event-synchronize", "no-stream-wait", "query-always-true"),
)
_AUTOCAST_ONLY = "autocast-only"
_PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "linear"),
    "scaled_dot_product_attention",
)
_DEFAULTS = {"wrong": "1.01", "slow": "1ms"}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RULE = re.compile(
    r"(?P<kind>[a-z-]+)(:(?P<target>\w+))?(@(?P<count>[1-9]\d*))?"
    r"(=(?P<value>[^#]+))?(#(?P<rank>\d+))?",
    re.ASCII,
)


@dataclass(frozen=True)
class FaultRule:
    """A call that goes wrong.

    Attributes:
        kind: "fail", "wrong", "slow", "lose" or "hang".
        target: Op or collective; empty: any.
        at: Number of the matching call, from 1; 0: every call.
        value: Factor of a wrong result, or seconds.
        rank: Process that misbehaves; None: all.
    """

    kind: str
    target: str = ""
    at: int = 0
    value: float = 0.0
    rank: int | None = None


@dataclass(frozen=True)
class Faults:
    """All that goes wrong in this process.

    Attributes:
        rules: Calls.
        switches: Kinds without a target, such as "no-autocast".
        autocast_only: Products that autocast casts; empty: all.
        unhealthy: Faults of the devices' health; the kind of each is "unhealthy".
    """

    rules: tuple[FaultRule, ...] = ()
    switches: frozenset[str] = frozenset()
    autocast_only: tuple[str, ...] = ()
    unhealthy: tuple[FaultRule, ...] = ()

    @property
    def any(self) -> bool:
        """True if any fault is set."""
        return self != Faults()

    def unhealthy_from(self, env: Mapping[str, str]) -> int | None:
        """Return the call of `health` from which on the device is not healthy; None if it is."""
        rank = int(env.get("RANK", "0"))
        return min((one.at for one in self.unhealthy if one.rank in {None, rank}), default=None)

    def of_rank(self, env: Mapping[str, str]) -> tuple[FaultRule, ...]:
        """Return the rules for the process whose `RANK` is in *env*."""
        rank = int(env.get("RANK", "0"))
        return tuple(rule for rule in self.rules if rule.rank in {None, rank})


def parse_faults(text: str) -> Faults:
    """Return the faults of `LMCORE_SIM_FAULTS`.

    Raises:
        ConfigError: A rule is malformed.
    """
    rules: list[FaultRule] = []
    switches: set[str] = set()
    cast: list[str] = []
    unhealthy: list[FaultRule] = []
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        found = _RULE.fullmatch(entry)
        if found is None:
            raise _error(entry, "a rule is written KIND[:TARGET][@COUNT][=VALUE][#RANK]")
        if found["kind"] in _SWITCHES:
            if entry != found["kind"]:
                raise _error(entry, f"`{found['kind']}` takes no target, count, value or rank")
            switches.add(entry)
        elif found["kind"] == _AUTOCAST_ONLY:
            if entry != f"{_AUTOCAST_ONLY}:{found['target']}" or found["target"] not in _PRODUCTS:
                raise _error(entry, f"`{_AUTOCAST_ONLY}` takes one target: {', '.join(_PRODUCTS)}")
            cast.append(found["target"])
        elif found["kind"] == _UNHEALTHY:
            if found["target"] or found["value"]:
                raise _error(entry, f"`{_UNHEALTHY}` takes no target and no value")
            unhealthy.append(_rule(entry, found))
        elif found["kind"] in _CALLS:
            rules.append(_rule(entry, found))
        else:
            kinds = [*_CALLS, *_SWITCHES, _AUTOCAST_ONLY, _UNHEALTHY]
            raise _error(entry, suggestion(found["kind"], kinds))
    return Faults(tuple(rules), frozenset(switches), tuple(cast), tuple(unhealthy))


def _rule(entry: str, found: re.Match[str]) -> FaultRule:
    kind, target, value = found["kind"], found["target"] or "", found["value"]
    if value is not None and kind not in _DEFAULTS:
        raise _error(entry, f"`{kind}` takes no value")
    return FaultRule(
        kind,
        target,
        int(found["count"] or 0),
        _value(entry, kind, value or _DEFAULTS.get(kind, "0")),
        None if found["rank"] is None else int(found["rank"]),
    )


def _value(entry: str, kind: str, text: str) -> float:
    if kind == "slow":
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text, re.ASCII)
        if found is None:
            raise _error(entry, "a time is written `500us`, `5ms` or `1s`")
        return float(found[1]) * _SECONDS[found[2]]
    try:
        return float(text)
    except ValueError:
        raise _error(entry, f"`{text}` is not a number") from None


def _error(entry: str, hint: str) -> ConfigError:
    return ConfigError(f"`{VARIABLE}`: `{entry}` is not a rule", hint=hint)
