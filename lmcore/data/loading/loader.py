"""Loader of micro-batches from a dataset, prefetched by one background thread.

`lmcore.data.loading.device_prefetch` copies them to the device.

Samples are read in order: of each `micro_batch_size * data_parallel_size` consecutive positions,
every data-parallel rank takes its slice.  The next samples depend only on the number consumed so
far, so a resumed run reads the same samples as an uninterrupted one.

Shapes: B micro-batch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor

from lmcore.base.errors import host_memory
from lmcore.base.threads import start_optional
from lmcore.data.loading.batch import Batch, CausalLMCollation, Collation

__all__ = ["BatchLoader", "SampleSource"]

_CAUSAL_LM = CausalLMCollation()
_CHECKED = 1 << 16
"""Largest micro-batch that is built without a look at the host's memory."""


class SampleSource(Protocol):
    """Dataset of samples by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Any: ...


class BatchLoader:
    """Iterator over this rank's micro-batches; a context manager that ends its thread.

    Args:
        dataset: Samples by position.
        micro_batch_size: B, number of samples of one rank.
        consumed_samples: Number of samples consumed before, over all data-parallel ranks.
        data_parallel_rank: Data-parallel rank of this process.
        data_parallel_size: Number of data-parallel ranks.
        total_samples: Number of samples after which to stop, over all ranks and including
            *consumed_samples*; None for the whole dataset.  An incomplete last micro-batch is
            dropped.
        pin: Function that copies a tensor to pinned memory; None to leave tensors in pageable
            memory.
        prefetch: Number of micro-batches to prepare in advance.
        collation: Function that makes a micro-batch of samples.
        begin: Function called first in the thread, such as to set its current device.

    Attributes:
        wait_seconds: Total time that the consumer spent waiting for data, in seconds.

    Source:
        Megatron-LM, `MegatronPretrainingSampler`: the same samples on each rank.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        micro_batch_size: int,
        consumed_samples: int = 0,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        total_samples: int | None = None,
        pin: Callable[[Tensor], Tensor] | None = None,
        prefetch: int = 4,
        collation: Collation = _CAUSAL_LM,
        begin: Callable[[], None] | None = None,
    ) -> None:
        total = len(dataset) if total_samples is None else total_samples
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(f"rank {data_parallel_rank} of {data_parallel_size}")
        if micro_batch_size < 1 or prefetch < 1 or consumed_samples < 0:
            raise ValueError(f"{micro_batch_size=}, {prefetch=}, {consumed_samples=}")
        if total > len(dataset):
            raise ValueError(f"{total} samples wanted of a dataset of {len(dataset)}")
        self._dataset, self._pin = dataset, pin
        self._collation, self._begin = collation, begin
        self._micro_batch_size = micro_batch_size
        self._stride = micro_batch_size * data_parallel_size
        self._first = consumed_samples + data_parallel_rank * micro_batch_size
        self._batches_left = max(total - consumed_samples, 0) // self._stride
        self.wait_seconds = 0.0
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=prefetch)
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._produce, args=(self._batches_left,), name="lmcore-data", daemon=True
        )
        # Without the thread each micro-batch is built when it is needed.
        self._started = start_optional(self._thread, without="training waits for each micro-batch")
        self._built = 0

    def __len__(self) -> int:
        """Return the number of micro-batches left."""
        return self._batches_left

    def __iter__(self) -> Iterator[Batch]:
        """Return the loader, which can be iterated over once."""
        return self

    def __next__(self) -> Batch:
        """Return the next micro-batch; raise the thread's exception if it failed."""
        if self._failure is not None:
            raise self._failure
        if not self._batches_left:
            raise StopIteration
        if self._stop.is_set():
            raise RuntimeError("the loader is closed")
        start = time.perf_counter()
        if not self._started:
            self._build_next()
        item = self._ready.get()
        self.wait_seconds += time.perf_counter() - start
        if isinstance(item, BaseException):
            self._failure = item
            raise item
        self._batches_left -= 1
        return item

    def next_if_ready(self) -> Batch | None:
        """Return the next micro-batch if it is ready, else None.

        This neither waits nor raises; `next` raises the thread's exception.
        """
        if self._failure is not None or not self._batches_left or self._stop.is_set():
            return None
        try:
            item = self._ready.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            self._failure = item
            return None
        self._batches_left -= 1
        return item

    def __enter__(self) -> Self:
        """Return the loader."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the loader."""
        self.close()

    def close(self) -> None:
        """End the thread and drop its micro-batches; may be called again."""
        self._stop.set()
        while True:  # empty the queue, so that a waiting `put` returns and sees the event
            try:
                self._ready.get_nowait()
            except queue.Empty:
                break
        if self._started and self._thread is not threading.current_thread():
            self._thread.join()

    def _produce(self, batches: int) -> None:
        try:
            if self._begin is not None:
                self._begin()
            for i in range(batches):
                if self._stop.is_set():
                    return
                self._put(self._build(self._first + i * self._stride))
        except BaseException as error:  # noqa: BLE001  # `__next__` raises it
            self._put(error)

    def _build_next(self) -> None:
        """Put the next micro-batch into the queue, on the calling thread."""
        try:
            if self._begin is not None and not self._built:
                self._begin()
            item: Batch | BaseException = self._build(self._first + self._built * self._stride)
        except Exception as error:  # noqa: BLE001  # `__next__` raises it
            item = error
        self._built += 1
        self._put(item)

    def _put(self, item: Batch | BaseException) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def _build(self, first: int) -> Batch:
        if self._micro_batch_size > _CHECKED:
            one = self._collation([self._dataset[first]], first)
            _require_memory(one, self._micro_batch_size)
        samples = [self._dataset[first + i] for i in range(self._micro_batch_size)]
        batch = self._collation(samples, first)
        if self._pin is None:
            return batch
        return {name: self._pin(tensor) for name, tensor in batch.items()}


def _require_memory(one: Batch, micro_batch_size: int) -> None:
    """Raise `MemoryError` for a micro-batch larger than the memory of the host.

    Args:
        one: Micro-batch of one sample.
        micro_batch_size: Number of samples.
    """
    size = micro_batch_size * sum(tensor.nbytes for tensor in one.values())
    if size > host_memory():
        raise MemoryError(f"tried to allocate {size} bytes for a micro-batch on the host")
