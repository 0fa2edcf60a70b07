"""Changes to a model, and the report of them: what was replaced, what was not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import LmcoreError

if TYPE_CHECKING:
    from torch import nn

    from lmcore.contract.op.records import Resolution

__all__ = ["Changes", "Kept", "KernelReport", "NotPickled", "Replaced"]

_MISSING = object()


class NotPickled:
    """An object in a changed module, which cannot be pickled: its kernels are of this process."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise LmcoreError(
            "a model with kernels cannot be pickled",
            why="the kernels are bound in this process",
            hint="save its `state_dict()`, or call `undo()` of the report of `use_kernels` before",
        )

    def __deepcopy__(self, memo: Any) -> NotPickled:
        return self


@dataclass(frozen=True)
class Replaced:
    """Modules whose forward pass runs a kernel of the device.

    Attributes:
        part: Class of the modules, or name of the part.
        count: Number of modules.
        op: Name of the op.
        kernel: Id of the kernel.
        plugin: Plugin that offers it.
    """

    part: str
    count: int
    op: str
    kernel: str
    plugin: str


@dataclass(frozen=True)
class Kept:
    """Modules that keep their own forward pass.

    Attributes:
        part: Class of the modules, or name of the part.
        count: Number of modules.
        reason: Reason, for the user.
    """

    part: str
    count: int
    reason: str


class Changes:
    """Attributes that were set on objects, with the values before."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._set: dict[tuple[int, str], tuple[Any, Any]] = {}

    def set_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Make *forward*, a function of the module and its input, the module's forward pass.

        It is an attribute of the instance: parameters, names and class stay.
        """
        self.set_attribute(module, "forward", MethodType(forward, module))
        if "_lmcore_kernels" not in vars(module):
            self.set_attribute(module, "_lmcore_kernels", NotPickled())

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute in the instance's dictionary."""
        values = vars(owner)
        before = values.get(name, _MISSING)
        values[name] = value
        self._set[id(owner), name] = (owner, value)

        def restore() -> None:
            if before is _MISSING:
                del values[name]
            else:
                values[name] = before

        self._undo.append(restore)

    def on_undo(self, restore: Callable[[], Any]) -> None:
        """Call *restore* when the changes are undone."""
        self._undo.append(restore)

    def undo(self) -> None:
        """Restore all values, the last first; restore nothing if a value was changed since.

        Raises:
            LmcoreError: A value is no longer the one that was set.
        """
        for (_, name), (owner, value) in self._set.items():
            if vars(owner).get(name) is not value:
                raise LmcoreError(
                    f"the kernels cannot be taken out of the model: `{name}` of a "
                    f"`{type(owner).__name__}` was changed since",
                    hint="undo the later change first",
                )
        self._set.clear()
        while self._undo:
            self._undo.pop()()


class KernelReport:
    """The result of `use_kernels`; `str(report)` is a table.

    Attributes:
        replaced: Modules that run kernels of the device.
        kept: Modules that do not, with the reason.
        own_calls: Number of calls, by reason, in which a replaced module ran its own forward pass:
            for example attention with a sliding window.
    """

    def __init__(self) -> None:
        self.replaced: list[Replaced] = []
        self.kept: list[Kept] = []
        self.own_calls: Counter[str] = Counter()
        self.changes = Changes()

    def add_replaced(self, part: str, count: int, resolution: Resolution) -> None:
        """Add modules that run the kernel of *resolution*."""
        self.replaced.append(
            Replaced(part, count, resolution.op, resolution.chosen, resolution.plugin)
        )

    def add_kept(self, part: str, count: int, reason: str) -> None:
        """Add modules that keep their own forward pass."""
        self.kept.append(Kept(part, count, reason))

    def undo(self) -> None:
        """Restore the model exactly; a second call does nothing.

        Raises:
            LmcoreError: A module's forward pass was changed by other code since.
        """
        self.changes.undo()

    def __str__(self) -> str:
        """Return the table."""
        rows = [("part", "count", "op", "kernel", "plugin or reason")]
        rows += [
            (row.part, str(row.count), row.op, row.kernel, row.plugin) for row in self.replaced
        ]
        rows += [(row.part, str(row.count), "", "not replaced", row.reason) for row in self.kept]
        rows += [
            ("calls", str(count), "", "own forward", reason)
            for reason, count in sorted(self.own_calls.items())
        ]
        widths = [max(len(row[at]) for row in rows) for at in range(4)]
        return "\n".join(
            f"{part:<{widths[0]}}  {count:>{widths[1]}}  {op:<{widths[2]}}  {kernel:<{widths[3]}}  "
            f"{reason}".rstrip()
            for part, count, op, kernel, reason in rows
        )

    def __repr__(self) -> str:
        """Return the counts."""
        replaced = sum(row.count for row in self.replaced)
        return f"<KernelReport: {replaced} replaced, {sum(row.count for row in self.kept)} not>"
