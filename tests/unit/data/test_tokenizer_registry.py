"""Tokenizer types that plugins bring."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import types
from typing import Any

import pytest

from lmcore.accelerator import PluginInfo
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.data.tokenizer.registry import TokenizerRegistry, registered_types
from lmcore.errors import PluginError
from lmcore.hookspecs import hookimpl
from lmcore.plugins import PluginSet, discover


def factory(**options: Any) -> ByteTokenizer:
    return ByteTokenizer()


def plugins_of(monkeypatch: pytest.MonkeyPatch, **adds: Any) -> PluginSet:
    """Return plugins by name, each of which registers as its function does."""
    points = []
    for name, add in adds.items():
        module = types.ModuleType(f"test_registry_{name}")
        module.lmcore_plugin_info = hookimpl(_info(name))  # type: ignore[attr-defined]
        module.lmcore_add_tokenizers = hookimpl(_adder(add))  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        points.append(importlib.metadata.EntryPoint(name, module.__name__, "lmcore.plugins"))
    return discover(env={}, entry_points=points)


def _info(name: str) -> Any:
    def lmcore_plugin_info() -> PluginInfo:
        return PluginInfo(name=name, api=">=1,<2", torch=">=2", provides=())

    return lmcore_plugin_info


def _adder(add: Any) -> Any:
    def lmcore_add_tokenizers(registry: TokenizerRegistry) -> None:
        add(registry)

    return lmcore_add_tokenizers


def test_types_of_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every usable plugin's types are found by name."""
    plugins = plugins_of(
        monkeypatch,
        one=lambda registry: registry.add("Mine", factory),
        two=lambda registry: registry.add("Yours", factory),
    )
    assert registered_types(plugins) == {"Mine": factory, "Yours": factory}


def test_name_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A second plugin cannot take a name; it is warned about, the first one's type stays."""
    plugins = plugins_of(
        monkeypatch,
        one=lambda registry: registry.add("Mine", factory),
        two=lambda registry: registry.add("Mine", dict),
    )
    with caplog.at_level(logging.WARNING):
        assert registered_types(plugins) == {"Mine": factory}
    assert "`Mine` is registered already" in caplog.text


def test_own_names_cannot_be_taken() -> None:
    """Nor can the name of a type that lmcore has, nor something that builds nothing."""
    registry = TokenizerRegistry()
    with pytest.raises(PluginError, match="`ByteTokenizer` is registered already"):
        registry.add("ByteTokenizer", factory)
    with pytest.raises(PluginError, match="`Mine` is not callable"):
        registry.add("Mine", "builder")  # type: ignore[arg-type]
    assert registry.types == {}


def test_failing_plugin(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A plugin that raises is warned about and takes no other one down."""

    def fail(registry: TokenizerRegistry) -> None:
        raise ZeroDivisionError("bug")

    plugins = plugins_of(monkeypatch, bad=fail, good=lambda registry: registry.add("Mine", factory))
    assert registered_types(plugins) == {"Mine": factory}
    assert "bad" in caplog.text
