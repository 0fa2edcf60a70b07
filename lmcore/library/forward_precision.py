"""Precision of forward passes in a user's loop: the context, and a warning if it is never used."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lmcore.runtime.user_line import caller_line

if TYPE_CHECKING:
    from lmcore.contract.precision.policy import PrecisionPolicy

__all__ = ["ForwardPrecision"]

logger = logging.getLogger(__name__)


class ForwardPrecision:
    """Context of forward passes, and a record of its use.

    Without it a forward pass computes in the dtype of the weights, without an error.

    Args:
        policy: Precision policy in force.
        warns: False if another rank logs the warning.

    Attributes:
        is_used: True if a context was entered or left since the last update of weights.
    """

    def __init__(self, policy: PrecisionPolicy, *, warns: bool) -> None:
        self._policy = policy
        self._is_needed = warns and not isinstance(policy.context(), nullcontext)
        self.is_used = False
        self._depth = 0

    def context(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass, in which the precision policy is in force."""
        context = self._policy.context()
        return _Recorded(self, context) if self._is_needed else context

    def check(self) -> None:
        """Log a warning, once, if no forward pass since the last update was in the context."""
        if not self._is_needed or self.is_used or self._depth:
            return
        self._is_needed = False
        logger.warning(
            "`backward` at %s: no forward pass was in `rt.autocast()`, so it computed in %s, not "
            'in %s; put it into `with rt.autocast():`, or start with `precision="fp32"`',
            caller_line() or "an unknown line",
            self._policy.keep,
            self._policy.name,
        )

    def enter(self) -> None:
        """Record that a context is entered."""
        self.is_used = True
        self._depth += 1

    def leave(self) -> None:
        """Record that a context is left; updates within it have not ended its use."""
        self.is_used = True
        self._depth -= 1


class _Recorded:
    """Context that records its use."""

    __slots__ = ("_inner", "_record")

    def __init__(self, record: ForwardPrecision, inner: AbstractContextManager[Any]) -> None:
        self._record, self._inner = record, inner

    def __enter__(self) -> Any:
        self._record.enter()
        return self._inner.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        self._record.leave()
        return self._inner.__exit__(kind, error, trace)
