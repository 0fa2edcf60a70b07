"""YAML files of settings: a reader that keeps the line of each key, and a writer of values.

Scalars are read as text, without the types of YAML 1.1: the option's type decides, as for flags, so
that `lr: 1e-4` is a number and `name: no` a name.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import ConfigError, LmcoreError, nearest
from lmcore.base.missing_path import missing_path_hint
from lmcore.config.foreign.engine_file import of_an_engine

if TYPE_CHECKING:
    import yaml

__all__ = [
    "PROFILE_KEYS",
    "Entry",
    "YamlFile",
    "check_nodes",
    "read_file",
    "scalar",
    "written_value",
]

_MAX_BYTES = 1 << 18
"""Far above any file of settings; libyaml reads the worst of that size in about a second."""
_MAX_BYTES_IN_PYTHON = 1 << 16
"""The same without libyaml, if PyYAML was built without it."""
_MAX_DEPTH = 32
_YAML_TAGS = "tag:yaml.org,2002:"

_FILES_OF_A_RUN = {
    "summary.json": "the summary of a run",
    "metrics.jsonl": "the step records of a run",
    "environment.json": "the record of a run's environment",
    "kernels.json": "the record of a run's kernels",
    "manifest.json": "the manifest of a checkpoint",
    "tokenizer.json": "a tokenizer",
}
PROFILE_KEYS = frozenset(
    {
        *("account", "before", "chunk", "container", "container_runtime", "cpus"),
        *("cpus_per_process", "device_resource", "devices_per_node", "directives", "directory"),
        *("env", "filesystems", "hostfile", "interface", "job_name", "master_port", "memory"),
        *("modules", "more_resources", "mounts", "mpi", "mpi_options", "namespace"),
        *("node_selector", "nodes", "partition", "processes_per_node", "pull_secret", "qos"),
        *("queue", "requeue", "restarts", "resubmits", "save_seconds", "secret"),
        *("shared_memory", "srun_options", "ssh", "wall_time"),
    }
)
"""Keys of the profiles of `lmcore launch`, which a layer above this one reads."""
_HUGGING_FACE_KEYS = {"architectures", "model_type"}
_MANY_KEYS = 3
_SHOWN = 60


@dataclass(frozen=True)
class Entry:
    """One key of a file: section ("" at the top level), key, raw value, line (from 1), comment.

    The comment is the text after `#` on the line where the value ends.
    A section with keys has an entry with an empty key before its keys.
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


def read_file(path: str, problems: list[LmcoreError], sections: Collection[str] = ()) -> YamlFile:
    """Return the entries and text of the file at *path*; add its problems to *problems*.

    Values are text, lists of text, or None for an empty one.

    Args:
        path: Path of the file.
        problems: List to which problems are added.
        sections: Names that settings have at the top level; a file with many keys and none of
            these, nor a similar one, is one problem.  Empty: any names.
    """
    import yaml

    fast = bool(yaml.__with_libyaml__)
    text = _text(path, problems, _MAX_BYTES if fast else _MAX_BYTES_IN_PYTHON)
    nothing = YamlFile([], text or "")
    if text is None:
        return nothing
    loader = yaml.CSafeLoader if fast else yaml.SafeLoader
    try:
        check_nodes(text, loader)
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
    if isinstance(root, yaml.MappingNode):
        foreign = _not_settings(path, [str(key.value) for key, _ in root.value], sections)
        if foreign is None:
            return YamlFile(_Reader(path, text, problems).top(root), text)
    else:
        foreign = ConfigError(
            f"`{path}` does not hold sections",
            why=f"it begins with `{_first_line(text)}`, and the top level is not a mapping",
            hint="write a section's name and below it, indented, its settings: `training:`",
        )
    problems.append(foreign)
    return nothing


def _first_line(text: str) -> str:
    """Return the first line of a file that is not blank, for a message."""
    return next((line.strip()[:_SHOWN] for line in text.split("\n") if line.strip()), "")


def _file_of_a_run(path: str) -> ConfigError | None:
    """Return the error for a directory, or a file that lmcore wrote beside the settings of a run.

    Its hint names the run's `config.yaml`.  None for any other path.
    """
    found = Path(path)
    is_directory, written = found.is_dir(), _FILES_OF_A_RUN.get(found.name)
    if not is_directory and (written is None or not found.is_file()):
        return None
    settings = next(
        (
            folder / "config.yaml"
            for folder in [found, *found.parents[:3]]
            if (folder / "config.yaml").is_file()
        ),
        None,
    )
    hint = "an argument without a flag is a YAML file of settings"
    if settings is not None:
        hint = f"the settings of the run are in `{settings}`"
        if is_directory:
            hint += f"; `--continue {path}` continues it"
    if is_directory:
        return ConfigError(f"`{path}` is a directory, not a file of settings", hint=hint)
    return ConfigError(f"`{path}` is not a file of settings", why=f"it is {written}", hint=hint)


def _not_settings(path: str, keys: list[str], sections: Collection[str]) -> ConfigError | None:
    """Return the error for a mapping that is something else; None if it may be settings."""
    what = f"`{path}` is not a file of lmcore's settings"
    if _HUGGING_FACE_KEYS.intersection(keys):
        why = "it describes a model of Hugging Face transformers"
        hint = "write its sizes as flags, or below `model:` of a YAML file; `--preset` names models"
    elif (engine := of_an_engine(path, keys)) is not None:
        why, hint = engine
    else:
        names = [key.replace("-", "_") for key in keys]
        if sections and not {*names} & {*sections} and {*names} & PROFILE_KEYS:
            return ConfigError(
                what,
                why=f"`{next(name for name in names if name in PROFILE_KEYS)}` is a key of a "
                "profile, which describes a cluster for `lmcore launch`",
                hint=f"give it there: `lmcore launch KIND --profile {path} train ...`, where KIND "
                "is the kind of job, such as local or slurm",
            )
        similar = any(name in sections or nearest(name, sections) for name in names)
        if not sections or len(keys) <= _MANY_KEYS or similar:
            return None
        first = ", ".join(f"`{key}`" for key in keys[:_MANY_KEYS])
        why = f"none of its {len(keys)} keys is a section: {first} and others"
        hint = "write settings below their sections, as `lmcore config show` prints them"
    return ConfigError(what, why=why, hint=hint)


def check_nodes(text: str | bytes, loader: Any) -> None:
    """Check the nodes of a YAML text before they are composed.

    Raises:
        RecursionError: They are nested deeply, which overflows the stack of libyaml's composer.
        yaml.constructor.ConstructorError: One has a tag that is not YAML's own, such as `!include`:
            its program would replace the value, and read as text it is another one.
    """
    import yaml

    depth = 0
    known = {None, "!", *loader.yaml_constructors}
    for event in yaml.parse(text, Loader=loader):
        tag: Any = getattr(event, "tag", None)
        if tag not in known:
            written = tag.replace(_YAML_TAGS, "!!", 1)
            what, mark = f"the tag `{written}` is not supported", cast("Any", event.start_mark)
            raise yaml.constructor.ConstructorError(None, None, what, mark)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                raise RecursionError
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _text(path: str, problems: list[LmcoreError], max_bytes: int) -> str | None:
    known, content = _file_of_a_run(path), b""
    if known is not None:
        problems.append(known)
        return None
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
            hint = missing_path_hint(path, "an argument without a flag is a YAML file of settings")
            if path and path[0] != "-" and unicodedata.category(path[0]) == "Pd":
                name = unicodedata.name(path[0]).lower()
                hint = f"a flag begins with `--`; here it is `{path[0]}` ({name})"
        what = f"cannot read the file `{path}`"
        problems.append(ConfigError(what, why=error.strerror or str(error), hint=hint))
    return None


def _not_yaml(path: str, text: str, error: yaml.YAMLError) -> ConfigError:
    from yaml.constructor import ConstructorError

    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark is not None else path
    if isinstance(error, ConstructorError):
        return ConfigError(
            f"{where}: {error.problem}",
            why="no program replaces the value that follows it",
            hint="write the value itself, in quotes if it begins with `!`",
        )
    why = str(getattr(error, "problem", None) or str(error).partition("\n")[0])
    hint = None
    if mark is not None:
        line = [*text.split("\n"), ""][mark.line]
        if "\t" in line[: len(line) - len(line.lstrip())]:
            why, hint = "the line is indented by a tab", "indent with spaces"
        elif "another document" in why:
            why, hint = "a second document begins here", "keep one document per file"
        elif "document start" in why:
            return _no_section_first(path, text)
    return ConfigError(f"{where}: not YAML", why=why, hint=hint)


def _no_section_first(path: str, text: str) -> ConfigError:
    """Return the error for text before the first section, or for an indented first section.

    YAML takes either for a whole document, and reports the next section as what is wrong.
    """
    lines = enumerate(text.split("\n"), 1)
    number, line = next((n, one) for n, one in lines if one.strip() and one.lstrip()[0] != "#")
    if line[0] == " ":
        why = f"the first section, `{line.strip()[:_SHOWN]}`, is indented, and others are not"
        hint = "begin each section at the start of its line"
    else:
        why = f"the line `{line.strip()[:_SHOWN]}` is before the first section, such as `model:`"
        hint = "remove the line, or begin it with `#` as a comment"
    return ConfigError(f"{path}:{number}: not YAML", why=why, hint=hint)


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
        value = [scalar(item) for item in node.value] if node.id == "sequence" else scalar(node)
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


def scalar(node: yaml.Node) -> str | None:
    """Return the text of a scalar; None for null."""
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
