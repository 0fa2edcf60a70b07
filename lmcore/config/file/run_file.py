"""A run's `config.yaml`: written from the plan, and read with the origins that it records.

Only what the user or a preset set is a setting of the file.  Defaults, derived values and options
of one start are comments, so that flags beside the file change what is derived from them.
"""

from __future__ import annotations

import os
import shlex
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.config.file.paths import absolute_paths
from lmcore.config.file.yaml_file import written_value
from lmcore.config.option import Option

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan

__all__ = ["RunFile", "damage", "write_run_file"]

_HEADER = "# Settings of a run, written by lmcore; "
_EARLIER_HEADER = "# The settings of a run; `lmcore train"
"""First line of the files of lmcore 2026.11, in which defaults and derived values are settings and
paths are relative to the working directory."""
_DIRECTORY = "# directory: "
_HEADER_LINES = 3
_DIGESTS = "# digests of the settings above, by which an edited one is recognized:"


def write_run_file(plan: RunPlan, directory: Path | None = None) -> str:
    """Return the text of a run's `config.yaml`; `load_config` reads it back to the same plan.

    Args:
        plan: The run.
        directory: The run directory, which the file records; None to record none.
    """
    sections: dict[str, list[Option]] = {}
    for option in plan.options.values():
        sections.setdefault(option.section, []).append(option)
    lines = [
        f"{_HEADER}`lmcore train THIS_FILE --save NEW_DIR{_start(plan)}` repeats it.",
        "# Lines in comments set nothing: defaults, derived values, and options of one start only.",
    ]
    if directory is not None:
        lines.append(f"{_DIRECTORY}{_printable(os.path.abspath(directory))}")  # noqa: PTH100
    digests = []
    for section, options in sections.items():
        rows = []
        for option in options:
            origin = plan.provenance[option.name]
            value = absolute_paths(option, plan.value(option))
            text, comment = f"{option.key}: {written_value(value)}", _printable(origin.source)
            if origin.kind in {"default", "derived"}:
                rows.append((f"  # {text}", comment))
            elif option.one_start:
                rows.append((f"  # {text}", f"{comment}; of that start only"))
            else:
                rows.append((f"  {text}", comment))
                digests.append(_digest(option, value))
        width = min(max(len(text) for text, _ in rows), 48)
        owner = options[0].plugin
        # Without the plugin its section is unknown: it is written only if it has settings.
        mark = "# " if owner and all(text.startswith("  #") for text, _ in rows) else ""
        title = f"{mark}{section}:"
        lines += ["", f"{title}  # settings of the plugin {owner}" if owner else title]
        lines += [f"{text:<{width}}  # {comment}" for text, comment in rows]
    lines += ["", "# derived:"]
    lines += [f"#   {name}: {value}" for name, value in plan.derived.items()]
    lines += ["", _DIGESTS]
    lines += [f"#   {' '.join(digests[i : i + 10])}" for i in range(0, len(digests), 10)]
    return "\n".join(lines) + "\n"


def _start(plan: RunPlan) -> str:
    """Return the options of one start that a run with the weights of another needs, as flags."""
    asked = plan.config.checkpoint
    if asked.load is None:
        return ""
    if not asked.finetune and asked.save is not None:
        save, load = map(os.path.abspath, (asked.save, asked.load))
        if load == save or load.startswith(f"{save}{os.sep}"):
            return ""  # it goes on with its own checkpoints
    words = []
    for option in plan.options.values():
        value = absolute_paths(option, plan.value(option))
        if not option.one_start or option.name == "save" or value == option.default:
            continue
        words.append(option.flags[0 if value else -1])
        if option.type is not bool:
            words.append(shlex.quote(str(value)))
    return "".join(f" {_printable(word)}" for word in words)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def _digest(option: Option, value: Any) -> str:
    return f"{zlib.crc32(f'{option.name}: {written_value(value)}'.encode()):08x}"


def damage(text: str, settings: int) -> str | None:
    """Return what a run's `config.yaml` lacks as a whole; None if it is complete.

    A file with settings that lmcore did not write is complete as it is.

    Args:
        text: Content of the file.
        settings: Number of settings that were read from it.
    """
    record = RunFile.of(text)
    if record is not None:
        return None if record.is_complete else "it lacks the last lines that lmcore writes"
    if not text.strip():
        return "it is empty"
    written = len(_digests(text))
    if 0 < settings < written:
        return f"it has {settings} of the {written} settings that lmcore wrote"
    return None if settings else f"it has no setting; lmcore begins it with `{_HEADER}...`"


def _digests(text: str) -> frozenset[str]:
    """Return the digests of settings at the end of a file's text; none without them."""
    return frozenset(text.partition(_DIGESTS)[2].replace("#", " ").split())


@dataclass(frozen=True)
class RunFile:
    """Origins of settings that the comments of a run's `config.yaml` record.

    Attributes:
        earlier: True if lmcore 2026.11 wrote the file.
        digests: Digests of the settings as they were written.
        directory: Absolute path of the run directory when the file was written; None if the file
            does not record it.
        is_complete: False if the end of the file is missing.
    """

    earlier: bool
    digests: frozenset[str]
    directory: str | None = None
    is_complete: bool = True

    @classmethod
    def of(cls, text: str) -> RunFile | None:
        """Return the record of a file's text; None if lmcore did not write the file."""
        earlier = text.startswith(_EARLIER_HEADER)
        if not earlier and not text.startswith(_HEADER):
            return None
        lines = text.split("\n", _HEADER_LINES)[:_HEADER_LINES]
        found = [line.removeprefix(_DIRECTORY) for line in lines if line.startswith(_DIRECTORY)]
        directory = found[0] if found and os.path.isabs(found[0]) else None  # noqa: PTH117
        is_complete = earlier or _DIGESTS in text
        return cls(earlier, _digests(text), directory, is_complete=is_complete)

    def origin(self, option: Option, value: Any, comment: str) -> str:
        """Return where a setting came from when the file was written; empty if it was edited."""
        if self.earlier or _digest(option, value) in self.digests:
            return comment
        return ""

    def is_default(self, option: Option, value: Any, comment: str) -> bool:
        """Return True for a line that only repeats the default, in a file of lmcore 2026.11."""
        return self.earlier and comment == "default" and value == option.default
