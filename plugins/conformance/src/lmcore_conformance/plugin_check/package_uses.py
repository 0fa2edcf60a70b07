"""Names of a package, such as lmcore, that a Python file uses; reads its syntax tree.

Found are imports, also in functions and under `TYPE_CHECKING`; attributes of imported modules, also
through `getattr` with a text; `import_module` and `__import__` with a text; names that come
with `from MODULE import *`; and literals "module:function", as in `OpImpl.load`.  A text is a
literal, or literals that are joined by `+` or in an f-string.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

__all__ = ["Use", "uses_of"]

_IMPORTERS = {"import_module", "__import__", "find_spec"}

Scope = dict[str, str | None]


@dataclass(frozen=True)
class Use:
    """A name of the package in a file.

    Attributes:
        path: dotted name, "lmcore.contract.Device".
        line: line of the file.
    """

    path: str
    line: int


def uses_of(package: str, tree: ast.Module, star: Callable[[str], Collection[str]]) -> list[Use]:
    """Return the names of a package that a module uses, in the order of its lines.

    Args:
        package: name of the package, "lmcore".
        tree: syntax tree of the module.
        star: Returns the names that `from MODULE import *` imports.
    """
    reader = _Reader(package, star)
    reader.visit(tree)
    while reader.bodies:
        body, reader.scopes = reader.bodies.pop()
        for node in body:
            reader.visit(node)
    return sorted(set(reader.uses), key=lambda use: (use.line, use.path))


def _text(node: ast.AST) -> str | None:
    """Return the text of an expression of literals; None if it has other parts."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [_text(left), _text(right)]
        case ast.JoinedStr(values=values):
            parts = [_text(value) for value in values]
        case ast.FormattedValue(value=value, format_spec=None):
            parts = [_text(value)]
        case _:
            return None
    return None if None in parts else "".join(map(str, parts))


class _Reader(ast.NodeVisitor):
    """Reads a syntax tree; `scopes` maps local names to names of the package, or to None.

    Bodies of functions are read last, because they see all names of their module.
    """

    def __init__(self, package: str, star: Callable[[str], Collection[str]]) -> None:
        self.package, self.star = package, star
        self.target = re.compile(rf"{package}(\.\w+)+:\w+")
        self.scopes: list[Scope] = [{}]
        self.starred: dict[str, str] = {}
        self.bodies: list[tuple[list[ast.AST], list[Scope]]] = []
        self.uses: list[Use] = []

    def use(self, path: str | None, node: ast.expr | ast.stmt) -> None:
        """Note a name if it is one of the package."""
        if path is not None and self.owns(path):
            self.uses.append(Use(path, node.lineno))

    def owns(self, path: str) -> bool:
        """Return True if a dotted name is one of the package."""
        return path.partition(".")[0] == self.package

    def bind(self, name: str, path: str | None) -> None:
        """Bind a local name."""
        self.scopes[-1][name] = path

    def path_of(self, node: ast.AST) -> str | None:
        """Return the dotted name of an expression; None if it is none of the package."""
        match node:
            case ast.Name(id=name):
                scope = next((scope for scope in reversed(self.scopes) if name in scope), {})
                return scope.get(name)
            case ast.Attribute(value=value, attr=attribute):
                owner = self.path_of(value)
                return None if owner is None else f"{owner}.{attribute}"
            case ast.Call(func=ast.Name(id="getattr"), args=[owner_node, name_node, *_]):
                owner, text = self.path_of(owner_node), _text(name_node)
                return None if owner is None or text is None else f"{owner}.{text}"
            case ast.Call(
                func=ast.Attribute(attr=called) | ast.Name(id=called), args=[name_node, *_]
            ) if called in _IMPORTERS:
                text = _text(name_node)
                return text if text is not None and self.owns(text) else None
        return None

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.use(alias.name, node)
            top = alias.name.partition(".")[0]
            path = alias.name if alias.asname else top
            self.bind(alias.asname or top, path if self.owns(top) else None)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        ours = not node.level and node.module and self.owns(node.module)
        for alias in node.names:
            if not ours:
                self.bind(alias.asname or alias.name, None)
            elif alias.name == "*":
                self.use(node.module, node)
                self.starred |= {
                    name: f"{node.module}.{name}" for name in self.star(str(node.module))
                }
            else:
                path = f"{node.module}.{alias.name}"
                self.use(path, node)
                self.bind(alias.asname or alias.name, path)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.bind(target.id, self.path_of(node.value))

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.bind(node.id, None)
        elif not any(node.id in scope for scope in self.scopes):
            self.use(self.starred.get(node.id), node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self.path_of(node)
        if path is None:
            self.generic_visit(node)
        else:
            self.use(path, node)

    def visit_Call(self, node: ast.Call) -> None:
        self.use(self.path_of(node), node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and self.target.fullmatch(node.value):
            self.use(node.value.replace(":", "."), node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.bind(node.name, None)
        for part in (*node.decorator_list, node.args, *filter(None, [node.returns])):
            self.visit(part)
        self._later(node.args, list(node.body))

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self._later(node.args, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.bind(node.name, None)
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self.scopes.append({})
        for statement in node.body:
            self.visit(statement)
        self.scopes.pop()

    def _later(self, arguments: ast.arguments, body: list[ast.AST]) -> None:
        given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        given += filter(None, (arguments.vararg, arguments.kwarg))
        self.bodies.append((body, [*self.scopes, {argument.arg: None for argument in given}]))
