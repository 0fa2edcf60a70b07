"""Order of work between streams and the host: results are there after a wait, and not before."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from lmcore.contract import buffer_stager
from lmcore.contract.transfer.async_scalars import ScalarCopier
from lmcore.contract.transfer.staging import begin_staging, stage_tensors

Misbehave = Callable[[str], None]
# Numbers for tests that show missing data: each is used once, so memory that an earlier test or an
# earlier round filled and gave back never holds the expected one.
UNUSED = map(float, itertools.count(10_001))


@pytest.fixture(autouse=True)
def no_messages(sim: ModuleType) -> Iterator[None]:
    from lmcore_sim import _C

    _C.take_missing_waits()
    yield
    _C.set_missing_wait_raises(False)


def computed(stream: torch.Stream, value: float = 3.0, size: int = 4) -> torch.Tensor:
    with stream:
        return torch.ones(size, device="sim") * value


def test_another_stream_sees_a_result_after_a_wait(sim: ModuleType) -> None:
    """Until then it is NaN, or -1 for integers, in ops, lists of tensors and copies to the host."""
    from lmcore_sim import _C

    side = sim.Stream()
    x = computed(side)
    with side:
        numbers = torch.arange(3, device="sim")
    assert (x + 1).isnan().all()
    assert (numbers + 0).tolist() == [-1, -1, -1]
    assert torch._foreach_mul([x], 2.0)[0].isnan().all()
    assert x.cpu().isnan().all()
    messages = _C.take_missing_waits()
    assert "aten::add on stream 0 of sim:0 uses 16 bytes that stream " in messages[0]
    assert (x.view(2, 2)[1] + 1).isnan().all()
    sim.current_stream().wait_stream(side)
    assert (x + 1).tolist() == [4, 4, 4, 4]
    assert (numbers + 0).tolist() == [0, 1, 2]
    with side:
        assert x.tolist() == [3, 3, 3, 3]  # nothing has changed what its own stream has


def test_a_missing_wait_can_be_an_error(sim: ModuleType) -> None:
    """The op raises, with both streams in its message."""
    from lmcore_sim import _C

    x = computed(sim.Stream())
    _C.set_missing_wait_raises(True)
    with pytest.raises(
        RuntimeError, match=r"aten::exp on stream 0 of sim:0 uses .* wait is missin"
    ):
        x.exp()
    sim.synchronize()
    assert x.log().exp().allclose(x)


def test_an_event_is_the_work_before_it(sim: ModuleType) -> None:
    """A stream that waits for an event sees the work before it alone; waits can be passed on."""
    first, second, third = (sim.Stream() for _ in range(3))
    x = computed(first)
    event = torch.Event("sim")
    event.record(first)
    y = computed(first)
    second.wait_event(event)
    third.wait_stream(second)
    with third:
        assert (x + 1).tolist() == [4, 4, 4, 4]
        assert (y + 1).isnan().all()


def test_the_host_waits_for_all_streams(sim: ModuleType) -> None:
    """After `synchronize` of event, stream or device, work of any stream sees the results."""
    event = torch.Event("sim")
    for wait in (event.synchronize, None, sim.synchronize):
        side = sim.Stream()
        x = computed(side)
        event.record(side)
        (wait or side.synchronize)()
        assert (x + 1).tolist() == [4, 4, 4, 4]


def test_parts_of_a_tensor_are_apart(sim: ModuleType) -> None:
    """Streams that use different parts of one tensor do not disturb each other."""
    whole = torch.zeros(8, device="sim")
    sim.synchronize()
    side = sim.Stream()
    with side:
        whole[4:].fill_(2)
    whole[:4].fill_(1)
    assert (whole[:4] * 1).tolist() == [1, 1, 1, 1]
    assert (whole[2:6] * 1).isnan().tolist() == [False, False, True, True]
    with side:
        assert whole[4:].tolist() == [2, 2, 2, 2]


def test_two_streams_that_write_at_once_are_both_wrong(sim: ModuleType) -> None:
    """A write over what another stream may still be writing is lost."""
    x = computed(sim.Stream())
    x.fill_(1)
    assert x.isnan().all()


def test_a_copy_to_the_host_arrives_when_it_is_waited_for(sim: ModuleType) -> None:
    """It has the values at its place in the stream, and is complete after the wait."""
    landed = [torch.zeros(4).pin_memory() for _ in range(3)]
    x = torch.ones(4, device="sim")
    events = [torch.Event("sim") for _ in range(3)]
    for target, event in zip(landed, events, strict=True):
        target.copy_(x, non_blocking=True)
        x += 1
        event.record()
    assert [target.tolist() for target in landed] == [[0] * 4] * 3
    assert events[0].query()
    assert [target[0].item() for target in landed] == [1, 0, 0]
    events[1].synchronize()
    assert [target[0].item() for target in landed] == [1, 2, 0]
    x.sum().item()
    assert [target[0].item() for target in landed] == [1, 2, 3]


def test_a_copy_to_the_device_reads_its_source_late(sim: ModuleType) -> None:
    """A source that is overwritten before the copy is done gives the later numbers."""
    source, side = torch.ones(4).pin_memory(), sim.Stream()
    with side:
        x = torch.empty(4, device="sim")
        x.copy_(source, non_blocking=True)
    source.fill_(5)
    sim.current_stream().wait_stream(side)
    assert x.tolist() == [5, 5, 5, 5]


def test_what_nobody_waits_for_is_bounded(sim: ModuleType) -> None:
    """Queued copies are executed after all when there are hundreds, or when memory runs out."""
    landed = torch.zeros(1000).pin_memory()
    x = torch.arange(1000, device="sim", dtype=torch.float32)
    for place in range(1000):
        landed[place].copy_(x[place], non_blocking=True)
    there = int((landed > 0).sum())
    assert 500 < there < 999
    sim.synchronize()
    assert torch.equal(landed, x.cpu())


@pytest.mark.parametrize(
    "fault", ["no-synchronize", "no-stream-synchronize", "no-event-synchronize"]
)
def test_a_wait_of_the_host_can_do_nothing(
    sim: ModuleType, misbehave: Misbehave, fault: str
) -> None:
    """With the fault a copy has not arrived after that wait; the other two wait."""
    stream = sim.current_stream()
    x, landed = torch.ones(4, device="sim"), torch.zeros(4).pin_memory()
    event = torch.Event("sim")
    waits = {
        "no-synchronize": sim.synchronize,
        "no-stream-synchronize": stream.synchronize,
        "no-event-synchronize": event.synchronize,
    }
    misbehave(fault)
    for name, wait in waits.items():
        landed.zero_()
        landed.copy_(x, non_blocking=True)
        event.record()
        wait()
        assert (landed.sum().item() == 4) is (name != fault)
        x.cpu()


def test_a_wait_of_a_stream_can_do_nothing(sim: ModuleType, misbehave: Misbehave) -> None:
    """With `no-stream-wait` neither `wait_stream` nor `wait_event` lets a stream see a result."""
    misbehave("no-stream-wait")
    side, event = sim.Stream(), torch.Event("sim")
    x = computed(side)
    event.record(side)
    sim.current_stream().wait_stream(side)
    sim.current_stream().wait_event(event)
    assert (x + 1).isnan().all()


def test_a_query_can_be_always_true(sim: ModuleType, misbehave: Misbehave) -> None:
    """With `query-always-true` work counts as done, and is not."""
    misbehave("query-always-true")
    landed, event = torch.zeros(4).pin_memory(), torch.Event("sim")
    landed.copy_(torch.ones(4, device="sim"), non_blocking=True)
    event.record()
    assert event.query()
    assert sim.current_stream().query()
    assert landed.tolist() == [0] * 4


def test_a_slow_op_delays_its_stream(sim: ModuleType, misbehave: Misbehave) -> None:
    """The host continues at once, and waits for the op when it waits for the stream."""
    x = torch.ones(4, device="sim")
    misbehave("slow:exp=200ms")
    began = time.perf_counter()
    y = x.exp()
    event = torch.Event("sim")
    event.record()
    assert time.perf_counter() - began < 0.15
    assert not event.query()
    y.cpu()
    assert time.perf_counter() - began >= 0.2
    assert event.query()


class Forgets(torch.Event):
    """An event that nobody waits for."""

    def synchronize(self) -> None: ...


def test_scalars_need_their_event(sim: ModuleType) -> None:
    """The scalars of a step are zeros, or old, if their event is not waited for."""
    from lmcore_sim.device import create_device

    device = create_device()
    for new_event, right in ((device.new_event, True), (lambda: Forgets("sim"), False)):
        values = [next(UNUSED), next(UNUSED)]
        copier = ScalarCopier(dataclasses.replace(device, new_event=new_event))
        sent = copier.copy(torch.tensor(values, device="sim"))
        assert (sent.read() == values) is right


def test_a_stager_needs_its_wait(sim: ModuleType) -> None:
    """Buffers of a checkpoint hold no weights if the device is not waited for."""
    from lmcore_sim.device import create_device

    device = create_device()
    for synchronize, right in ((device.synchronize, True), (lambda: None, False)):
        value = next(UNUSED)
        live = {"weight": torch.full((64, 64), value, device="sim")}
        stager = buffer_stager(dataclasses.replace(device, synchronize=synchronize), priority=1)
        staged = stage_tensors(stager, live)
        assert bool((staged["weight"] == value).all()) is right


def test_a_copy_that_has_begun(sim: ModuleType) -> None:
    """A save is copied beside the computation; the update waits for the copy on the device."""
    from lmcore_sim import _C
    from lmcore_sim.device import create_device

    _C.set_missing_wait_raises(True)
    stager = buffer_stager(create_device(), priority=1)
    weight = torch.full((300, 400), 5.0, device="sim")
    live = {"weight": weight, "step": torch.tensor(3.0), "large": torch.ones(300, 400)}
    for value in (next(UNUSED), next(UNUSED)):
        weight.fill_(value)
        pending = begin_staging(stager, live, live.keys())
        gradient = weight * 2  # a step reads
        pending.end_reads()
        weight.add_(gradient)  # and updates
        pending.finish()
        assert pending.tensors["weight"].unique().tolist() == [value]
        assert pending.tensors["large"].unique().tolist() == [1.0]
    assert weight.cpu().unique().tolist() == [3 * value]


def test_a_copy_needs_its_wait_on_the_host(sim: ModuleType) -> None:
    """The writer finds no weights in the buffers if it does not wait for the event."""
    from lmcore_sim.device import create_device

    device = create_device()
    for new_event, right in ((device.new_event, True), (lambda: Forgets("sim"), False)):
        value = next(UNUSED)
        live = {"weight": torch.full((64, 64), value, device="sim")}
        stager = buffer_stager(dataclasses.replace(device, new_event=new_event), priority=1)
        pending = begin_staging(stager, live, live.keys())
        pending.finish()
        assert bool((pending.tensors["weight"] == value).all()) is right
