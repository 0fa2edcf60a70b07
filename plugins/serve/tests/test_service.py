"""Texts of many clients at a time: each is right, and ends in one of the ways it may."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lmcore.base.errors import RunError
from lmcore.generation.beam import BeamSearch, beam_search
from lmcore.generation.generate import recompute
from lmcore.generation.request import Request
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.generation.text.completion import Completion
from lmcore.inference.load import LoadedModel
from lmcore.inference.parallel.driver import DividedModel, ProcessesError
from lmcore.inference.text_model import Execution
from lmcore_serve.served_model import ServedModel
from lmcore_serve.server import ServerSettings, listen, serve
from lmcore_serve.service import ClosedError, QueueFullError, Service
from lmcore_serve.state import Limits, ServerState
from lmcore_serve.work import BeamRequest, Update, Work

from .conftest import running_server

GREEDY = SamplingOptions(greedy=True)


class Client:
    """Collects the updates of one work."""

    def __init__(self, loaded: LoadedModel, request: Request | BeamRequest, **options: Any) -> None:
        self.updates: queue.Queue[Update] = queue.Queue()
        completion = None
        if isinstance(request, Request):
            completion = Completion(loaded.tokenizer, request.prompt)
        self.work = Work(request, self.updates.put, completion, **options)

    def wait(self) -> list[Update]:
        """Return all updates, to the end."""
        found = [self.updates.get(timeout=30)]
        while found[-1].end is None:
            found.append(self.updates.get(timeout=30))
        return found


@pytest.fixture
def slow(loaded: LoadedModel) -> Callable[[float], LoadedModel]:
    """Return a model whose passes take a time."""

    def made(seconds: float) -> LoadedModel:
        class Pause(nullcontext[None]):
            def __enter__(self) -> None:
                time.sleep(seconds)

        return LoadedModel(loaded.model, loaded.tokenizer, loaded.checkpoint, Execution(Pause))

    return made


def test_texts_of_many_clients(loaded: LoadedModel) -> None:
    """Each gets the tokens that it gets alone, in parts or whole, from any thread."""
    requests = [
        Request([65 + number] * (number + 1), 3 + number, SamplingOptions(), seed=number)
        for number in range(12)
    ]
    service = Service(loaded, max_running=3, max_waiting=12)
    clients = [Client(loaded, one, streams=number % 2 == 0) for number, one in enumerate(requests)]
    threads = [threading.Thread(target=service.submit, args=([one.work],)) for one in clients]
    for thread in threads:
        thread.start()
    made = [one.wait() for one in clients]
    expected = recompute(loaded.model, requests, loaded.tokenizer.vocab_size)
    for updates, right in zip(made, expected, strict=True):
        tokens = [token for update in updates for token in update.tokens]
        assert tokens == right.tokens
        assert "".join(update.text for update in updates) == loaded.tokenizer.decode(tokens)
        assert updates[-1].end == right.finish_reason
    assert len(made[0]) > 1
    assert all(len(one) == 1 for one in made[1::2])
    totals = service.statistics
    assert totals.generated_tokens == sum(len(one.tokens) for one in expected)
    assert totals.prompt_tokens == sum(len(one.prompt) for one in requests)
    assert sum(totals.ended.values()) == 12
    assert service.close(5)


def test_a_full_queue(slow: Callable[[float], LoadedModel]) -> None:
    """Work beyond the queue is refused, as a whole; afterwards there is room again."""
    loaded = slow(0.02)
    service = Service(loaded, max_running=1, max_waiting=2)
    first = [Client(loaded, Request([65], 20, GREEDY)) for _ in range(3)]
    service.submit([one.work for one in first])
    with pytest.raises(QueueFullError):
        service.submit([Client(loaded, Request([65], 1, GREEDY)).work] * 2)
    for one in first:
        assert one.wait()[-1].end == "length"
    last = Client(loaded, Request([65], 1, GREEDY))
    service.submit([last.work])
    assert last.wait()[-1].end == "length"
    service.close(5)


def test_cancelled_and_late(slow: Callable[[float], LoadedModel]) -> None:
    """Running and waiting work ends when its client leaves, or at its deadline."""
    loaded = slow(0.02)
    service = Service(loaded, max_running=2, max_waiting=8)
    kinds = ["leaves", "late", "stays", "leaves", "late", "stays"]
    clients = [
        Client(
            loaded,
            Request([65], 60 if kind != "stays" else 3, GREEDY),
            deadline=time.monotonic() + 0.3 if kind == "late" else None,
            streams=True,
        )
        for kind in kinds
    ]
    service.submit([one.work for one in clients])
    assert clients[0].updates.get(timeout=30).tokens
    service.cancel([one.work for one, kind in zip(clients, kinds, strict=True) if kind == "leaves"])
    ends = {"leaves": "cancelled", "late": "timeout", "stays": "length"}
    for one, kind in zip(clients, kinds, strict=True):
        assert one.wait()[-1].end == ends[kind]
    service.close(5)


def test_a_pass_that_fails(slow: Callable[[float], LoadedModel]) -> None:
    """Running requests get the error; waiting requests are generated by the next pass."""
    loaded = slow(0)
    state = {"broken": True}

    class Failing(nullcontext[None]):
        def __enter__(self) -> None:
            if state.pop("broken", False):
                raise torch.OutOfMemoryError("no memory")

    loaded = LoadedModel(loaded.model, loaded.tokenizer, loaded.checkpoint, Execution(Failing))
    service = Service(loaded, max_running=2, max_waiting=8)
    clients = [Client(loaded, Request([65], 2, GREEDY)) for _ in range(4)]
    service.submit([one.work for one in clients])
    found = [one.wait()[-1] for one in clients]
    assert [one.end for one in found] == ["error", "error", "length", "length"]
    assert isinstance(found[0].error, torch.OutOfMemoryError)
    assert service.is_alive
    service.close(5)


def lost(loaded: LoadedModel) -> LoadedModel:
    """Return a model whose processes no longer work together."""

    class Lost(nullcontext[None]):
        def __enter__(self) -> None:
            raise ProcessesError("a pass of a model in several processes failed")

    return LoadedModel(loaded.model, loaded.tokenizer, loaded.checkpoint, Execution(Lost))


@pytest.mark.parametrize("kind", ["text", "beams"])
def test_lost_processes(loaded: LoadedModel, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """No pass can follow: all work ends, what waits too; the log has no traceback."""
    broken = lost(loaded)
    service = Service(broken, max_running=1, max_waiting=8)
    request = Request([65], 2, GREEDY) if kind == "text" else BeamRequest([65], 2, 2)
    clients = [Client(broken, request) for _ in range(3)]
    service.submit([one.work for one in clients])
    for one in clients:
        last = one.wait()[-1]
        assert last.end == "error"
        assert isinstance(last.error, ProcessesError)
    assert service.close(30)
    assert service.has_failed
    assert all(record.exc_info is None for record in caplog.records)
    with pytest.raises(ClosedError):
        service.submit([clients[0].work])


def test_a_server_without_its_model_ends(loaded: LoadedModel) -> None:
    """It ends with an error, so that a supervisor can start it again."""
    broken = lost(loaded)
    service = Service(broken)
    state = ServerState({"tiny": ServedModel("tiny", broken, service)}, Limits())
    client = Client(broken, Request([65], 2, GREEDY))
    begin = threading.Timer(0.5, service.submit, [[client.work]])
    begin.start()
    with listen("127.0.0.1", 0) as sock, pytest.raises(RunError, match="can no longer generate"):
        serve(state, sock, "127.0.0.1", ServerSettings())
    begin.join()


def test_a_step_that_hangs(loaded: LoadedModel) -> None:
    """The service says for how long, and the health of the server and its clients see it."""
    ends, entered = threading.Event(), threading.Event()

    class Hanging(nullcontext[None]):
        def __enter__(self) -> None:
            entered.set()
            ends.wait(30)

    stuck = LoadedModel(loaded.model, loaded.tokenizer, loaded.checkpoint, Execution(Hanging))
    limits = Limits(request_seconds=0.05)
    with pytest.MonkeyPatch.context() as patch, running_server(stuck, limits=limits) as server:
        patch.setattr("lmcore_serve.texts._GRACE_SECONDS", 0.0)
        service = server.models["tiny"].service
        assert service.seconds_without_step == 0
        assert server.ask("/health").status == 200
        reply = server.ask("/v1/completions", {"prompt": "a"})
        assert entered.is_set()
        assert (reply.status, reply.json["error"]["code"]) == (503, "timeout")
        assert service.seconds_without_step > 0.05
        assert server.ask("/health").status == 503
        ends.set()
        deadline = time.monotonic() + 30
        while service.seconds_without_step and time.monotonic() < deadline:
            time.sleep(0.001)
        assert server.ask("/health").status == 200


def test_processes_that_are_lost_between_texts(loaded: LoadedModel) -> None:
    """The service is not alive, though its thread waits for work."""
    lost = Mock(spec=DividedModel, failed=False)
    service = Service(Mock(model=lost, tokenizer=loaded.tokenizer, execution=loaded.execution))
    assert service.is_alive
    lost.failed = True
    assert not service.is_alive
    assert service.has_failed
    assert service.close(30)


def test_beam_search_beside_texts(loaded: LoadedModel) -> None:
    """Searches run one at a time, between the tokens of the texts."""
    service = Service(loaded, max_running=4, max_waiting=8)
    request = BeamRequest([65, 66], 8, 3)
    clients = [
        Client(loaded, request),
        Client(loaded, Request([65], 12, GREEDY)),
        Client(loaded, request),
        Client(loaded, BeamRequest([65], 30, 3), deadline=0.0),
    ]
    service.submit([one.work for one in clients])
    found = [one.wait()[-1] for one in clients]
    expected = beam_search(
        loaded.model, [65, 66], width=3, max_tokens=8, vocab_size=loaded.tokenizer.vocab_size
    )
    assert list(found[0].beams) == list(found[2].beams) == expected
    assert [one.end for one in found] == ["length", "length", "length", "timeout"]
    service.close(5)


def test_a_second_search_holds_up_no_text(slow: Callable[[float], LoadedModel]) -> None:
    """The texts behind it in the queue are generated meanwhile."""
    loaded = slow(0.005)
    service = Service(loaded, max_running=4, max_waiting=8)
    searches = [Client(loaded, BeamRequest([65], 40, 2)) for _ in range(2)]
    text = Client(loaded, Request([66], 2, GREEDY))
    service.submit([one.work for one in (*searches, text)])
    assert text.wait()[-1].end == "length"
    assert [one.updates.empty() for one in searches] == [True, True]
    service.cancel([one.work for one in searches])
    assert {one.wait()[-1].end for one in searches} == {"cancelled"}
    service.close(5)


class Unreadable(Completion):
    """A text whose end cannot be decoded."""

    def finish(self, tokens: Sequence[int]) -> None:
        """Fail."""
        raise ValueError(f"{len(tokens)} tokens cannot be decoded")


@pytest.mark.parametrize("kind", ["search", "begin", "text"])
def test_a_text_that_fails_ends_alone(
    loaded: LoadedModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client gets the error, and the others get their texts."""

    def fail(*_given: object, **_named: object) -> None:
        raise OverflowError("too large")

    service = Service(loaded, max_running=4, max_waiting=8)
    broken = Client(loaded, BeamRequest([65], 2, 2) if kind != "text" else Request([65], 2, GREEDY))
    if kind == "text":
        broken.work.completion = Unreadable(loaded.tokenizer, [65])
    else:
        monkeypatch.setattr(BeamSearch, "best" if kind == "search" else "__init__", fail)
    good = Client(loaded, Request([66], 3, GREEDY))
    service.submit([broken.work, good.work])
    end = broken.wait()[-1]
    assert (end.end, type(end.error)) == ("error", ValueError if kind == "text" else OverflowError)
    assert good.wait()[-1].end == "length"
    assert service.num_running == 0
    service.close(5)


def test_closing(slow: Callable[[float], LoadedModel]) -> None:
    """A service finishes its work, or cancels it after a time; it takes no more."""
    loaded = slow(0.01)
    service = Service(loaded)
    done = Client(loaded, Request([65], 10, GREEDY))
    service.submit([done.work])
    assert service.close(30)
    assert done.wait()[-1].end == "length"
    with pytest.raises(ClosedError):
        service.submit([done.work])
    assert not service.is_alive

    service = Service(loaded, max_running=1)
    clients = [Client(loaded, Request([65], 90, GREEDY)) for _ in range(2)]
    service.submit([one.work for one in clients])
    assert not service.close(0.1)
    assert [one.wait()[-1].end for one in clients] == ["cancelled", "cancelled"]
