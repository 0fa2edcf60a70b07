"""The types, functions and ops of the plugin contract as JSON values; part of `describe_contract`.

Types are found, not listed: all of `lmcore.contract` that a hook's arguments or result lead to.
The signatures of the ops are read from the source of their references, whose import needs torch.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from lmcore.contract.op.spec import OP_SPECS

__all__ = [
    "describe_function",
    "describe_ops",
    "describe_source_function",
    "describe_types",
    "source_names",
]

_CONTRACT = "lmcore.contract"

Described = dict[str, Any]


def describe_function(function: Callable[..., Any]) -> Described:
    """Return a function's parameters and result."""
    signature = inspect.signature(function)
    return {
        "parameters": [_parameter(parameter) for parameter in signature.parameters.values()],
        "result": _text(signature.return_annotation),
    }


def describe_source_function(module: str, name: str) -> Described | None:
    """Return the same from the source of a function whose import needs torch; None for a class."""
    definition = _definition(module, name)
    if definition is None:
        return None
    result = ast.unparse(definition.returns) if definition.returns else ""
    return {"parameters": _source_parameters(definition), "result": result}


def source_names(module: str) -> tuple[str, ...]:
    """Return `__all__` from the source of a module whose import needs torch."""
    (names,) = (
        node.value
        for node in _module_body(module)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return tuple(ast.literal_eval(names))


def describe_types(
    roots: Iterable[Callable[..., Any]], classes: Iterable[type] = ()
) -> dict[str, Described]:
    """Return *classes* and the types that the annotations of *roots* lead to, by name."""
    waiting = [*classes, *(cls for root in roots for cls in _types_named_by(root))]
    found: dict[str, type] = {}
    while waiting:
        cls = waiting.pop()
        if found.setdefault(cls.__name__, cls) is not cls:
            raise ValueError(f"two types of the plugin contract are called `{cls.__name__}`")
        waiting += [more for more in _types_inside(cls) if more.__name__ not in found]
    return {name: _describe_type(found[name]) for name in sorted(found)}


def describe_ops() -> dict[str, Described]:
    """Return every op with its schema and the parameters of its reference."""
    return {
        spec.name: {
            "schema": spec.schema,
            "summary": spec.summary,
            "parameters": _reference_parameters(spec.reference),
            "gradients": list(spec.gradients),
            "attributes": list(spec.attributes),
        }
        for spec in OP_SPECS
    }


def _describe_type(cls: type) -> Described:
    if issubclass(cls, enum.Enum):
        return {"kind": "enum", "values": {member.name: member.value for member in cls}}
    described: Described = {"kind": "record" if dataclasses.is_dataclass(cls) else "class"}
    if dataclasses.is_dataclass(cls):
        described["fields"] = [_field(field) for field in dataclasses.fields(cls) if field.init]
    else:
        described["fields"] = [
            {"name": name, "type": _text(annotation), "default": hasattr(cls, name)}
            for owner in _bases(cls)
            for name, annotation in vars(owner).get("__annotations__", {}).items()
            if not name.startswith("_")
        ]
    described["methods"] = {name: _method(cls, member) for name, member in _public_members(cls)}
    return described


def _field(field: dataclasses.Field[Any]) -> Described:
    missing = dataclasses.MISSING
    has_default = field.default is not missing or field.default_factory is not missing
    return {"name": field.name, "type": _text(field.type), "default": has_default}


def _public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield a class's own methods and properties, and what a call of an instance means."""
    fields = (
        {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    )
    members = {name: member for owner in _bases(cls) for name, member in vars(owner).items()}
    for name, member in members.items():
        function = _function_of(member)
        public = name == "__call__" or not name.startswith("_")
        if function is not None and public and name not in fields:
            yield name, member


def _bases(cls: type) -> list[type]:
    """Return the class and its bases in the contract, bases first."""
    return [base for base in reversed(cls.__mro__) if base.__module__.startswith(_CONTRACT)]


def _function_of(member: Any) -> Callable[..., Any] | None:
    if isinstance(member, property):
        return member.fget
    if isinstance(member, classmethod | staticmethod):
        return member.__func__
    return member if inspect.isfunction(member) else None


def _method(owner: type, member: Any) -> Described:
    function = _function_of(member)
    assert function is not None
    described = describe_function(function)
    if not isinstance(member, staticmethod):
        described["parameters"] = described["parameters"][1:]
    described["kind"] = type(member).__name__ if not inspect.isfunction(member) else "method"
    # What an author has to write, so that a further one breaks the plugins that are there.
    described["abstract"] = bool(
        getattr(function, "__isabstractmethod__", False) or getattr(owner, "_is_protocol", False)
    )
    return described


def _parameter(parameter: inspect.Parameter) -> Described:
    default = parameter.default
    if inspect.isfunction(default):  # its repr has an address
        shown = f"{default.__module__}.{default.__qualname__}"
    else:
        shown = repr(default)
    return {
        "name": parameter.name,
        "type": _text(parameter.annotation),
        "kind": parameter.kind.name.lower(),
        "default": None if default is inspect.Parameter.empty else shown,
    }


def _text(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _types_inside(cls: type) -> Iterator[type]:
    """Yield the contract's types that a type's fields and methods name."""
    module = inspect.getmodule(cls)
    assert module is not None
    for owner in _bases(cls):
        for annotation in vars(owner).get("__annotations__", {}).values():
            yield from _types_in(_text(annotation), module)
    for _, member in _public_members(cls):
        function = _function_of(member)
        assert function is not None
        yield from _types_named_by(function)


def _types_named_by(function: Callable[..., Any]) -> Iterator[type]:
    module = inspect.getmodule(function)
    assert module is not None
    for annotation in function.__annotations__.values():
        yield from _types_in(_text(annotation), module)


def _types_in(annotation: str, module: ModuleType) -> Iterator[type]:
    for name in re.findall(r"[A-Za-z_]\w*", annotation):
        found = vars(module).get(name)
        origin = _typing_imports(module).get(name, "")
        if found is None and origin.startswith(_CONTRACT):
            found = getattr(importlib.import_module(origin), name)
        if isinstance(found, type) and found.__module__.startswith(_CONTRACT):
            yield found


@cache
def _typing_imports(module: ModuleType) -> dict[str, str]:
    """Return the modules of imported names, also of imports under `if TYPE_CHECKING`."""
    tree = ast.parse(inspect.getsource(module))
    return {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _reference_parameters(reference: str) -> list[Described]:
    definition = _definition(*reference.split(":"))
    assert definition is not None
    return _source_parameters(definition)


def _definition(module: str, name: str) -> ast.FunctionDef | None:
    """Return a function of a module's source; None if there is none of that name."""
    found = (
        node
        for node in _module_body(module)
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return next(found, None)


def _source_parameters(definition: ast.FunctionDef) -> list[Described]:
    """Return the parameters of a function as its source has them."""
    given = definition.args
    placed = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(placed) - len(given.defaults)) + list(given.defaults)
    kinds = ["positional_only"] * len(given.posonlyargs)
    kinds += ["positional_or_keyword"] * len(given.args) + ["keyword_only"] * len(given.kwonlyargs)
    every = zip([*placed, *given.kwonlyargs], kinds, [*defaults, *given.kw_defaults], strict=True)
    return [
        {
            "name": argument.arg,
            "type": ast.unparse(argument.annotation) if argument.annotation else "",
            "kind": kind,
            "default": None if default is None else repr(ast.literal_eval(default)),
        }
        for argument, kind, default in every
    ]


@cache
def _module_body(module: str) -> tuple[ast.stmt, ...]:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return tuple(ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body)
