"""The template of a new plugin: which files it has, and how a folder of them is written.

The template is the folder `template` of this package; its README says how it is laid out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmcore
from lmcore.base.durable import atomic_directory
from lmcore.base.errors import ConfigError
from lmcore.contract.probe import API_VERSION

__all__ = ["LICENCES", "MARK", "NewPlugin", "render", "write"]

LICENCES: Mapping[str, str] = {
    "Apache-2.0": "Apache-2.0: see `LICENSE`.",
    "MIT": "MIT: see `LICENSE`.",
    "BSD-3-Clause": "BSD-3-Clause: see `LICENSE`.",
    "proprietary": "All rights reserved.",
}
"""Licences of a new plugin, each with its line for the README."""

MARK = "# EDIT:"
"""Mark before each place that the author fills in."""

_HOST = "cpu"
_WORD = re.compile(r"@([A-Z][A-Z_]*)@")
_ENDING = ".in"
_TO_EDIT = """\
1. `src/@PACKAGE@/probe.py`: detection of the device and its software.
2. `src/@PACKAGE@/device.py`: dtypes in which the device computes.
3. `src/@PACKAGE@/conformance.toml`: abilities that it lacks, with reasons.

The lines are marked `EDIT`."""
_TO_REPLACE = """\
The host stands in for the device, for a trial. Once torch has a type for your device, write the
plugin again with `--torch-device TYPE`: its `probe.py` then detects the device."""


@dataclass(frozen=True)
class NewPlugin:
    """Properties of the plugin to write.

    Attributes:
        name: name of the plugin.
        torch_device: Device type as torch calls it; empty for a plugin without a device.
        torch_module: Package that brings it to torch; "torch" where it needs no other.
        licence: One of `LICENCES`.
        author: name, optionally with an address in angle brackets.
        year: year of the copyright.
    """

    name: str
    torch_device: str
    torch_module: str
    licence: str
    author: str
    year: int

    @property
    def distribution(self) -> str:
        """The name of the distribution."""
        return f"lmcore-{self.name.replace('_', '-')}"

    @property
    def package(self) -> str:
        """The name that Python imports."""
        return f"lmcore_{self.name}"

    @property
    def stands_in(self) -> bool:
        """True if the host is used as the device, for a trial."""
        return self.torch_device == _HOST


def render(plugin: NewPlugin) -> dict[str, str]:
    """Return the text of each file of a new plugin, by its path in the plugin's folder."""
    folder = Path(__file__).parents[1] / "template"
    layers = ["every", *_layers(plugin)]
    values = _words(plugin)
    files = {}
    for layer in layers:
        for path in sorted((folder / layer).rglob(f"*{_ENDING}")):
            name = path.relative_to(folder / layer).as_posix().removesuffix(_ENDING)
            files[_filled(name, values)] = _filled(path.read_text(encoding="utf-8"), values)
    if plugin.licence != "proprietary":
        text = (folder / "licences" / f"{plugin.licence}.txt").read_text(encoding="utf-8")
        files["LICENSE"] = _filled(text, values)
    return dict(sorted(files.items()))


def write(files: Mapping[str, str], directory: Path) -> None:
    """Write *files* into a new folder, which is complete or absent.

    Raises:
        ConfigError: The folder exists already, or cannot be made there.
    """
    if os.path.lexists(directory):
        raise _exists(directory)
    try:
        with atomic_directory(directory.absolute()) as folder:
            for name, text in files.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    except OSError as cause:
        raise _cannot_write(directory, cause) from cause


def _layers(plugin: NewPlugin) -> Sequence[str]:
    if not plugin.torch_device:
        return ["extension"]
    return ["device", "host"] if plugin.stands_in else ["device"]


def _words(plugin: NewPlugin) -> dict[str, str]:
    """Return the value of each `@WORD@`."""
    author, address = _author(plugin)
    fields = {"name": author} | ({"email": address} if address else {})
    version = ".".join(lmcore.__version__.split(".")[:2])
    owned = plugin.licence == "proprietary"
    device = bool(plugin.torch_device)
    return {
        "API": f">={API_VERSION},<{int(API_VERSION.split('.')[0]) + 1}",
        "AUTHOR": author,
        "AUTHORS": f"{{ {', '.join(f'{key} = {_toml(field)}' for key, field in fields.items())} }}",
        "CLASSIFIERS": "\n".join(f'    "{classifier}",' for classifier in _classifiers(plugin)),
        "DISTRIBUTION": plugin.distribution,
        "FIRST_STEPS": (_TO_REPLACE if plugin.stands_in else _TO_EDIT).replace(
            "@PACKAGE@", plugin.package
        ),
        "FLAG": plugin.name.replace("_", "-"),
        "IMPORTS": _imports(plugin.torch_module),
        "LICENCE": "LicenseRef-Proprietary" if owned else plugin.licence,
        "LICENCE_FILES": "" if owned else '"LICENSE"',
        "LICENCE_WORDS": LICENCES[plugin.licence],
        "LMCORE": version,
        "NAME": plugin.name,
        "PACKAGE": plugin.package,
        "PACKAGE_DATA": '"conformance.toml", "py.typed"' if device else '"py.typed"',
        "SUMMARY": f"{plugin.name} for lmcore",
        "TORCH_DEVICE": plugin.torch_device,
        "TORCH_PACKAGE": plugin.torch_module.partition(".")[0],
        "YEAR": str(plugin.year),
    }


def _imports(module: str) -> str:
    """Return the import that registers the device with torch; empty for torch's own types."""
    return "" if module == "torch" else f"import {module}  # noqa: F401  # registers the device\n"


def _author(plugin: NewPlugin) -> tuple[str, str]:
    """Return name and address of the author."""
    found = re.fullmatch(
        r"\s*(?P<name>[^<>]*?)\s*(<(?P<address>[^<>\s]+@[^<>\s]+)>)?\s*", plugin.author
    )
    if found is None or not found["name"] or not plugin.author.isprintable():
        raise ConfigError(
            f"`--author {plugin.author!r:.80}` is no name",
            hint='give a name, or a name and an address: "Ada Lovelace <ada@example.org>"',
        )
    return found["name"], found["address"] or ""


def _classifiers(plugin: NewPlugin) -> list[str]:
    private = ["Private :: Do Not Upload"] if plugin.licence == "proprietary" else []
    return [
        "Development Status :: 2 - Pre-Alpha",
        *private,
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ]


def _toml(text: str) -> str:
    """Return *text*, which is printable, as a string of TOML: JSON's escapes are TOML's too."""
    return json.dumps(text, ensure_ascii=False)


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _WORD.sub(lambda found: values[found[1]], text)


def _exists(directory: Path) -> ConfigError:
    return ConfigError(
        f"`{directory}` exists already",
        why="a new plugin gets a new folder; nothing is written over",
        hint="choose another one with `--directory`, or move that one away",
    )


def _cannot_write(directory: Path, cause: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write `{directory}`; nothing is left of it",
        why=f"{cause.strerror or cause}: {cause.filename or directory.parent}",
        hint="choose another folder with `--directory`; the one above it has to exist",
    )
