"""The loader: order, resumption, its thread."""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
import types

import numpy as np
import pytest
import torch

from lmcore.data.loading import loader as loading
from lmcore.data.loading.loader import BatchLoader


class Counting:
    """Sample i is i*10, i*10+1, ...; records what was read."""

    def __init__(self, size: int = 100, length: int = 4) -> None:
        self.size, self.length, self.read = size, length, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> np.ndarray:
        self.read.append(i)
        return np.arange(i * 10, i * 10 + self.length + 1, dtype=np.int64)


def positions(loader: BatchLoader) -> list[list[int]]:
    with loader:
        return [(batch["tokens_BS"][:, 0] // 10).tolist() for batch in loader]


def test_batch_is_tokens_and_the_tokens_after_them():
    """A batch holds the first S tokens of each sample, the S after the first, and ones."""
    with BatchLoader(Counting(), micro_batch_size=2) as loader:
        batch = next(loader)
    assert batch["tokens_BS"].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert batch["targets_BS"].tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]
    assert batch["loss_weight_BS"].tolist() == [[1.0] * 4] * 2
    assert batch["tokens_BS"].dtype == batch["targets_BS"].dtype == torch.int64
    assert batch["loss_weight_BS"].dtype == torch.float32
    assert batch["tokens_BS"].is_contiguous()
    assert batch["targets_BS"].is_contiguous()


def test_positions_are_visited_in_order():
    """Micro-batches are consecutive positions, an incomplete last one is left out."""
    assert positions(BatchLoader(Counting(7), micro_batch_size=3)) == [[0, 1, 2], [3, 4, 5]]


def test_ranks_share_each_stretch():
    """Of every B * ranks positions each rank takes its slice, and none is taken twice."""
    parts = [
        positions(
            BatchLoader(
                Counting(26), micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=3
            )
        )
        for rank in range(3)
    ]
    assert parts[0] == [[0, 1], [6, 7], [12, 13], [18, 19]]
    assert parts[2] == [[4, 5], [10, 11], [16, 17], [22, 23]]
    assert sorted(p for part in parts for batch in part for p in batch) == list(range(24))


@pytest.mark.parametrize("consumed", [0, 6, 18])
def test_resuming_continues_the_order(consumed):
    """From any number of consumed samples the rest is what an unbroken run would have seen."""
    whole = positions(
        BatchLoader(Counting(), micro_batch_size=3, data_parallel_rank=1, data_parallel_size=2)
    )
    rest = positions(
        BatchLoader(
            Counting(),
            micro_batch_size=3,
            consumed_samples=consumed,
            data_parallel_rank=1,
            data_parallel_size=2,
        )
    )
    assert rest == whole[consumed // 6 :]


def test_total_samples_ends_the_loader():
    """It stops at the total, at once where all is consumed, and refuses more than there is."""
    assert len(positions(BatchLoader(Counting(), micro_batch_size=2, total_samples=10))) == 5
    assert not positions(
        BatchLoader(Counting(), micro_batch_size=2, total_samples=10, consumed_samples=10)
    )
    with pytest.raises(ValueError, match="101 samples"):
        BatchLoader(Counting(), micro_batch_size=2, total_samples=101)


@pytest.mark.parametrize(
    "arguments",
    [
        {"micro_batch_size": 0},
        {"micro_batch_size": 1, "data_parallel_rank": 1},
        {"micro_batch_size": 1, "prefetch": 0},
        {"micro_batch_size": 1, "consumed_samples": -1},
    ],
)
def test_impossible_arguments_are_refused(arguments):
    """Sizes below one and ranks outside the group are refused."""
    with pytest.raises(ValueError):
        BatchLoader(Counting(), **arguments)


def test_prefetch_is_bounded():
    """The thread runs ahead by the queue and the batch in its hands, and no further."""
    source = Counting()
    with BatchLoader(source, micro_batch_size=1, prefetch=3) as loader:
        deadline = time.monotonic() + 30
        while len(source.read) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(source.read) == 4
        next(loader)


def test_failure_surfaces_with_its_traceback():
    """Good batches come first, then the error of the thread, with the line that raised it."""

    class Broken(Counting):
        def __getitem__(self, i: int) -> np.ndarray:
            if i == 4:
                raise OSError("the disk is gone")
            return super().__getitem__(i)

    with BatchLoader(Broken(), micro_batch_size=2) as loader:
        assert [next(loader)["tokens_BS"][0, 0].item() for _ in range(2)] == [0, 20]
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone") as caught:
                next(loader)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert any(frame.name == "__getitem__" for frame in frames)


def test_close_ends_the_thread():
    """After `close` no thread is left, though the queue was full; taking a batch is an error."""
    loader = BatchLoader(Counting(), micro_batch_size=1, prefetch=1)
    next(loader)
    loader.close()
    loader.close()
    assert not any(thread.name == "lmcore-data" for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_wait_is_measured(monkeypatch):
    """Time spent waiting for a slow dataset is counted, and none for a prepared batch."""
    now, asked = [100.0], threading.Event()

    def clock():
        read = now[0]
        asked.set()
        return read

    class Slow(Counting):
        def __getitem__(self, i: int) -> np.ndarray:
            assert asked.wait(20)
            now[0] += 3.0 if i < 2 else 0.0
            return super().__getitem__(i)

    monkeypatch.setattr(loading, "time", types.SimpleNamespace(perf_counter=clock))
    with BatchLoader(Slow(4), micro_batch_size=2, prefetch=1) as loader:
        next(loader)
        assert loader.wait_seconds == 6.0
        while not loader._ready.full():
            time.sleep(0.001)
        now[0] += 1.0
        next(loader)
        assert loader.wait_seconds == 6.0


def test_pin_is_applied_to_every_tensor():
    """The callable sees the three tensors of each batch, in the thread."""
    threads = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return tensor + 1

    with BatchLoader(Counting(2), micro_batch_size=2, pin=pin) as loader:
        batch = next(loader)
    assert batch["tokens_BS"][0, 0] == 1
    assert batch["loss_weight_BS"][0, 0] == 2
    assert threads == ["lmcore-data"] * 3


def test_micro_batch_larger_than_the_host_is_refused():
    """A micro-batch that the host cannot hold is a `MemoryError` before any is built."""

    class Large:
        def __len__(self):
            return 1 << 50

        def __getitem__(self, i):
            return np.zeros(129, dtype=np.int64)

    with (
        BatchLoader(Large(), micro_batch_size=1 << 40, total_samples=1 << 50) as loader,
        pytest.raises(MemoryError, match="tried to allocate"),
    ):
        next(loader)


@dataclasses.dataclass
class Pair:
    """Sample that is no array."""

    tokens: np.ndarray


class Pairs(Counting):
    """The samples of `Counting` as objects."""

    def __getitem__(self, i: int) -> Pair:
        return Pair(super().__getitem__(i))


def test_a_micro_batch_larger_than_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before its samples are read, whatever these are."""
    count = (1 << 16) + 1
    monkeypatch.setattr(loading, "host_memory", lambda: count * 8 - 1)
    samples = Pairs(count)

    def collate(found: list[Pair], first: int) -> dict[str, torch.Tensor]:
        return {"tokens_BS": torch.from_numpy(np.stack([one.tokens[:1] for one in found]))}

    loader = BatchLoader(samples, micro_batch_size=count, collation=collate)
    with loader, pytest.raises(MemoryError, match=f"tried to allocate {count * 8} bytes"):
        next(loader)
    assert samples.read == [0]
