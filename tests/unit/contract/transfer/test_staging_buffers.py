"""Copies on the host that several threads make: complete, and with no read after their end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lmcore.contract.transfer import staging_buffers as host_copies
from lmcore.contract.transfer.staging_buffers import HostCopies, copy_by_numpy, streaming_copy


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is divided, the last piece smaller than the others."""
    monkeypatch.setattr(host_copies, "_SMALLEST_BYTES", 0)
    monkeypatch.setattr(host_copies, "_PIECE_BYTES", 48)


@pytest.fixture
def pairs() -> list[tuple[Tensor, Tensor]]:
    """Sources and targets: large, small, of odd sizes and layouts."""
    sources = [
        torch.randn(33, 7),
        torch.arange(40).to(torch.bfloat16),
        torch.randn(6, 8).T,
        torch.tensor(3.0),
        torch.empty(0, 5),
        torch.randn(5, dtype=torch.complex64).conj(),
        torch.randn(9, requires_grad=True) * 1.0,
    ]
    return [(one, torch.zeros(one.shape, dtype=one.dtype)) for one in sources]


def in_thread(act: Callable[[], object]) -> threading.Thread:
    """Act in another thread."""
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_both_threads_copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """After the end of the reads the sources may change; the targets are complete."""
    wanted = [source.detach().clone() for source, _ in pairs]
    copies = HostCopies(pairs)
    thread = in_thread(copies.finish)
    copies.end_reads()
    for source, _ in pairs:
        source.detach().zero_()
    thread.join()
    for (_, target), expected in zip(pairs, wanted, strict=True):
        assert torch.equal(target, expected)
    copies.finish()


@pytest.mark.parametrize("method", ["end_reads", "finish"])
def test_one_thread_is_enough(pairs: list[tuple[Tensor, Tensor]], method: str) -> None:
    """A waiting thread copies the pieces that no other thread copies."""
    getattr(HostCopies(pairs), method)()
    assert all(torch.equal(source, target) for source, target in pairs)


def test_reads_end_when_the_last_piece_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that another thread is copying is waited for."""
    begun, go_on = threading.Event(), threading.Event()
    plain = host_copies.copy_piece

    def copy(source: object, target: object) -> None:
        if threading.current_thread() is thread:
            begun.set()
            assert go_on.wait(10)
        plain(source, target)

    monkeypatch.setattr(host_copies, "copy_piece", copy)
    source = torch.randn(64)
    wanted, target = source.clone(), torch.zeros(64)
    copies = HostCopies([(source, target)])
    thread = threading.Thread(target=copies.finish)
    thread.start()
    assert begun.wait(10)
    release = threading.Timer(0.1, go_on.set)
    release.start()
    copies.end_reads()
    assert go_on.is_set()
    source.zero_()
    thread.join()
    release.join()
    assert torch.equal(target, wanted)


def test_a_failed_copy_is_raised_where_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the reads does not raise; `finish` does, each time, and nothing is read again."""
    calls: list[object] = []

    def copy(source: object, target: object) -> None:
        calls.append(source)
        raise MemoryError("no page")

    monkeypatch.setattr(host_copies, "copy_piece", copy)
    copies = HostCopies([(torch.randn(640), torch.zeros(640))])
    copies.end_reads()
    assert 1 <= len(calls) <= torch.get_num_threads()
    for _ in range(2):
        with pytest.raises(MemoryError, match="no page"):
            copies.finish()


def test_an_interrupt_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the training thread; the writing thread gets a separate error and ends."""

    def copy(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(host_copies, "copy_piece", copy)
    copies = HostCopies([(torch.randn(640), torch.zeros(640))])
    with pytest.raises(KeyboardInterrupt):
        copies.end_reads()
    with pytest.raises(RuntimeError, match="interrupted"):
        copies.finish()


compiled = pytest.mark.skipif(
    streaming_copy() is copy_by_numpy, reason="lmcore was built without a C++ compiler"
)


@compiled
@pytest.mark.parametrize("size", [0, 1, 15, 4096, 4 * 4096 - 1, 4 * 4096, 100_000])
@pytest.mark.parametrize("begin", [0, 1, 16, 33])
def test_compiled_code_copies_as_numpy(size: int, begin: int) -> None:
    """It copies each byte of any size at any place, and no byte beside them."""
    rng = np.random.default_rng(size + begin)
    source = rng.integers(0, 256, size + 100, dtype=np.uint8)
    found, wanted = np.full(size + 100, 7, np.uint8), np.full(size + 100, 7, np.uint8)
    for copy, target in ((streaming_copy(), found), (copy_by_numpy, wanted)):
        copy(source[50 : 50 + size], target[begin : begin + size])
    assert np.array_equal(found, wanted)


@compiled
def test_compiled_code_refuses_other_arrays() -> None:
    """Arrays of other sizes, types or layouts, of the same memory, or read-only, are refused."""
    one, other = np.zeros(40, np.uint8), np.zeros(40, np.uint8)
    read_only = other.copy()
    read_only.flags.writeable = False
    wrong = [
        (one, other[:-1]),
        (one.astype(np.int16), other),
        (one[::2], other[:20]),
        (one, read_only),
        (one[:30], one[10:]),
    ]
    for source, target in wrong:
        with pytest.raises(ValueError, match=r"source|target"):
            streaming_copy()(source, target)


def test_without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compiled code, or with an older version's, numpy copies."""
    for native in (None, object()):
        monkeypatch.setitem(sys.modules, "lmcore._native", native)
        assert streaming_copy.__wrapped__() is copy_by_numpy
