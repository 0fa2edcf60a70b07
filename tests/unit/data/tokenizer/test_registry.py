"""Tokenizer types that plugins bring."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import types
from typing import Any

import pytest

from lmcore.base.errors import ConfigError
from lmcore.contract import PluginInfo
from lmcore.contract.registry import TokenizerRegistry
from lmcore.contract.tokenizer import Tokenizer
from lmcore.data.tokenizer import ByteTokenizer, build_tokenizer
from lmcore.data.tokenizer.build import registered_types
from lmcore.hookspecs import hookimpl
from lmcore.plugin import PluginSet, discover


class Mine(ByteTokenizer):
    """Bytes by another name."""

    name = "Mine"


def factory(**options: Any) -> Tokenizer:
    return Mine()


def plugins_of(monkeypatch: pytest.MonkeyPatch, **adds: Any) -> PluginSet:
    """Return plugins by name; each registers tokenizers by its function."""
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
    """A plugin's type is built by its name, as lmcore's own are."""
    plugins = plugins_of(monkeypatch, one=lambda registry: registry.add("Mine", factory))
    types_ = registered_types(plugins)
    assert set(types_) == {"Mine"}
    assert isinstance(build_tokenizer("Mine", extra=types_), Mine)


def test_name_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A second plugin cannot take a name; it is warned about, the first one's type stays."""
    plugins = plugins_of(
        monkeypatch,
        one=lambda registry: registry.add("Mine", factory),
        two=lambda registry: registry.add("Mine", lambda **options: None),
    )
    with caplog.at_level(logging.WARNING):
        types_ = registered_types(plugins)
    assert isinstance(build_tokenizer("Mine", extra=types_), Mine)
    assert "the tokenizer type `Mine`, which is taken" in caplog.text


def test_own_names_cannot_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor can the name of a type that lmcore has."""
    plugins = plugins_of(monkeypatch, one=lambda registry: registry.add("ByteTokenizer", factory))
    types_ = registered_types(plugins)
    assert dict(types_) == {}
    assert "`ByteTokenizer`, which is taken: it is lmcore's" in types_.failures["one"]


def test_failing_plugin(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A plugin that raises takes no other down, and is a reason why a type is not there."""

    def fail(registry: TokenizerRegistry) -> None:
        raise ZeroDivisionError("bug")

    plugins = plugins_of(monkeypatch, bad=fail, good=lambda registry: registry.add("Mine", factory))
    types_ = registered_types(plugins)
    assert set(types_) == {"Mine"}
    assert "bad" in caplog.text
    with pytest.raises(ConfigError, match="unknown tokenizer type `Yours`") as caught:
        build_tokenizer("Yours", extra=types_)
    assert "ZeroDivisionError: bug" in str(caught.value.why)
