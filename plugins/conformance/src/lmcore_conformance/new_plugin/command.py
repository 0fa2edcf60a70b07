"""`lmcore plugin new`: write the distribution of a new plugin, to be filled in."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import importlib.util
import json
import keyword
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from lmcore.base.errors import ConfigError, LmcoreError, nearest, suggestion
from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_section
from lmcore.config.section import SECTIONS
from lmcore.plugin.discovery import GROUP
from lmcore.plugin.known_packages import device_packages
from lmcore_conformance.new_plugin.template import LICENCES, MARK, NewPlugin, render, write

__all__ = ["NewSection", "run"]

_EPILOG = """\
Writes a folder with the package, its tests, files for continuous integration, a README and the
licence.  A folder that exists is left alone.

  lmcore plugin new mychip
  lmcore plugin new mychip --torch-device chip --torch-module torch_chip --licence MIT
  lmcore plugin new mychip --torch-device cpu     # a trial: the host stands in for the device
  lmcore plugin new mytools --without-device"""

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_LONGEST = 40
_OWN = ("conformance", "lmcore", "plugins", "preset", "sim")
_TORCH_TYPE = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class NewSection:
    """Write a new plugin: a distribution with tests, to be filled in."""

    name: str = option(REQUIRED, "Name of the plugin, as `--device` will take it.")
    directory: str | None = option(None, "Folder to write; default: lmcore-NAME.", metavar="DIR")
    torch_device: str | None = option(
        None,
        "Device type as torch calls it; default: NAME; cpu: the host stands in, for a trial.",
        metavar="TYPE",
    )
    torch_module: str | None = option(
        None,
        "Package that registers the type with torch, if torch does not load it itself.",
        metavar="MODULE",
    )
    without_device: bool = option(
        False, "Write a plugin without a device, which extends runs on every device."
    )
    licence: str = option("Apache-2.0", f"One of {', '.join(LICENCES)} (or none).", metavar="ID")
    author: str | None = option(
        None, 'As in "Ada Lovelace <ada@example.org>"; default: The lmcore-NAME authors.'
    )
    json: bool = option(False, "Print JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore plugin new ...` and return the exit status."""
    wanted = parse_section(
        NewSection, argv, command="lmcore plugin new", positionals=("name",), epilog=_EPILOG
    )
    plugin = _checked(wanted)
    files = render(plugin)
    directory = Path(wanted.directory or plugin.distribution)
    write(files, directory)
    if wanted.json:
        print(json.dumps(_as_dict(plugin, directory, files), indent=2))
    else:
        print("\n".join(_report(plugin, directory, files)))
    return 0


def _checked(wanted: NewSection) -> NewPlugin:
    """Return the options of the new plugin.

    Raises:
        ConfigError: All that is wrong with it.
    """
    problems: list[LmcoreError] = [*_name_problems(wanted.name)]
    device, module = wanted.torch_device, wanted.torch_module
    if wanted.without_device:
        for flag, value in (("--torch-device", device), ("--torch-module", module)):
            if value is not None:
                problems.append(ConfigError(f"`{flag}` cannot be combined with `--without-device`"))
    if device is not None and not _TORCH_TYPE.fullmatch(device):
        hint = "such a type is written in small letters, digits and underscores, and no ordinal"
        problems.append(ConfigError(f"`{device}` is no device type of torch", hint=hint))
    if module is not None and not _is_module(module):
        hint = "give the name that Python imports, such as `torch_mychip`"
        problems.append(ConfigError(f"`{module}` is no name of a Python package", hint=hint))
    lowered = {"none": "proprietary"} | {licence.lower(): licence for licence in LICENCES}
    licence = lowered.get(wanted.licence.lower())
    if licence is None:
        problems.append(_unknown_licence(wanted.licence))
    if problems:
        raise ConfigError.collect(problems)
    assert licence is not None
    return NewPlugin(
        name=wanted.name,
        torch_device="" if wanted.without_device else device or wanted.name,
        torch_module=module or "torch",
        licence=licence,
        author=wanted.author or f"The lmcore-{wanted.name.replace('_', '-')} authors",
        year=dt.datetime.now(tz=dt.UTC).year,
    )


def _name_problems(name: str) -> list[ConfigError]:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST or keyword.iskeyword(name):
        return [_no_name(name)]
    owner = _owner(name)
    if owner:
        return [
            ConfigError(
                f"a plugin cannot be called `{name}` here",
                why=owner,
                hint="choose another name; two plugins of one name are both refused",
            )
        ]
    return []


def _no_name(name: str) -> ConfigError:
    plain = re.sub(r"^lmcore[-_]", "", name.strip().lower())
    plain = re.sub(r"[^a-z0-9]+", "_", plain).strip("_")
    fits = plain != name and _NAME.fullmatch(plain) and not keyword.iskeyword(plain)
    return ConfigError(
        f"`{name:.80}` cannot be a plugin's name",
        why="it names a Python package, flags and a section of files: small letters, digits and "
        f"single underscores, a letter first, at most {_LONGEST}",
        hint=f"did you mean `{plain}`?" if fits and len(plain) <= _LONGEST else None,
    )


def _owner(name: str) -> str:
    """Return the owner of the name; empty if it is free."""
    if name in {*SECTIONS, *_OWN} or name.startswith("lmcore_"):
        return "lmcore uses the name itself"
    for point in importlib.metadata.entry_points(group=GROUP, name=name):
        owner = f"`{point.dist.name} {point.dist.version}`" if point.dist else f"`{point.value}`"
        return f"the plugin of that name comes with {owner}, which is installed"
    wanted = canonicalize_name(f"lmcore-{name}")
    for extra, package in device_packages().items():
        if canonicalize_name(package) == wanted:
            return f"lmcore's extra `{extra}` is the plugin `{package}`"
    try:
        return f"`{wanted} {importlib.metadata.version(wanted)}` is installed"
    except importlib.metadata.PackageNotFoundError:
        pass
    spec = importlib.util.find_spec(f"lmcore_{name}")
    return f"Python finds a package `lmcore_{name}` already: {spec.origin}" if spec else ""


def _is_module(name: str) -> bool:
    parts = name.split(".")
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)


def _unknown_licence(given: str) -> ConfigError:
    lowered = {licence.lower(): licence for licence in LICENCES}
    close = nearest(given.lower(), lowered) or next(
        (licence for licence in lowered if given and licence.startswith(given.lower())), None
    )
    meant = f"did you mean `{lowered[close]}`? " if close else ""
    suggested = suggestion("", LICENCES)
    return ConfigError(
        f"`--licence {given:.80}`: there is no text of this licence",
        hint=f"{meant}{suggested}; for another licence choose `proprietary`, and add its text",
    )


def _as_dict(plugin: NewPlugin, directory: Path, files: Mapping[str, str]) -> dict[str, object]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "package": plugin.package,
        "torch_device": plugin.torch_device or None,
        "licence": plugin.licence,
        "directory": str(directory),
        "files": list(files),
    }


def _report(plugin: NewPlugin, directory: Path, files: Mapping[str, str]) -> list[str]:
    """Return what to say: where it is, and what to do with it."""
    folder = shlex.quote(str(directory))
    installed = f"pip install --editable {folder if '/' in folder else f'./{folder}'}"
    steps = [(installed, "into this environment")]
    if plugin.torch_device:
        steps.append(("lmcore plugins", "what its probe finds"))
    steps.append((f"lmcore plugin check {plugin.distribution}", "what is wrong with it"))
    if plugin.torch_device:
        steps.append((f"lmcore train --device {plugin.name}", "a small GPT on a bundled text"))
    steps.append((f"python -m pytest {folder}/tests", "its own tests"))
    width = max(len(command) for command, _ in steps)
    lines = [f"wrote {directory}: {len(files)} files", "", "next:"]
    lines += [f"  {command:<{width}}  {why}" for command, why in steps]
    if plugin.stands_in:
        lines += ["", "The host stands in for the device: a trial, used only if requested."]
    elif plugin.torch_device:
        lines += ["", "yours to fill in, where it says `EDIT`:"]
        lines += [f"  {directory / path}" for path, text in files.items() if MARK in text]
    else:
        lines += ["", f"Its hooks are in {directory / 'src' / plugin.package / 'plugin.py'}."]
    return lines
