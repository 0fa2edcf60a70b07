"""YAML files of settings: a reader that keeps the line of each key, and a writer of values.

Scalars are read as text, without the types of YAML 1.1: the option's type decides, as for flags, so
that `lr: 1e-4` is a number and `name: no` a name.
"""

from __future__ import annotations

import codecs
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcore.bounded_file import read_bounded_file
from lmcore.errors import ConfigError, LmcoreError

if TYPE_CHECKING:
    import yaml

__all__ = ["Entry", "YamlFile", "read_file", "written_value"]

_MAX_BYTES = 1 << 18
"""Far above any file of settings; libyaml reads the worst of that size in about a second."""
_MAX_BYTES_IN_PYTHON = 1 << 16
"""The same without libyaml, if PyYAML was built without it."""
_MAX_DEPTH = 32


@dataclass(frozen=True)
class Entry:
    """One key of a file: section ("" at the top level), key, raw value, line (from 1), comment.

    The comment is the text after `#` on the line where the value ends.
    A section with keys has an entry of its own, with an empty key, before its keys.
    """

    section: str
    key: str
    value: Any
    line: int
    comment: str = ""


@dataclass(frozen=True)
class YamlFile:
    """The entries of a file of settings, and its text."""

    entries: list[Entry]
    text: str


def read_file(path: str, problems: list[LmcoreError]) -> YamlFile:
    """Return the entries and text of the file at *path*; add its problems to *problems*.

    Values are text, lists of text, or None for an empty one.
    """
    import yaml

    fast = bool(yaml.__with_libyaml__)
    text = _text(path, problems, _MAX_BYTES if fast else _MAX_BYTES_IN_PYTHON)
    nothing = YamlFile([], text or "")
    if text is None:
        return nothing
    loader = yaml.CSafeLoader if fast else yaml.SafeLoader
    try:
        _check_depth(text, loader)
        root = yaml.compose(text, Loader=loader)
    except yaml.YAMLError as error:
        problems.append(_not_yaml(path, text, error))
        return nothing
    except RecursionError:
        why = "its lists or mappings are nested too deeply"
        problems.append(ConfigError(f"{path}: not a file of settings", why=why))
        return nothing
    if root is None:
        return nothing
    if not isinstance(root, yaml.MappingNode):
        what = f"`{path}` does not hold sections"
        why = "the top level is not a mapping"
        hint = "write a section's name and below it, indented, its settings: `training:`"
    elif [key for key, _ in root.value if key.value in ("architectures", "model_type")]:
        what = f"`{path}` is not a file of lmcore's settings"
        why = "it describes a model of Hugging Face transformers"
        hint = "write its sizes as flags, or below `model:` of a YAML file; `--preset` names models"
    else:
        return YamlFile(_Reader(path, text, problems).top(root), text)
    problems.append(ConfigError(what, why=why, hint=hint))
    return nothing


def _check_depth(text: str, loader: Any) -> None:
    """Raise `RecursionError` for deep nesting, which overflows the stack of libyaml's composer."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                raise RecursionError
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _text(path: str, problems: list[LmcoreError], max_bytes: int) -> str | None:
    content = b""
    try:
        content = read_bounded_file(path, max_bytes)
        text = content.decode("utf-8-sig")
        if not text.lstrip().startswith("<"):
            return text
        why = "it begins with `<`, as HTML and XML do"
        problems.append(ConfigError(f"`{path}` is not a file of settings", why=why))
    except UnicodeDecodeError as error:
        why, hint = f"byte {error.start} cannot be decoded", None
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            why, hint = "it is UTF-16", "save it as UTF-8"
        problems.append(ConfigError(f"`{path}` is not UTF-8 text", why=why, hint=hint))
    except OSError as error:
        hint = None
        if isinstance(error, FileNotFoundError):
            hint = "an argument without a flag is a YAML file of settings"
            if path and path[0] != "-" and unicodedata.category(path[0]) == "Pd":
                name = unicodedata.name(path[0]).lower()
                hint = f"a flag begins with `--`; here it is `{path[0]}` ({name})"
        what = f"cannot read the file `{path}`"
        problems.append(ConfigError(what, why=error.strerror or str(error), hint=hint))
    return None


def _not_yaml(path: str, text: str, error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark is not None else path
    why = str(getattr(error, "problem", None) or str(error).partition("\n")[0])
    hint = None
    if mark is not None:
        line = [*text.split("\n"), ""][mark.line]
        if "\t" in line[: len(line) - len(line.lstrip())]:
            why, hint = "the line is indented by a tab", "indent with spaces"
        elif "another document" in why:
            why, hint = "a second document begins here", "keep one document per file"
    return ConfigError(f"{where}: not YAML", why=why, hint=hint)


class _Reader:
    """Reader of the nodes of one file."""

    def __init__(self, path: str, text: str, problems: list[LmcoreError]) -> None:
        self.path = path
        self.lines = text.split("\n")
        self.problems = problems

    def top(self, root: yaml.MappingNode) -> list[Entry]:
        entries: list[Entry] = []
        for key, node, line in self._pairs(root):
            if node.id == "mapping":
                entries.append(Entry(key, "", None, line))
                for name, inner, inner_line in self._pairs(node):
                    self._add(entries, Entry(key, name, inner, inner_line))
            else:
                self._add(entries, Entry("", key, node, line))
        return entries

    def _add(self, entries: list[Entry], raw: Entry) -> None:
        """Append *raw* with the value of its node, or report why the node has none."""
        node = raw.value
        nested = node.id == "sequence" and any(item.id != "scalar" for item in node.value)
        if node.id == "mapping" or nested:
            what = f"`{raw.key}` takes a value or a list of values"
            self._problem(raw.line, what, f"found a {node.id} that holds others")
            return
        value = [_scalar(item) for item in node.value] if node.id == "sequence" else _scalar(node)
        end = node.end_mark
        rest = self.lines[end.line][end.column :].strip() if end.line < len(self.lines) else ""
        comment = rest[1:].strip() if rest.startswith("#") else ""
        entries.append(Entry(raw.section, raw.key, value, raw.line, comment))

    def _pairs(self, node: yaml.MappingNode) -> list[tuple[str, Any, int]]:
        found: dict[str, tuple[str, Any, int]] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.id != "scalar":
                self._problem(line, "a key must be a name")
                continue
            key = key_node.value.replace("-", "_")
            if key in found:
                self._problem(line, f"`{key}` is given twice", f"first on line {found[key][2]}")
                continue
            found[key] = (key, value_node, line)
        return list(found.values())

    def _problem(self, line: int, what: str, why: str | None = None) -> None:
        self.problems.append(ConfigError(f"{self.path}:{line}: {what}", why=why))


def _scalar(node: yaml.Node) -> str | None:
    return None if node.tag == "tag:yaml.org,2002:null" else str(node.value)


def written_value(value: Any) -> str:
    """Return *value* as YAML on one line, which `read_file` and the option convert back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(written_value(item) for item in value) + "]"
    if isinstance(value, str):
        return _quoted(value)
    return repr(value)


def _quoted(text: str) -> str:
    plain = text[:1].isalpha() and all(char.isalnum() or char in "_-./" for char in text)
    if plain and text.isascii() and text.lower() not in {"null", "true", "false", "yes", "no"}:
        return text
    return '"' + "".join(_escaped(char) for char in text) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
