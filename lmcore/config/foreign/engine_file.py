"""DeepSpeed's JSON file, `--deepspeed-config`, as a source of settings.

A value that is also a setting here (batch sizes, precision, ZeRO stage ...) becomes that setting,
as from a YAML file; a value that the user also gives here must be the same.  "auto" leaves a value
to the settings here.  Other values are passed on by DeepSpeed's engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import ConfigError, LmcoreError, nearest
from lmcore.base.missing_path import missing_path_hint
from lmcore.config.foreign.engine_file_keys import (
    IDLE,
    KNOWN,
    NATIVE_IDLE,
    NATIVE_REFUSED,
    REFUSED,
)
from lmcore.config.option import Option

__all__ = ["AUTO", "EngineFile", "Found", "of_an_engine", "read_engine_file", "value_at"]

AUTO = "auto"
"""Value in a file that leaves a setting to the program."""

_MAX_BYTES = 1 << 20
_MARKS = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"}
"""Keys that files of lmcore's settings do not have."""
_MAX_SCALE_POWER = 127

_DIRECT = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_clipping": "clip_grad",
    "zero_optimization.stage": "zero_stage",
    "optimizer.params.lr": "lr",
    "optimizer.params.eps": "adam_eps",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.momentum": "sgd_momentum",
}
"""Option of the same meaning, by path of the value in the file."""

_SCALE = {
    "fp16.min_loss_scale": "min_loss_scale",
    "fp16.loss_scale_window": "loss_scale_window",
    "fp16.hysteresis": "hysteresis",
}
_HALVES = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
"""Precision by the section that turns it on."""
_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "sgd": "sgd"}


@dataclass(frozen=True)
class Found:
    """A setting found in a file.

    Attributes:
        value: Value of the setting.
        shown: File, path and value as in the file, for messages: "ds.json: fp16.hysteresis: 2".
    """

    value: Any
    shown: str

    @property
    def where(self) -> str:
        """The file and the path in it."""
        return self.shown.rpartition(":")[0]


class EngineFile:
    """DeepSpeed's file at a path; call `read` first.

    Attributes:
        is_readable: False if it cannot be read.
        unread: Names of the options whose values in it are wrong.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.content: dict[str, Any] = {}
        self.is_readable = False
        self.unread: set[str] = set()

    def read(self) -> None:
        """Read the file.

        Raises:
            ConfigError: See `read_engine_file`.
        """
        self.content = read_engine_file(self.path)
        self.is_readable = True

    def layer(
        self,
        options: Mapping[str, Option],
        given: Mapping[str, tuple[Any, str]],
        problems: list[LmcoreError],
    ) -> dict[str, tuple[Any, str]]:
        """Return the settings of the file by option: the value and its location in the file.

        Args:
            options: All options of a run.
            given: Settings that the user gave elsewhere, by option: the value, and its text.
            problems: List to which wrong values and contradictory settings are added.
        """
        taken: dict[str, tuple[Any, str]] = {}
        for name, found in _settings(self.path, self.content).items():
            try:
                value = options[name].convert(found.value, where=f"`{found.shown}`")
            except ConfigError as problem:
                problems.append(problem)
                self.unread.add(name)
                continue
            if name in given and given[name][0] not in {None, value}:
                problems.append(self._contradiction(given[name][1], found))
            taken[name] = value, found.where
        off = _disabled(self.content, given.get("precision", (None, ""))[0])
        if off:
            shown = f"{self.path}: {off}.enabled: false"
            problems.append(self._contradiction(given["precision"][1], Found(off, shown)))
        return taken

    def _contradiction(self, given: str, found: Found) -> ConfigError:
        return ConfigError(
            f"`{given}` and `{found.shown}` contradict each other",
            why="a run has one value of each setting, here and in DeepSpeed's file",
            hint=f'keep one of them; "auto" in `{self.path}` takes the value from here',
        )

    def problems(self) -> list[LmcoreError]:
        """Return a problem for each value that is not supported here."""
        return [*_problems(self.path, self.content)]

    def native_problems(self) -> list[LmcoreError]:
        """Return a problem for each value that the native engine does not support."""
        zero = self.content.get("zero_optimization")
        return [
            ConfigError(
                f"`{self.path}: zero_optimization.{name}` is not supported by the native engine",
                why=why,
                hint=hint,
            )
            for name, (why, hint) in NATIVE_REFUSED.items()
            if isinstance(zero, Mapping) and not _is_off(name, zero.get(name))
        ]

    def notices(self) -> list[str]:
        """Return a line for each value that has no effect."""
        return [*_notices(self.path, self.content)]

    def native_notice(self) -> str | None:
        """Return a message about all keys that have no effect with the native engine, if any."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in NATIVE_IDLE.items():
            value = self.content.get(name)
            if name == "zero_optimization":
                known = {"stage", "cpu_offload", "offload_optimizer", *NATIVE_REFUSED}
                names = [
                    f"{name}.{key}"
                    for key, one in (value.items() if isinstance(value, Mapping) else ())
                    if key not in known and not _is_off(key, one)
                ]
            else:
                names = [] if _is_off(name, value) else [name]
            if names:
                by_reason.setdefault(reason, []).extend(f"`{key}`" for key in names)
        lines = [f"  {', '.join(keys)}: {reason}" for reason, keys in by_reason.items()]
        head = f"{self.path}: without effect with the native engine:"
        return "\n".join([head, *lines]) if lines else None

    @property
    def accumulation_steps(self) -> int | None:
        """Number of micro-batches in a step; None if the file does not set it."""
        value = value_at(self.content, "gradient_accumulation_steps")
        return value if _whole(value) and value > 0 else None


def read_engine_file(path: str) -> dict[str, Any]:
    """Return the object in the file at *path*.

    Raises:
        ConfigError: It cannot be read, is no JSON object, or repeats a key.
    """
    try:
        content = read_bounded_file(path, _MAX_BYTES)
    except OSError as error:
        raise ConfigError(
            f"cannot read DeepSpeed's file `{path}`",
            why=error.strerror or str(error),
            hint=missing_path_hint(path, "check the path of `--deepspeed-config`"),
        ) from error
    try:
        found = json.loads(
            content.decode("utf-8-sig"), object_pairs_hook=_once, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"`{path}` is not JSON",
            why=str(error),
            hint="DeepSpeed's file is one JSON object, such as "
            '{"zero_optimization": {"stage": 2}}',
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"`{path}` is not a JSON object", why="DeepSpeed's settings are a JSON object"
        )
    return found


def of_an_engine(path: str, keys: Collection[str]) -> tuple[str, str] | None:
    """Return what a file is, and a hint, if it is no file of lmcore's settings but an engine's.

    Args:
        path: Path of the file.
        keys: Keys at its top.
    """
    if not _MARKS.intersection(keys):
        return None
    return "it is a configuration of DeepSpeed", f"give it by `--deepspeed-config {path}`"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`{twice}` is given twice")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def value_at(content: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted *path*; None if it is missing or "auto"."""
    found: Any = content
    for name in path.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return None if found == AUTO else found


def _settings(path: str, content: Mapping[str, Any]) -> dict[str, Found]:
    """Return the settings in a file, by option."""
    found: dict[str, Found] = {}

    def take(name: str, where: str, value: Any) -> None:
        if value is not None and value != AUTO:
            found[name] = Found(value, f"{path}: {where}: {json.dumps(value_at(content, where))}")

    for where, name in _DIRECT.items():
        take(name, where, value_at(content, where))
    betas = value_at(content, "optimizer.params.betas")
    if _is_pair(betas):
        take("adam_beta1", "optimizer.params.betas", betas[0])
        take("adam_beta2", "optimizer.params.betas", betas[1])
    kind = str(value_at(content, "optimizer.type")).lower()
    take("optimizer", "optimizer.type", _OPTIMIZERS.get(kind))
    for section, precision in _HALVES.items():
        if _enabled(content, section):
            take("precision", f"{section}.enabled", precision)
    if _enabled(content, "fp16"):
        _take_scale(content, take)
    take("cpu_offload", *_offload(content))
    return found


def _take_scale(content: Mapping[str, Any], take: Callable[[str, str, Any], None]) -> None:
    fixed = value_at(content, "fp16.loss_scale")
    take("loss_scale", "fp16.loss_scale", fixed)
    if fixed:  # DeepSpeed reads the other values only if the scale is dynamic
        return
    power = value_at(content, "fp16.initial_scale_power")
    if _is_power(power):
        take("initial_loss_scale", "fp16.initial_scale_power", 2.0**power)
    for where, name in _SCALE.items():
        take(name, where, value_at(content, where))


def _enabled(content: Mapping[str, Any], section: str) -> bool:
    return value_at(content, f"{section}.enabled") is True


def _disabled(content: Mapping[str, Any], precision: str | None) -> str:
    """Return the section that turns *precision* off; empty if none does."""
    sections = (name for name, half in _HALVES.items() if half == precision)
    return next((one for one in sections if value_at(content, f"{one}.enabled") is False), "")


def _offload(content: Mapping[str, Any]) -> tuple[str, bool | None]:
    """Return the path of the value, and True if the optimizer state is in host memory."""
    where = "zero_optimization.offload_optimizer.device"
    device = value_at(content, where)
    if device in {"cpu", "none"}:
        return where, device == "cpu"
    older = value_at(content, "zero_optimization.cpu_offload")
    return "zero_optimization.cpu_offload", older if isinstance(older, bool) else None


def _problems(path: str, content: Mapping[str, Any]) -> Iterator[LmcoreError]:
    for name in content:
        if name in REFUSED and not _is_off(name, content[name]):
            yield ConfigError(
                f"`{path}: {name}` is not supported by lmcore",
                why=REFUSED[name],
                hint=_instead(name, content[name]),
            )
    for name in ("fp16", "bf16", "bfloat16", "zero_optimization", "optimizer", "data_types"):
        if name in content and not isinstance(content[name], Mapping):
            yield ConfigError(
                f"`{path}: {name}` is not a JSON object",
                why=f"found {json.dumps(content[name])[:80]}",
            )
    halves = [name for name in _HALVES if _enabled(content, name)]
    if "fp16" in halves and len(halves) > 1:
        yield ConfigError(
            f"`{path}` enables `fp16` and `{halves[1]}`",
            why="a run has one precision",
            hint="disable one of them",
        )
    yield from _optimizer_problems(path, content)
    yield from _number_problems(path, content)
    for part in ("offload_optimizer", "offload_param"):
        if value_at(content, f"zero_optimization.{part}.device") == "nvme":
            yield ConfigError(
                f"`{path}: zero_optimization.{part}.device` is `nvme`",
                why="checkpoints cannot contain optimizer state that is swapped to files",
                hint="use `cpu`",
            )
    if value_at(content, "zero_optimization.compute_grad_norm") is False:
        yield ConfigError(
            f"`{path}: zero_optimization.compute_grad_norm` is false",
            why="the gradient norm is needed to detect an overflow and skip the step",
            hint="delete it from the file",
        )


_SEVERAL_PARTS = ("compression_training", "data_efficiency")
"""Sections that are off if each of their parts is."""
_OFF: tuple[Any, ...] = (None, False, {}, [], AUTO)
_OFF_SIZES = {
    "autotp_size": (0, 1),
    "mics_shard_size": (-1, 0),
    "sequence_parallel_size": (1,),
    "tp_size": (0, 1),
    "zero_hpz_partition_size": (0, 1),
}
"""Sizes that divide nothing, by key."""


def _is_off(name: str, value: Any) -> bool:
    """Return True if a section or value turns nothing on."""
    if value in _OFF or value in _OFF_SIZES.get(name, ()):
        return True
    if not isinstance(value, Mapping):
        return False
    if value.get("enabled") is False or value.get("device") == "none":
        return True
    if name == "tensor_parallel":
        return all(_is_off(key, one) for key, one in value.items())
    switches = [*_switches({k: v for k, v in value.items() if k != "enabled"})]
    return name in _SEVERAL_PARTS and bool(switches) and not any(switches)


def _switches(section: Mapping[str, Any]) -> Iterator[bool]:
    """Yield the values of `enabled` in a section, at any depth."""
    for name, value in section.items():
        if name == "enabled":
            yield value is not False
        elif isinstance(value, Mapping):
            yield from _switches(value)


def _instead(name: str, section: Any) -> str:
    """Return the hint for a section that is refused."""
    delete = f"delete `{name}` from the file"
    if name != "scheduler" or not isinstance(section, Mapping):
        return delete
    values = section.get("params")
    values = values if isinstance(values, Mapping) else {}
    decay = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    style = decay.get(str(section.get("type")))
    if style is None:
        return f"{delete}, and choose another schedule by `--lr-decay-style`"
    flags = [f"--lr-decay-style {style}"]
    for flag, key in (
        ("--lr", "warmup_max_lr"),
        ("--lr-warmup-iters", "warmup_num_steps"),
        ("--lr-decay-iters", "total_num_steps"),
    ):
        if values.get(key) not in (None, AUTO):
            flags.append(f"{flag} {values[key]}")
    return f"{delete}, and give `{' '.join(flags)}`"


def _number_problems(path: str, content: Mapping[str, Any]) -> Iterator[LmcoreError]:
    """Check values that do not become a setting alone."""
    power = value_at(content, "fp16.initial_scale_power")
    if _enabled(content, "fp16") and power is not None and not _is_power(power):
        yield ConfigError(
            f"`{path}: fp16.initial_scale_power: {json.dumps(power)[:40]}` is out of range",
            why=f"the initial loss scale is 2 to that power, 0 to {_MAX_SCALE_POWER}",
        )
    steps = value_at(content, "gradient_accumulation_steps")
    if steps is not None and not (_whole(steps) and steps > 0):
        yield ConfigError(
            f"`{path}: gradient_accumulation_steps: {json.dumps(steps)[:40]}` is not a number of "
            "micro-batches"
        )


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _is_power(value: Any) -> bool:
    return _whole(value) and 0 <= value <= _MAX_SCALE_POWER


def _optimizer_problems(path: str, content: Mapping[str, Any]) -> Iterator[LmcoreError]:
    kind = value_at(content, "optimizer.type")
    if kind is not None and str(kind).lower() not in _OPTIMIZERS:
        yield ConfigError(
            f"`{path}: optimizer.type: {json.dumps(kind)[:60]}` is not an optimizer of this engine",
            why="lmcore computes the update itself; it accepts the types Adam, AdamW and SGD",
            hint='use "AdamW", or delete `optimizer` from the file',
        )
    if value_at(content, "optimizer.params.adam_w_mode") is False:
        yield ConfigError(
            f"`{path}: optimizer.params.adam_w_mode` is false",
            why="the weight decay of `--optimizer adam` is decoupled",
            hint="delete it from the file",
        )
    betas = value_at(content, "optimizer.params.betas")
    if betas is not None and not _is_pair(betas):
        yield ConfigError(f"`{path}: optimizer.params.betas` is not a list of two numbers")


def _notices(path: str, content: Mapping[str, Any]) -> Iterator[str]:
    for name in content:
        if name in IDLE:
            yield f"{path}: `{name}` changes nothing: {IDLE[name]}"
        elif name not in KNOWN and name not in REFUSED:
            close = nearest(name, KNOWN)
            meant = f"; did you mean `{close}`?" if close else ""
            yield f"{path}: `{name}` is not a known setting of DeepSpeed{meant}"
    if _enabled(content, "fp16"):
        for name in ("auto_cast", "consecutive_hysteresis"):
            if value_at(content, f"fp16.{name}"):
                yield f"{path}: `fp16.{name}` changes nothing: lmcore adjusts the loss scale"
    for where in ("fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads"):
        if value_at(content, where):
            yield f"{path}: `{where}` changes nothing: master weights and gradients are fp32"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
