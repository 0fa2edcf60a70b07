"""`TrainingEngine`: the record of an engine that trains runs, and the registry of engines.

Torch-free: what needs torch is named as `module:object` and loaded when it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmcore.base.errors import LmcoreError, PluginError
from lmcore.model.known_plugins import KNOWN_PLUGINS, KnownPlugin

__all__ = ["NATIVE", "Lack", "TrainingEngine", "absent_plugins", "engine_named", "engines"]


class Lack(NamedTuple):
    """Reason why an engine cannot have a setting.

    Attributes:
        why: The reason.
        instead: Instruction for the hint, "use `--zero-stage 1`"; empty: to remove the setting.
    """

    why: str
    instead: str = ""


@dataclass(frozen=True)
class TrainingEngine:
    """Engine that runs forward and backward and updates the weights of a run.

    Attributes:
        name: Value of `--engine`.
        title: Name in messages: "torch".
        open: Function `module:object` that returns a context manager with the engine of a run, an
            `Engine` of `lmcore.train.engine`.  All processes call it with the run's `RunPlan`, its
            `Runtime`, and the `ProfilerRange` that names the parts of a step in a profile.
        by_layout: True if the parallel layout of the run divides the model, optimizer state and
            samples; False: the engine itself shards over all processes by `--zero-stage`, and
            its buffers and collectives are unknown to the core.
        lacks: Function of all settings, a `Config`: returns the options whose values the engine
            cannot have, each with its `Lack`.  Options of the layout are not its concern: without
            `by_layout` the core refuses them.
        rules: Function of the settings, a `LoadedConfig`: yields an error for each one that a run
            with this engine cannot have, besides those in `lacks`.
        compiles: Function of all settings, a `Config`: returns False if blocks must not be
            compiled.
        offloads: True if it keeps optimizer state in host memory with `--cpu-offload`.
        takes_file: True if it takes all of a file of settings that is written for such an engine;
            False: a value in it that changes memory or numbers, and has no option, is an error.
    """

    name: str
    title: str
    open: str
    by_layout: bool = False
    lacks: Callable[[Any], Mapping[str, Lack]] = lambda _: {}
    rules: Callable[[Any], Iterable[LmcoreError]] = lambda _: ()
    compiles: Callable[[Any], bool] = lambda _: True
    offloads: bool = False
    takes_file: bool = False

    def load(self) -> Any:
        """Return the function `open`.

        Raises:
            PluginError: It cannot be loaded.
        """
        module, _, name = self.open.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as cause:
            raise PluginError(
                f"the training engine `{self.name}` cannot be loaded",
                why=f"`{self.open}`: {cause}",
                hint="install the package that brings the engine, in a version that fits",
            ) from cause


NATIVE = TrainingEngine(
    name="native", title="torch", open="lmcore.train.engine:open_native_engine", by_layout=True
)
_engines: dict[str, TrainingEngine] = {NATIVE.name: NATIVE}


def engines() -> dict[str, TrainingEngine]:
    """Return the registry: every usable engine by its name."""
    return _engines


def absent_plugins() -> list[KnownPlugin]:
    """Return the known plugins whose engine is not in the registry."""
    return [one for one in KNOWN_PLUGINS if one.engine not in _engines]


def engine_named(name: str) -> TrainingEngine:
    """Return the engine of a name, in any letters.

    For a name that is unknown or not installed, which a rule of the configuration refuses, it is
    one without `open`.
    """
    name = name.lower()
    title = next((one.title for one in absent_plugins() if one.engine == name), name)
    return _engines.get(name) or TrainingEngine(name=name, title=title, open="")
