"""Wrong communication backends, each found by a check that names the fault."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

import torch

from lmcore_conformance.process import exchanged
from lmcore_conformance.registry import Failure

FULL = pytest.mark.full


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "mode, name, message",
    [
        (
            "max-of-nothing",
            "all-reduce",
            "max of negative numbers of torch.float32: 1,001 of 1,001 numbers are wrong; all are 0",
        ),
        pytest.param(
            *("loses-nan", "all-reduce", "sum of NaN and infinity in torch.float32: "), marks=FULL
        ),
        ("ignores-tail", "large", "all_reduce of 16,777,221 numbers: 5 of 16,777,221 numbers are"),
        (
            "pads-all-gather-into-tensor",
            "leaves-alone",
            "`all_gather_into_tensor` of 3 numbers in torch.float32: it writes 8 bytes after its",
        ),
        pytest.param(
            *("pads-broadcast", "leaves-alone"),
            "`broadcast` of 3 numbers in torch.float32: it writes 4 bytes after its output, which",
            marks=FULL,
        ),
        pytest.param(
            *("pads-reduce-scatter-tensor", "reduce-scatter"),
            "3 numbers each in torch.float32: it writes 4 bytes after its output, which is a view",
            marks=FULL,
        ),
        pytest.param(
            *("pads-recv", "send-recv"),
            "message 0 of 1,001 numbers in torch.float32: it writes 12 bytes after its output",
            marks=FULL,
        ),
        (
            *("narrows-reduce-scatter-tensor", "reduce-scatter"),
            "of the largest at most: fewer bits than torch.float32 has",
        ),
        pytest.param(
            *("narrows-all-gather-into-tensor", "large"),
            "of the largest at most: fewer bits than torch.float32 has",
            marks=FULL,
        ),
        pytest.param(
            *("narrows-broadcast", "broadcast"),
            "of the largest at most: fewer bits than torch.float32 has",
            marks=FULL,
        ),
        (
            *("exchanges-in-reverse", "all-to-all"),
            "wrong; they are the parts of the ranks in reverse order",
        ),
        pytest.param(
            *("pads-all-to-all-single", "all-to-all"),
            "6 numbers in torch.float32: it writes 8 bytes after its output, which is a view",
            marks=FULL,
        ),
        pytest.param(
            *("gathers-in-reverse", "gather-scatter"),
            "6 of 6 numbers are wrong; they are those of the ranks in reverse order",
            marks=FULL,
        ),
        pytest.param(
            *("scatters-the-first", "gather-scatter"),
            "scatter from 0, 3 numbers in torch.float32: 3 of 3 numbers are wrong; they are those",
            marks=FULL,
        ),
        pytest.param(
            *("reduces-at-the-first", "gather-scatter"),
            "reduce at 1, 3 numbers in torch.float32: 3 of 3 numbers are wrong; they are not reduc",
            marks=FULL,
        ),
        (
            *("divides-by-the-world", "groups"),
            "; they are divided by the 2 processes of the run, not by those of the group",
        ),
        (
            *("broadcasts-from-the-first", "groups"),
            "all from rank 1: 1,001 of 1,001 numbers are wrong; they are those of rank 0",
        ),
        (
            *("waits-for-nothing", "large"),
            "they are right a moment later: `wait` returned before the collective was done",
        ),
        (
            *("barrier-returns-at-once", "barrier"),
            "`barrier`: rank 1 left it before rank 0 had entered it: it does not wait for all ran",
        ),
        pytest.param(
            *("barrier-ignores-groups", "barrier"),
            "`barrier` in a group of `new_group`: rank 1 left it before rank 0 had entered it",
            marks=FULL,
        ),
        pytest.param(
            *("barrier-returns-before-wait", "barrier"),
            "`wait` of `barrier` with `async_op=True`: rank 1 left it before rank 0 had entered",
            marks=FULL,
        ),
        (
            *("reads-isend-late", "send-recv"),
            "a message that is received late: 1,001 of 1,001 numbers arrived as they were overwri",
        ),
        pytest.param(
            *("reads-gather-late", "gather-scatter"),
            "gather at 0, which is late: 1,001 of 2,002 numbers arrived as they were overwritten",
            marks=FULL,
        ),
        pytest.param(
            *("reads-scatter-late", "gather-scatter"),
            "scatter from 0, rank 1 late: 1,001 of 1,001 numbers arrived as they were overwritten",
            marks=FULL,
        ),
    ],
)
def test_a_wrong_backend_is_named(run: Any, mode: str, name: str, message: str) -> None:
    """Its check fails with words that say what is wrong."""
    # If one of two processes finds a fault, the other waits for it until the limit.
    patience = 0.15 if name == "gather-scatter" else 0.3
    result = run(mode, f"distributed.{name}", patience=patience)[f"distributed.{name}"]
    assert result.status == "failed"
    assert message in "\n".join((result.detail, *result.findings))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_groups_without_the_timeout(run: Any) -> None:
    """The finding names the collective in the group; the default group has none, as it ends."""
    result = run("groups-without-timeout", "distributed.missed")["distributed.missed"]
    (finding,) = result.findings
    assert finding.startswith("rank 0: `broadcast` in a group: it waited "), finding
    assert finding.endswith("without an error; the timeout that its group was made with is 3 s")


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_slow_rank_is_no_fault(run: Any) -> None:
    """The rank that comes late may be later than planned, as on a machine with other work."""
    result = run("slow-after-broadcast", "distributed.missed")["distributed.missed"]
    assert (result.status, result.findings) == ("passed", ())


class _Host:
    """A bench whose device is the host."""

    rank = 0

    class device:  # noqa: N801 - as an attribute
        @staticmethod
        def synchronize() -> None:
            """Wait for nothing."""


def test_numbers_need_every_bit_and_have_exact_sums() -> None:
    """A lower precision changes most of them; the widest sum is a number of the dtype."""
    for dtype, lower in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn)):
        rows = exchanged.wide(2, dtype, 5000)
        assert (rows[0].to(lower).to(dtype) != rows[0]).float().mean() > 0.5
        assert torch.equal(torch.stack(rows).sum(0).double(), torch.stack(rows).double().sum(0))
        assert rows[0].min() < 0 < rows[0].max()


def test_an_output_with_neighbours() -> None:
    """A number that is written before it or after it is found, with the side and the bytes."""
    bench: Any = _Host()
    bench.torch_device = torch.device("cpu")
    for place, side in ((300, "2 bytes before"), (305, "4 bytes after")):
        view, around = exchanged.new_view(bench, 3, torch.bfloat16)
        view.fill_(5)
        exchanged.expect_in_view(bench, "x", view, around, torch.full((3,), 5.0).bfloat16())
        around[place] = 1
        with pytest.raises(Failure, match=f"x: it writes {side} its output"):
            exchanged.expect_in_view(bench, "x", view, around, torch.full((3,), 5.0).bfloat16())


def test_neighbours_of_another_rank() -> None:
    """Numbers beside the sender's view are found beside the receiver's."""
    bench: Any = _Host()
    sender: Any = _Host()
    bench.torch_device = sender.torch_device = torch.device("cpu")
    sender.rank = 1
    right = torch.full((3,), 5.0)
    _, sent = exchanged.new_view(sender, 3, torch.float32)
    view, around = exchanged.new_view(bench, 3, torch.float32)
    view.copy_(right)
    around[304] = sent[304]
    with pytest.raises(Failure, match="x: it writes 4 bytes after its output"):
        exchanged.expect_in_view(bench, "x", view, around, right)
