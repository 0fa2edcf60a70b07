"""Manifests of Kubernetes that start programs: the commands of their containers, never run.

Templates for `envsubst` are read with their variables replaced.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmcore.base.errors import ConfigError
from lmcore.config.file.yaml_file import check_nodes
from lmcore.config.foreign.shell import ShellScript, read_shell

__all__ = ["is_manifest", "read_manifest"]

_MOST_BYTES = 1 << 18
_KEYS = ("apiVersion", "kind")
_CONTAINERS = ("initContainers", "containers")
_SHELLS = frozenset({"bash", "sh"})
_OF_CONTAINER = re.compile(r"\$\(([A-Za-z_]\w*)\)")
"""Variable of a container's `env` in its `command` and `args`."""
_OF_TEMPLATE = re.compile(r"\$\{?([A-Za-z_]\w*)")
_OTHERS = (
    "the manifest's image, nodes, volumes, resources and variables belong in a profile: "
    "`lmcore launch k8s --profile FILE train run.yaml` writes the manifest of training, "
    "`lmcore launch k8s --profile FILE data prepare ...` that of preparation"
)


def is_manifest(text: str) -> bool:
    """Return True for the text of a manifest of Kubernetes."""
    return all(re.search(rf"^{key}:\s", text, re.MULTILINE) for key in _KEYS)


def read_manifest(text: str, variables: Mapping[str, str]) -> ShellScript:
    """Return the commands of a manifest's containers.

    Args:
        text: The manifest, of one document or several, or a template of it.
        variables: Values of variables of the template.

    Raises:
        ConfigError: It is no YAML, no container has a command, or the template has no variable of
            a given name.
    """
    lines = [_line(one) for one in _containers(_documents(text))]
    if not any(lines):
        raise ConfigError(
            "no container of the manifest has a command",
            why="its images start their own programs",
            hint="give the command: `lmcore migrate -- python pretrain_gpt.py ...`",
        )
    script = read_shell("\n".join(lines), variables, names=_OF_TEMPLATE.findall(text))
    script.notes.append(_OTHERS)
    return script


def _documents(text: str) -> list[Any]:
    """Return the documents of a YAML text, with all scalars as text."""
    import yaml

    fast = bool(yaml.__with_libyaml__)
    if len(text) > _MOST_BYTES:
        raise ConfigError("the manifest is longer than 256 KiB", hint="give the command alone")
    try:
        check_nodes(text, yaml.CSafeLoader if fast else yaml.SafeLoader)
        return list(yaml.load_all(text, Loader=yaml.CBaseLoader if fast else yaml.BaseLoader))
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
    except RecursionError:
        why = "its lists or mappings are nested too deeply"
    raise ConfigError(
        "the manifest is no YAML", why=why, hint="fill in the template by `envsubst`, or repair it"
    )


def _containers(documents: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the containers of all documents, in order; an object with an alias once."""
    open_: list[Any] = list(reversed(documents))
    seen: set[int] = set()
    while open_:
        one = open_.pop()
        if id(one) in seen or not isinstance(one, dict | list):
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            for key in _CONTAINERS:
                held = one.get(key)
                yield from (each for each in held or () if isinstance(each, dict))
        open_ += reversed(list(one.values()) if isinstance(one, dict) else one)


def _line(container: Mapping[str, Any]) -> str:
    """Return the command of a container as a shell would be given it; empty, if it has none.

    Variables of the container's `env` that the command names are set before it.
    """
    parts = (container.get(key) for key in ("command", "args"))
    words = [one for part in parts if isinstance(part, list) for one in part]
    if not words or not all(isinstance(one, str) for one in words):
        return ""
    named = {name for word in words for name in _OF_CONTAINER.findall(word)}
    env = container.get("env")
    values = {
        one["name"]: one["value"]
        for one in (env if isinstance(env, list) else ())
        if isinstance(one, dict) and one.get("name") in named and isinstance(one.get("value"), str)
    }
    is_script = words[0].rpartition("/")[2] in _SHELLS and len(words) > 2
    quoted = [
        shlex.quote(word) if is_script and number else _quoted(_OF_CONTAINER.sub(r"${\1}", word))
        for number, word in enumerate(words)
    ]
    return "\n".join(
        [*(f"{name}={_quoted(value)}" for name, value in values.items()), " ".join(quoted)]
    )


def _quoted(word: str) -> str:
    """Return a word in quotes in which variables are replaced."""
    return '"' + re.sub(r'(["\\`])', r"\\\1", word) + '"'
