"""Micro-batches from a dataset, prepared ahead by one background thread.

`lmcore.data.loading.device_prefetch` brings them to the device.

Positions are visited in order: of each `micro_batch_size * data_parallel_size` consecutive ones,
every data-parallel rank takes its slice.  Which samples come next thus follows from the number
consumed so far alone, and a resumed run sees what an unbroken one would have seen.

Shapes: B micro-batch, S sequence.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmcore.data.dataset.document_mask import DocumentMasks
from lmcore.errors import DataError

__all__ = ["Batch", "BatchLoader", "SampleSource"]


class SampleSource(Protocol):
    """What a loader reads: samples of S + 1 tokens by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True)
class Batch:
    """One micro-batch, on the host or on a device.

    Attributes:
        tokens_BS: int64, the input.
        targets_BS: int64, the token after each.
        loss_mask_BS: float32, how much each target counts.
        positions_BS: int64, the position of each token; None: its place in the sample.
        documents_BS: int32, which document of the sample a token is in, where tokens attend to
            their own alone; None: to all before.
    """

    tokens_BS: Tensor
    targets_BS: Tensor
    loss_mask_BS: Tensor
    positions_BS: Tensor | None = None
    documents_BS: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Return the batch on *device*; the host waits for copies from pinned memory no more.

        Tensors that are there already are taken as they are.
        """
        return Batch(
            *(None if one is None else one.to(device, non_blocking=True) for one in self._values())  # type: ignore[arg-type]
        )

    def tensors(self) -> list[Tensor]:
        """Return the tensors that there are."""
        return [one for one in self._values() if one is not None]

    def _values(self) -> list[Tensor | None]:
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class BatchLoader:
    """Iterates over this rank's micro-batches; a context manager that ends its thread.

    Args:
        dataset: Samples by position.
        micro_batch_size: B.
        consumed_samples: Positions that all ranks together have seen before.
        data_parallel_rank: Which slice is this rank's.
        data_parallel_size: Number of ranks that share the positions.
        total_samples: Where to stop; None for the whole dataset.  Positions that do not fill a
            micro-batch of every rank are left out.
        pin: Moves a tensor to memory that the device copies from faster; None to leave it.
        prefetch: Micro-batches held ready.
        vocab_size: A token beyond it stops the run; None checks nothing.
        masks: What ends with a document inside a sample; None: nothing.
        begin: Called first in the thread, such as to make a device current there.

    Attributes:
        wait_seconds: Time that the consumer spent waiting for data, in all.
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
        vocab_size: int | None = None,
        masks: DocumentMasks | None = None,
        begin: Callable[[], None] | None = None,
    ) -> None:
        total = len(dataset) if total_samples is None else total_samples
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(f"rank {data_parallel_rank} of {data_parallel_size}")
        if micro_batch_size < 1 or prefetch < 1 or consumed_samples < 0:
            raise ValueError(f"{micro_batch_size=}, {prefetch=}, {consumed_samples=}")
        if total > len(dataset):
            raise ValueError(f"{total} samples wanted of a dataset of {len(dataset)}")
        self._dataset, self._pin, self._vocab_size = dataset, pin, vocab_size
        self._masks, self._begin = masks, begin
        self._micro_batch_size = micro_batch_size
        self._stride = micro_batch_size * data_parallel_size
        self._first = consumed_samples + data_parallel_rank * micro_batch_size
        self._batches_left = max(total - consumed_samples, 0) // self._stride
        self.wait_seconds = 0.0
        self._ready: queue.Queue[Batch | _Failed] = queue.Queue(maxsize=prefetch)
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._produce, args=(self._batches_left,), name="lmcore-data", daemon=True
        )
        self._thread.start()

    def __len__(self) -> int:
        """Return the number of micro-batches left."""
        return self._batches_left

    def __iter__(self) -> Iterator[Batch]:
        """Return the loader; it is consumed once."""
        return self

    def __next__(self) -> Batch:
        """Return the next micro-batch; raise what the thread raised, with its traceback."""
        if self._failure is not None:
            raise self._failure
        if not self._batches_left:
            raise StopIteration
        if self._stop.is_set():
            raise RuntimeError("the loader is closed")
        start = time.perf_counter()
        item = self._ready.get()
        self.wait_seconds += time.perf_counter() - start
        if isinstance(item, _Failed):
            self._failure = item.error
            raise item.error
        self._batches_left -= 1
        return item

    def next_if_ready(self) -> Batch | None:
        """Return the next micro-batch where it is ready; None: ask again, with `next`.

        Nothing is waited for or raised here.
        """
        if self._failure is not None or not self._batches_left or self._stop.is_set():
            return None
        try:
            item = self._ready.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, _Failed):
            self._failure = item.error
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
        """Close it."""
        self.close()

    def close(self) -> None:
        """End the thread and drop what it prepared; may be called again."""
        self._stop.set()
        while True:  # makes room, so that a waiting `put` returns and sees the event
            try:
                self._ready.get_nowait()
            except queue.Empty:
                break
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _produce(self, batches: int) -> None:
        try:
            if self._begin is not None:
                self._begin()
            for i in range(batches):
                if self._stop.is_set():
                    return
                self._put(self._build(self._first + i * self._stride))
        except BaseException as error:  # noqa: BLE001  # raised again where the batch is taken
            self._put(_Failed(error))

    def _put(self, item: Batch | _Failed) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def _build(self, first: int) -> Batch:
        samples = [self._dataset[first + i] for i in range(self._micro_batch_size)]
        tokens = torch.from_numpy(np.stack(samples))
        if self._vocab_size is not None:
            _check_vocabulary(tokens, self._vocab_size, first)
        inputs_BS, targets_BS = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        masks = self._masks
        if masks is None:
            made = [inputs_BS, targets_BS, torch.ones(inputs_BS.shape, dtype=torch.float32)]
            return Batch(*(made if self._pin is None else map(self._pin, made)))
        pin = self._pin or (lambda tensor: tensor)
        positions_BS, documents_BS = masks.positions(inputs_BS), masks.documents(inputs_BS)
        return Batch(
            pin(inputs_BS),
            pin(targets_BS),
            pin(masks.loss_mask(inputs_BS)),
            None if positions_BS is None else pin(positions_BS),
            None if documents_BS is None else pin(documents_BS),
        )


def _check_vocabulary(tokens: Tensor, vocab_size: int, first: int) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"the data holds token {low if low < 0 else high}, the vocabulary has {vocab_size}",
            why=f"found in samples {first} to {first + len(tokens) - 1}; the data set was prepared "
            "with another tokenizer, or is damaged",
            hint="give the tokenizer of the data set, or prepare it again",
        )
