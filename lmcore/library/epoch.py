"""Epochs of loaders: batches that are in use, their ends, and samples that are repeated in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, ref

from lmcore.base.errors import ConfigError
from lmcore.library.batch_order import EPOCH_END, Share

__all__ = ["Epoch", "RecentEpochs"]


class Epoch:
    """Iterator over the batches of an epoch.

    Args:
        batches: Batches on the device.
        total: Number of batches; None if it is unknown.
        share: Record of the samples that are repeated in it.
        recent: Record of the epochs of a session.
        taken: Number of batches that were taken before *batches*.

    Attributes:
        taken: Number of batches that have been taken.
        is_over: True if all have been taken, and the end was seen.
        block: Number of blocks of gradient accumulation that had begun when the last batch was
            taken.
        in_use: True while a batch is in use: from its iteration to the end of the epoch.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        total: int | None,
        share: Share,
        recent: RecentEpochs,
        taken: int = 0,
    ) -> None:
        self.block = 0
        self.taken = taken
        self.is_over = False
        self.in_use = False
        self._batches, self._total = batches, total
        self._share, self._recent = share, recent
        self._peeked: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.in_use = False
        try:
            batch = self._peeked.pop() if self._peeked else next(self._batches)
            if batch is EPOCH_END:
                batch = next(self._batches)
        except StopIteration:
            self.is_over = True
            raise
        self.taken += 1
        self.in_use = True
        self._recent.add(self)
        return batch

    def is_last(self) -> bool:
        """Return True if the batch in use is the last one."""
        if not self.in_use or self._total is not None:
            return self.in_use and self.taken == self._total
        if not self._peeked:
            try:
                self._peeked.append(next(self._batches))
            except StopIteration:
                return True
            except Exception as error:  # noqa: BLE001  # raised with its batch
                self._batches = map(_throw, (error,))
                return False
        return self._peeked[0] is EPOCH_END

    def count_new(self, size: int) -> int:
        """Return how many samples of the batch in use are not repeated at the epoch's end.

        Args:
            size: Number of samples of the batch.
        """
        if not (self._share.repeats or self._share.padding) or not self.is_last():
            return size
        return 0 if self._share.repeats else max(0, size - self._share.padding)


class RecentEpochs:
    """Epochs of a session that have a batch in use, the latest batch last.

    Attributes:
        is_open: True until the session ends.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._epochs: list[ReferenceType[Epoch]] = []
        self._blocks = 0

    def add(self, epoch: Epoch) -> None:
        """Record that a batch of an epoch was taken."""
        epoch.block = self._blocks
        if not self._epochs or self._epochs[-1]() is not epoch:
            self._epochs = [each for each in self._epochs if each() not in {None, epoch}]
            self._epochs.append(ref(epoch))

    def current(self) -> Epoch | None:
        """Return the epoch whose batch was taken last and is in use; None if there is none.

        An epoch that was left by `break` is not in use, as nothing refers to it.
        """
        return next(reversed(self._in_use()), None)

    def required(self) -> Epoch:
        """Return the epoch in use, for `gather_for_metrics`.

        Raises:
            ConfigError: There is none.
        """
        epoch = self.current()
        if epoch is None:
            raise ConfigError(
                "`gather_for_metrics`: no batch of a loader is in use",
                why="the batch says which samples are repeated",
                hint="call it in the loop over `rt.loader(...)`, for each batch; `all_gather` "
                "gathers other values",
            )
        return epoch

    def begin_block(self) -> bool:
        """Begin a block of gradient accumulation, and return True if its batch is a last one.

        Its batches are the ones taken since the block before it; if none was, the same as before.
        """
        epochs = self._in_use()
        newest = max((epoch.block for epoch in epochs), default=0)
        self._blocks += 1
        return any(epoch.is_last() for epoch in epochs if epoch.block == newest)

    def _in_use(self) -> list[Epoch]:
        found = (each() for each in self._epochs)
        return [epoch for epoch in found if epoch is not None and epoch.in_use]


def _throw(error: Exception) -> Any:
    raise error
