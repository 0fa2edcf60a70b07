"""One YAML file of settings: its entries as values of options, with their lines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcore.base.errors import ConfigError, LmcoreError, nearest, suggestion
from lmcore.config.file.paths import follow_moved_paths, map_paths, path_exists
from lmcore.config.file.run_file import RunFile, damage
from lmcore.config.file.yaml_file import Entry, read_file
from lmcore.config.foreign.megatron_flags import train_flags
from lmcore.config.option import OUTPUT_PATH, Option
from lmcore.config.plugin_section import PluginSections, section_name
from lmcore.config.preset import PRESET_OPTION
from lmcore.config.section import run_options
from lmcore.config.settings import Provenance

__all__ = ["SettingsFile"]

_CORE_OPTIONS = run_options()


class SettingsFile:
    """One YAML file and the settings read from it.

    Attributes:
        damage: Missing part of a run's file, in words; None if it is complete.
        is_readable: False if nothing could be read because of what it has.
        is_whole: False if it may set options that are not in `layer` or `unread`.
        unread: Names of the options whose values in it are wrong.
    """

    def __init__(self, path: str, options: Mapping[str, Option], plugins: PluginSections) -> None:
        self.path = path
        self.options = options
        self.keys = {(option.section, option.key): option for option in options.values()}
        self.sections = tuple(dict.fromkeys(option.section for option in options.values()))
        self.left_out = {section_name(name): (name, out) for name, out in plugins.left_out.items()}
        self.layer: dict[str, tuple[Any, Provenance]] = {}
        self.preset: str | None = None
        self.notices: list[str] = []
        self.run_directories: list[Path] = []
        self.run_file: RunFile | None = None
        self.damage: str | None = None
        self.is_readable = True
        self.is_whole = True
        self.unread: set[str] = set()

    def read(self, problems: list[LmcoreError]) -> None:
        """Fill layer, preset and notices; add every problem to *problems*."""
        names = (*self.sections, *self.left_out, *self.options, PRESET_OPTION.name)
        known = len(problems)
        file = read_file(self.path, problems, names)
        self.is_readable = bool(file.entries) or len(problems) == known
        self.is_whole = len(problems) == known
        self.run_file = run_file = RunFile.of(file.text)
        for entry in file.entries:
            where = f"{self.path}:{entry.line}"
            values = entry.value if isinstance(entry.value, list) else [entry.value]
            words = ["" if value is None else str(value) or '""' for value in values]
            named = self.options.get(entry.key)
            is_list = isinstance(entry.value, list) and not (named and named.repeated)
            text = f"[{', '.join(words)}]" if is_list else " ".join(words)
            shown = f"{where}: `{entry.key}: {text}`"
            option: Option | None = None
            try:
                if (entry.section, entry.key) == ("", PRESET_OPTION.name):
                    self.preset = PRESET_OPTION.convert(entry.value, where=shown)
                elif option := self._option_of(entry, where):
                    value, origin = option.convert(entry.value, where=shown), ""
                    if run_file is not None:
                        if run_file.is_default(option, value, entry.comment):
                            continue
                        origin = run_file.origin(option, value, entry.comment)
                    if run_file is None or not run_file.earlier:
                        value = self._located(option, value, shown)
                    self.layer[option.name] = (value, Provenance("file", where, origin))
            except ConfigError as problem:
                problems.append(problem)
                if option is None:
                    self.is_whole = False
                else:
                    self.unread.add(option.name)
        self._follow_moved(run_file)
        self.damage = damage(file.text, len(self.layer))

    def _follow_moved(self, run_file: RunFile | None) -> None:
        """Find files that were moved together with the run directory that has this file."""
        if run_file is not None and not run_file.earlier:
            directory = Path(self.path).parent
            self.run_directories.append(directory)
            self.notices += follow_moved_paths(
                self.layer, self.options, run_file.directory, directory
            )

    def _located(self, option: Option, value: Any, shown: str) -> Any:
        """Return the value with its relative paths taken as relative to the file.

        Raises:
            ConfigError: A path to read is there relative to the working directory only.
        """
        folder = Path(self.path).parent

        def locate(path: str) -> str:
            located = path if folder == Path() else str(folder / path)
            if located != path and path_exists(path) and not path_exists(located):
                if option.paths != OUTPUT_PATH:
                    raise ConfigError(
                        f"{shown}: there is no `{located}`",
                        why="a relative path in a file is relative to the file",
                        hint=f"`{path}` is in the working directory: write "
                        f"`{os.path.relpath(path, folder)}`",
                    )
                self.notices.append(f"{shown} is `{located}`: relative to the file")
            return located

        return map_paths(option, value, locate)

    def _option_of(self, entry: Entry, where: str) -> Option | None:
        """Return the option that an entry sets; None for the entry of a section."""
        name = entry.section or entry.key
        if name not in self.sections:
            if not (entry.section and entry.key):  # else reported at the section's own entry
                self._unknown_section(name, entry, where)
            return None
        if not entry.section:
            if entry.value is None:
                return None
            raise ConfigError(
                f"{where}: section `{name}` holds no settings",
                why="it is a value, not a mapping",
                hint="write its settings below it, indented",
            )
        if entry.key == "":
            return None
        option = self.keys.get((entry.section, entry.key))
        if option is not None:
            return option
        owner = _CORE_OPTIONS.get(entry.key)
        if owner is not None:
            hint = f"move it below `{owner.section}:`"
            raise ConfigError(f"{where}: `{entry.key}` is not in `{entry.section}`", hint=hint)
        raise ConfigError(f"{where}: unknown key `{entry.key}`", hint=self._key_hint(entry))

    def _unknown_section(self, name: str, entry: Entry, where: str) -> None:
        """Ignore the section of a plugin that the user has turned off.

        Raises:
            ConfigError: Any other section that is not known here.
        """
        if not entry.section and name in self.options:
            option = self.options[name]
            key = f" as `{option.key}`" if option.key != name else ""
            hint = f"move it below `{option.section}:`{key}"
            raise ConfigError(f"{where}: `{name}` is outside its section", hint=hint)
        delete = f"delete the section `{name}:` from `{self.path}`"
        if name in self.left_out:
            plugin, out = self.left_out[name]
            if out.wanted:
                self.notices.append(f"{where}: section `{name}` is ignored: {out.reason}")
                return
            raise ConfigError(
                f"{where}: the settings of plugin `{plugin}` cannot be read",
                why=f"plugin `{plugin}` {out.reason}",
                hint=f"fix the plugin; to continue without it, {delete}",
            )
        known = [*self.sections, PRESET_OPTION.name]
        hint = suggestion(name, known)
        longer = [section for section in known if len(name) > 2 and section.startswith(name)]
        if longer and nearest(name, known) is None:
            hint = f"did you mean `{longer[0]}`? {hint}"
        elif entry.section:
            hint += f"; if it belongs to a plugin `{name}`, install that, or {delete}"
        raise ConfigError(
            f"{where}: unknown section `{name}`",
            why="neither lmcore nor an installed plugin has a section of this name",
            hint=hint,
        )

    def _key_hint(self, entry: Entry) -> str:
        foreign = train_flags().get("--" + entry.key.replace("_", "-"))
        if foreign is not None and foreign.replacement:
            return f"here it is `{foreign.replacement.removeprefix('--').replace('-', '_')}`"
        own = [key for section, key in self.keys if section == entry.section]
        close = nearest(entry.key, own)
        if close is not None:
            return f"did you mean `{close}`?"
        elsewhere = nearest(entry.key, [key for _, key in self.keys])
        if elsewhere is None:
            return suggestion(entry.key, own)
        section = next(section for section, key in self.keys if key == elsewhere)
        return f"did you mean `{elsewhere}` of `{section}`?"
