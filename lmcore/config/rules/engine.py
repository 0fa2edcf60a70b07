"""Rules for `--engine`, and for the options that only some engines have."""

from __future__ import annotations

from lmcore.base.errors import ConfigError, suggestion
from lmcore.config.engine import beyond, offloading
from lmcore.config.rules import Problems, Rule
from lmcore.config.settings import LoadedConfig
from lmcore.model.training_engine import absent_plugins, engine_named, engines

__all__ = ["ENGINE_RULES"]


def _known(loaded: LoadedConfig) -> Problems:
    name = loaded.config.parallel.engine
    engine = engine_named(name)
    if engine.open:
        return
    absent = absent_plugins()
    plugin = next((one for one in absent if one.engine == engine.name), None)
    if plugin is not None and plugin.is_installed:
        yield ConfigError(
            f"{loaded.shown('engine')} is not here",
            why=f"its package, `{plugin.package}`, is installed, but its plugin adds no engine",
            hint=f"{_native(loaded)}; `lmcore plugins` says why it is off or unusable",
        )
    elif plugin is not None:
        problem = plugin.missing(loaded.shown("engine"), all_of_it=True)
        problem.hint = f"{problem.hint}, or {_native(loaded)}"
        yield problem
    else:
        hint = suggestion(name, [*engines(), *(one.engine for one in absent)])
        yield ConfigError(
            f"{loaded.shown('engine')}: unknown engine",
            hint=f"{hint}; a plugin that brings others must be installed, see `lmcore plugins`",
        )


def _own_rules(loaded: LoadedConfig) -> Problems:
    yield from engine_named(loaded.config.parallel.engine).rules(loaded)


def _native(loaded: LoadedConfig) -> str:
    """Return the instruction that selects the native engine, for hints; it has no offload."""
    offload = " without `--cpu-offload`" * loaded.config.parallel.cpu_offload
    return f"use `--engine native`{offload}"


def _goes_with(loaded: LoadedConfig) -> Problems:
    """Refuse settings that the engine cannot have."""
    engine = engine_named(loaded.config.parallel.engine)
    for name, lack in beyond(engine, loaded.config).items():
        yield ConfigError(
            f"{loaded.shown(name)} cannot be combined with {loaded.shown('engine')}",
            why=lack.why,
            hint=f"{lack.instead or loaded.removal(name)}, or {_native(loaded)}",
        )


def _offload(loaded: LoadedConfig) -> Problems:
    """Refuse state in host memory with an engine that does not have it."""
    engine = engine_named(loaded.config.parallel.engine)
    if not loaded.config.parallel.cpu_offload or engine.offloads or not engine.open:
        return
    able = offloading()
    names = " or ".join(f"`--engine {one}`{brought}" for one, brought in able.items())
    lacks = ""
    for one in map(engine_named, able):
        others = [loaded.shown(name) for name in beyond(one, loaded.config)]
        if others:
            lacks += f", and {one.title}'s does not run {' and '.join(others)} here"
    yield ConfigError(
        f"{loaded.shown('cpu_offload')} needs {names}",
        why=f"the {engine.name} engine keeps the optimizer's state on the device{lacks}",
        hint=loaded.removal("cpu_offload") + ("" if lacks else f", or use {names}"),
    )


ENGINE_RULES: tuple[Rule, ...] = (_known, _own_rules, _goes_with, _offload)
