"""`DividedModel`: the model of several processes as rank 0 sees it.

Its methods send a call to the other ranks and make it on this rank, too.  Changes of a
cache wait for the next pass and travel with it.  A signal waits for the end of a pass: the ranks
would be at different places, and the model could not be used again.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lmcore.base.errors import RunError, counted
from lmcore.base.signals import deferred_signals
from lmcore.contract.device_errors import first_line
from lmcore.inference.parallel.messages import Call, MessageChannel
from lmcore.inference.parallel.part import DTYPES, PartRunner

if TYPE_CHECKING:
    from lmcore.model.shape import ModelShape

__all__ = ["DividedModel", "ProcessesError"]

logger = logging.getLogger(__name__)


class ProcessesError(RunError):
    """End of a model in several processes, which no longer work together."""


class DividedModel:
    """Model of several processes; see `TextModel`.

    Passes may be called by one thread at a time; `close` by any.
    """

    causal: ClassVar[bool] = True

    def __init__(
        self,
        runner: PartRunner,
        channel: MessageChannel,
        shape: ModelShape,
        *,
        weight_dtype: torch.dtype,
        idle_seconds: float,
        answers: bool | None = None,
    ) -> None:
        """Take the part of rank 0, and keep the other ranks waiting for messages.

        Args:
            runner: Part of the model on this rank.
            channel: Channel to all ranks.
            shape: Sizes of the whole model.
            weight_dtype: Dtype of the weights of products.
            idle_seconds: Time without a message after which one without content is sent; the ranks
                must wait longer than that.
            answers: See `SourceLM`; None: the model has no encoder.
        """
        self.answers = answers
        self.shape, self.weight_dtype = shape, weight_dtype
        self._runner, self._channel = runner, channel
        self._changes: deque[Call] = deque()
        self._next_cache = 0
        self._lock = threading.Lock()
        self._failed = self._closed = False
        self._busy, self._end = threading.Event(), threading.Event()
        self._keeper = threading.Thread(
            target=self._keep_waiting, args=(idle_seconds,), name="lmcore-idle", daemon=True
        )
        self._keeper.start()

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._runner.device

    def __call__(self, tokens_BS: Tensor, cache: Call | None = None) -> Tensor:
        """Return the hidden states after the final norm, [B, S, H].

        Args:
            tokens_BS: Token ids.
            cache: View of a `new_cache`; None: there are no tokens before.

        Raises:
            ProcessesError: The pass failed, or an earlier one.
        """
        hidden_BSH: Tensor = self._run(Call(None, "hidden", (tokens_BS.tolist(), cache)))
        return hidden_BSH

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return the logits of hidden states over the padded vocabulary, [N, V].

        Args:
            hidden_NH: Hidden states of this model.

        Raises:
            ProcessesError: The pass failed, or an earlier one.
        """
        rows = hidden_NH.flatten(0, -2)
        logits: Tensor = self._run(Call(None, "logits", (len(rows),)), rows)
        return logits.view(*hidden_NH.shape[:-1], logits.shape[-1])

    def new_cache(self, dtype: torch.dtype) -> _Cache:
        """Return an empty cache, on all ranks; it is freed when the object is."""
        with deferred_signals():
            number, self._next_cache = self._next_cache, self._next_cache + 1
            self._change(Call(None, "new_cache", (number, DTYPES.index(dtype))))
            cache: _Cache = _Cache(number, self._runner, self._change)
            if self.answers is not None:
                cache = _SourceCache(number, self._runner, self._change, self._run)
            dropped = Call(None, "drop_cache", (number,))
            weakref.finalize(cache, self._change, dropped).atexit = False
        return cache

    @property
    def failed(self) -> bool:
        """True if the processes no longer work together: no pass can follow."""
        return self._failed

    def close(self, timeout: float = 10.0) -> None:
        """End the other ranks; after a failed pass they are left to the launcher.

        Args:
            timeout: Time in seconds for a pass, or a message, of another thread to end.

        Raises:
            ProcessesError: It has not ended.
        """
        self._end.set()
        if not self._lock.acquire(timeout=timeout):
            self._failed = True
            raise ProcessesError(
                f"a pass of the model has not ended within {counted(timeout, 'second')}",
                why="a process of the model hangs, or is slow",
                hint="look at the last lines of all processes",
            )
        try:
            if not self._closed and not self._failed:
                self._channel.send(None)
            self._closed = True
        finally:
            self._lock.release()
        self._keeper.join()

    def _change(self, call: Call) -> None:
        """Change a cache here now, and on the other ranks before the next pass."""
        with deferred_signals():
            self._runner.run(call)
            self._changes.append(call)

    def _run(self, call: Call, hidden_NH: Tensor | None = None) -> Any:
        """Run a pass on all ranks and return its result."""
        with deferred_signals(), self._lock:
            if self._failed or self._closed:
                raise ProcessesError("the processes of the model have ended their work")
            ended = False
            try:
                changes = [self._changes.popleft() for _ in range(len(self._changes))]
                self._channel.send([*changes, call])
                made = self._runner.run(call, hidden_NH)
                ended = True
            except Exception as error:
                raise ProcessesError(
                    "a pass of a model in several processes failed",
                    why=first_line(error),
                    hint="start the command again",
                ) from error
            finally:
                self._failed = not ended  # the ranks are at different places
            self._busy.set()
        return made

    def _keep_waiting(self, seconds: float) -> None:
        """Send messages without content while there are no others."""
        while not self._end.wait(seconds):
            if self._busy.is_set():
                self._busy.clear()
                continue
            with self._lock:
                if self._failed or self._closed:
                    return
                try:
                    self._channel.send([])
                except RuntimeError as error:
                    self._failed = True
                    logger.error(  # noqa: TRY400 - the reason is enough
                        "the processes of the model no longer answer: %s", first_line(error)
                    )
                    return


class _Cache:
    """Cache on all ranks; see `SlotCache` for its methods.

    A view for a pass is the call that makes it on each rank.
    """

    def __init__(self, number: int, runner: PartRunner, change: Callable[[Call], None]) -> None:
        self._number, self._runner, self._apply = number, runner, change

    @property
    def num_slots(self) -> int:
        return self._runner.cache(self._number).num_slots

    @property
    def capacity(self) -> int:
        return self._runner.cache(self._number).capacity

    def reserve(self, num_slots: int, capacity: int) -> None:
        self._apply(Call(self._number, "reserve", (num_slots, capacity)))

    def release(self) -> None:
        self._apply(Call(self._number, "release"))

    def move(self, source: int, target: int, length: int) -> None:
        self._apply(Call(self._number, "move", (source, target, length)))

    def clear(self, slot: int) -> None:
        self._apply(Call(self._number, "clear", (slot,)))

    def select(self, slots: Sequence[int], length: int) -> None:
        self._apply(Call(self._number, "select", (slots, length)))

    def first_tokens(self, slots: Sequence[int], width: int) -> Call:
        return Call(self._number, "first_tokens", (slots, width))

    def further_tokens(self, slot: int, start: int, width: int) -> Call:
        return Call(self._number, "further_tokens", (slot, start, width))

    def next_tokens(self, lengths: Sequence[int]) -> Call:
        return Call(self._number, "next_tokens", (lengths,))

    def branches(self, slots: Sequence[int], lengths: Sequence[int], width: int) -> Call:
        return Call(self._number, "branches", (slots, lengths, width))


class _SourceCache(_Cache):
    """Cache of a model with an encoder; encoding a source is a pass of all ranks."""

    def __init__(
        self,
        number: int,
        runner: PartRunner,
        change: Callable[[Call], None],
        run: Callable[[Call], Any],
    ) -> None:
        super().__init__(number, runner, change)
        self._run = run

    def set_source(self, slot: int, tokens: Sequence[int]) -> None:
        self._run(Call(self._number, "set_source", (slot, list(tokens))))
