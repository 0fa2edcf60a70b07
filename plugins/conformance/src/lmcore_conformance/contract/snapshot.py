"""The plugin contract as data: the contract of the installed lmcore, and snapshots by version.

`describe_contract` reads the code: the hooks, every type that can be reached from a hook's
arguments or result, the functions that plugins call, the ops.  The result is JSON;
`versions/<version>.json` are the snapshots, made by `python docs/generate.py`.  `diff` compares two
of them, `lmcore plugin check` holds a plugin against one.  Loads no torch.
"""

from __future__ import annotations

import inspect
import json
import re
from importlib import resources
from typing import Any

from packaging.version import Version

import lmcore.contract as lmcore_contract
from lmcore import hookspecs, old_paths
from lmcore.base.errors import ConfigError, PluginError, suggestion
from lmcore.contract.probe import API_VERSION
from lmcore_conformance.contract.diff import version_problem
from lmcore_conformance.contract.surface import PUBLIC_MODULES, describe_functions, public_classes
from lmcore_conformance.contract.torch_needs import describe_torch_needs
from lmcore_conformance.contract.types import describe_ops, describe_types

__all__ = [
    "HOOK_FIELDS",
    "contract_versions",
    "describe_contract",
    "load_contract",
    "parse_hook_docstring",
    "renewed_contract",
    "specified_hooks",
]

HOOK_FIELDS = {"Called by": "called_by", "When": "when", "Ranks": "ranks", "Return": "returns"}
"""The lines of a hook's docstring, and the key of each in a snapshot."""

_FOLDER = "versions"


def specified_hooks() -> dict[str, Any]:
    """Return the functions that specify the hooks, by name, in the order of the page."""
    return {
        name: function
        for name, function in vars(hookspecs).items()
        if hasattr(function, f"{hookspecs.PROJECT}_spec")
    }


def describe_contract() -> dict[str, Any]:
    """Return the contract of this lmcore as JSON values.

    Keys: `api` (the version); `hooks`, `types`, `functions` and `ops` by name; `names`, further
    names of `lmcore.contract`; `modules`, the names that each public module offers;
    `moved`, the new name of each module that has a former one; and `torch`, the functions of torch
    that the core calls for a device.
    """
    hooks = specified_hooks()
    offered = {name: getattr(lmcore_contract, name) for name in sorted(lmcore_contract.__all__)}
    own_functions = [function for function in offered.values() if inspect.isfunction(function)]
    types = describe_types([*hooks.values(), *own_functions], public_classes())
    functions = describe_functions()
    return {
        "api": API_VERSION,
        "hooks": {name: _describe_hook(hook) for name, hook in hooks.items()},
        "types": types,
        "functions": functions,
        "names": [name for name in offered if name not in {*types, *functions}],
        "modules": {module: list(names) for module, names in PUBLIC_MODULES.items()},
        "moved": dict(old_paths.MOVED),
        "ops": describe_ops(),
        "torch": describe_torch_needs(),
    }


def _describe_hook(hook: Any) -> dict[str, Any]:
    summary, fields = parse_hook_docstring(inspect.getdoc(hook) or "")
    signature = inspect.signature(hook)
    return {
        "arguments": {
            name: str(parameter.annotation) for name, parameter in signature.parameters.items()
        },
        "result": str(signature.return_annotation),
        "summary": summary,
        **{key: fields.get(title, "") for title, key in HOOK_FIELDS.items()},
    }


def parse_hook_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the first paragraph, and the text of each `Title: ...` with its continuation lines."""
    titles = "|".join(HOOK_FIELDS)
    first, *parts = re.split(rf"^({titles}):", text, flags=re.MULTILINE)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return " ".join(first.split()), {title: " ".join(body.split()) for title, body in pairs}


def contract_versions() -> list[str]:
    """Return the versions whose snapshots are shipped, oldest first."""
    folder = resources.files(__package__) / _FOLDER
    names = [
        path.name.removesuffix(".json") for path in folder.iterdir() if path.name[-5:] == ".json"
    ]
    return sorted(names, key=Version)


def load_contract(version: str) -> dict[str, Any]:
    """Return the snapshot of a version of the contract; `frozen` is True if it was released.

    Raises:
        ConfigError: This lmcore ships none for that version.
    """
    known = contract_versions()
    if version not in known:
        raise ConfigError(
            f"there is no snapshot of version `{version}` of the plugin contract",
            hint=suggestion(version, known),
        )
    path = resources.files(__package__) / _FOLDER / f"{version}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def renewed_contract() -> str:
    """Return the text that the snapshot of `API_VERSION` should have.

    Raises:
        PluginError: The version is released, and the code has another contract.
    """
    current = describe_contract()
    shipped = load_contract(API_VERSION) if API_VERSION in contract_versions() else {}
    frozen = bool(shipped.get("frozen"))
    problem = version_problem(shipped, current) if frozen else None
    if problem is not None:
        raise PluginError("the plugin contract changed after its release", why=problem)
    return json.dumps({"frozen": frozen, **current}, indent=1, ensure_ascii=False) + "\n"
