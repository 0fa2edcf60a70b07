"""Batches of a loader of the user's own, shared by several ranks, which are threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from user_loop import Odd, OddBatches, Unsized, dataset, numbers

from lmcore.base.errors import ConfigError, OtherRankError, RunError
from lmcore.library import batch_order
from lmcore.library.epoch import RecentEpochs
from lmcore.library.exchange import gather_samples
from lmcore.library.loader import shard_loader
from lmcore.runtime.launch.rank import RankInfo

create_device = pytest.importorskip("lmcore_cpu.device").create_device
CpuSection = pytest.importorskip("lmcore_cpu.settings").CpuSection

SEED = 7


def runtime(rendezvous: Any) -> Any:
    """Return the part of a runtime that a loader uses."""
    device = create_device(CpuSection())
    processes = SimpleNamespace(rank=rendezvous.rank, rendezvous=rendezvous)
    return SimpleNamespace(device=device, rank=rendezvous.rank, processes=processes)


class Whole(IterableDataset[Any]):
    """Stream of whole numbers, of unknown length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.count))


def shares(ranks: Any, make: Any, size: int, epochs: int = 1, **options: Any) -> list[list[Any]]:
    """Return for each epoch the batches of the ranks: one list of rounds."""

    def body(rendezvous: Any) -> Any:
        batches = shard_loader(make(), runtime(rendezvous), seed=SEED, **options)
        seen = []
        for _ in range(epochs):
            epoch, marks = [], []
            for batch in batches:
                epoch.append(values(batch))
                marks.append(batches.is_last)
            assert marks == [False] * (len(epoch) - 1) + [True] * bool(epoch)
            seen.append(epoch)
        return seen

    found = ranks(body, size)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return [[*zip(*epoch, strict=True)] for epoch in zip(*found, strict=True)]


def values(batch: Any) -> Any:
    """Return the numbers of a batch."""
    return batch.tolist() if isinstance(batch, torch.Tensor) else values(batch[0])


def flat(rounds: list[Any]) -> list[Any]:
    return [batch for each in rounds for batch in each]


SHARED = {
    "sequential": lambda: DataLoader(dataset(), batch_size=2),
    "no batches": lambda: DataLoader(dataset(), batch_size=None),
    "own sampler": lambda: DataLoader(dataset(), batch_size=2, sampler=Odd()),
    "own batches": lambda: DataLoader(dataset(), batch_sampler=OddBatches()),
    "own, no batches": lambda: DataLoader(dataset(), batch_size=None, sampler=Odd()),
    "range": lambda: DataLoader(dataset(), batch_size=2, sampler=range(5)),
    "generator": lambda: DataLoader(
        dataset(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "stream": lambda: DataLoader(Whole(9), batch_size=2),
    "list": lambda: numbers(9),
    "no length": Unsized,
    "fewer than ranks": lambda: numbers(1),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", SHARED)
def test_rounds_follow_the_order_of_a_plain_loop(ranks: Any, name: str, size: int) -> None:
    """Round k has batches k * R to k * R + R - 1; ranks without one repeat their first."""
    wanted = [values(batch) for batch in SHARED[name]()]
    (rounds,) = shares(ranks, SHARED[name], size)
    assert flat(rounds)[: len(wanted)] == wanted
    repeated = flat(rounds)[len(wanted) :]
    assert len(repeated) < size
    first = wanted[:size] if len(wanted) >= size else [wanted[0]] * size
    assert repeated == first[size - len(repeated) :]


DROPPING = {
    "sequential": lambda: DataLoader(dataset(23), 2, drop_last=True),
    "own sampler": lambda: DataLoader(dataset(23), 2, sampler=range(23)[::-1], drop_last=True),
    "batch sampler": lambda: DataLoader(
        dataset(23), batch_sampler=BatchSampler(range(23), 2, drop_last=True)
    ),
    "stream": lambda: DataLoader(Whole(23), 2, drop_last=True),
    "batches in one memory": lambda: DataLoader(
        Whole(23), 2, drop_last=True, collate_fn=InOneMemory()
    ),
}


class InOneMemory:
    """Collation that writes every batch into the same memory."""

    def __init__(self) -> None:
        self.memory = torch.zeros(2, dtype=torch.long)

    def __call__(self, samples: list[int]) -> torch.Tensor:
        return self.memory.copy_(torch.tensor(samples))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", DROPPING)
def test_an_incomplete_round_is_dropped(ranks: Any, name: str, size: int) -> None:
    """With `drop_last`, no batch is repeated: all ranks end before a round without enough."""
    wanted = [values(batch) for batch in DROPPING[name]()]
    assert len(wanted) == 11
    found = shares(ranks, DROPPING[name], size, 2)
    assert [flat(rounds) for rounds in found] == [wanted[: 11 // size * size]] * 2


def test_no_complete_round(ranks: Any) -> None:
    """Fewer batches than ranks are an error: the loop would do nothing."""
    with pytest.raises(ConfigError, match="the loader has 1 batch for 2 ranks") as caught:
        shares(ranks, lambda: DataLoader(dataset(3), 2, drop_last=True), 2)
    assert "`drop_last=False`" in str(caught.value.hint)
    assert shares(ranks, lambda: DataLoader(Whole(3), 2, drop_last=True), 2) == [[]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(dataset(), batch_size=2, shuffle=True),
        lambda: DataLoader(dataset(), batch_size=None, shuffle=True),
        lambda: DataLoader(dataset(), sampler=SubsetRandomSampler(range(9))),
        lambda: DataLoader(dataset(), sampler=WeightedRandomSampler([1.0] * 9, 9)),
        lambda: DataLoader(
            dataset(), batch_sampler=BatchSampler(RandomSampler(range(9)), 2, drop_last=False)
        ),
    ],
    ids=["shuffle", "no batches", "subset", "weighted", "batch sampler"],
)
def test_random_orders_depend_on_seed_and_epoch(
    ranks: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks draw one order, whatever their generators' states; epochs and seeds differ."""

    def never(*arguments: Any) -> None:
        raise AssertionError("the order was sent")

    monkeypatch.setattr(batch_order.RankOrder, "_drawn_by_rank_0", never)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    found = shares(ranks, make, 2, epochs=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert found[0] != found[1]
    assert shares(ranks, make, 2, epochs=2) == found
    monkeypatch.setattr(f"{__name__}.SEED", SEED + 1)
    assert found[0] not in (others := shares(ranks, make, 2, epochs=2))
    assert found[1] not in others
    samples = [[*batch] if isinstance(batch, list) else [batch] for batch in flat(found[0])]
    if not isinstance(make().sampler, WeightedRandomSampler):
        assert {index for batch in samples for index in batch} == set(range(9))


def test_the_users_generator_counts(ranks: Any) -> None:
    """A random sampler with a generator gives the order of a plain loop, in later epochs, too."""
    plain = SHARED["generator"]()
    wanted = [[values(batch) for batch in plain] for _ in range(3)]
    found = shares(ranks, SHARED["generator"], 2, epochs=3)
    assert [flat(rounds)[:5] for rounds in found] == wanted
    assert wanted[0] != wanted[1]


def test_an_epoch_can_be_set(ranks: Any) -> None:
    """An order does not depend on the epochs before it, nor on further calls of `shard_loader`."""

    def make() -> Any:
        return DataLoader(dataset(), shuffle=True)

    wanted = shares(ranks, make, 2, epochs=3)

    def body(rendezvous: Any) -> Any:
        loader, seen = make(), []
        for _ in range(2):
            batches = shard_loader(loader, runtime(rendezvous), seed=SEED)
            seen.append([values(batch) for batch in batches])
        batches.set_epoch(2)
        return [*seen, [values(batch) for batch in batches]]

    found = ranks(body, 2)
    assert [[*zip(*epoch, strict=True)] for epoch in zip(*found, strict=True)] == wanted


class Endless(Odd):
    """Sampler without an end."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from super().__iter__()

    __len__ = None  # type: ignore[assignment]


def test_an_endless_sampler(ranks: Any) -> None:
    """Indices are drawn as they are needed, and do not stay in the store."""

    def body(rendezvous: Any) -> Any:
        loader = DataLoader(dataset(), sampler=Endless())
        batches = iter(shard_loader(loader, runtime(rendezvous), seed=SEED))
        found = [values(next(batches))[0] for _ in range(500)]
        rendezvous.barrier()
        return found, [rendezvous.store.check([f"2/order/{i}"]) for i in range(7)]

    (even, kept), (odd, _) = ranks(body, 2)
    wanted = [*Odd()] * 112
    assert even == wanted[:1000:2]
    assert odd == wanted[1:1000:2]
    assert not any(kept)


class Named(Odd):
    """Sampler whose indices are no integers."""

    def __iter__(self) -> Iterator[Any]:
        return iter(["a", "b"])


def test_indices_that_cannot_be_sent(ranks: Any) -> None:
    """Rank 0 names the sampler's fault, and the other rank shows it."""

    def body(rendezvous: Any) -> Any:
        loader = DataLoader(dataset(), sampler=Named())
        return [*shard_loader(loader, runtime(rendezvous), seed=SEED)]

    own, other = ranks(body, 2)
    assert isinstance(own, ConfigError)
    assert own.what == "the sampler of a loader does not give integers"
    assert isinstance(other, OtherRankError)
    assert "does not give integers" in str(other)


def sharded(rank: RankInfo, **options: Any) -> DataLoader[Any]:
    sampler = DistributedSampler(dataset(8), rank.world_size, rank.rank, **options)
    return DataLoader(dataset(8), sampler=sampler)


def test_a_sampler_that_shards_is_left(ranks: Any) -> None:
    """Its epoch is set, from 0 on, unless the user sets it; with `shard=False` it is not."""

    def body(rendezvous: Any) -> Any:
        loader = sharded(rendezvous.rank)
        batches = shard_loader(loader, runtime(rendezvous), seed=SEED)
        assert len(batches) == 4
        seen = [[values(batch) for batch in batches] for _ in range(2)]
        loader.sampler.set_epoch(5)  # type: ignore[attr-defined]
        seen.append([values(batch) for batch in batches])
        batches.set_epoch(9)
        seen.append([values(batch) for batch in batches])
        wanted = []
        for epoch in (0, 1, 5, 9):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            wanted.append([values(batch) for batch in loader])
        return seen == wanted, seen[0]

    (right, zero), (right_1, one) = ranks(body, 2)
    assert right is right_1 is True
    assert sorted(flat([*zero, *one])) == [*range(8)]


@pytest.mark.parametrize("count, own", [(3, 0), (1, 0), (2, 1)])
def test_a_sampler_of_other_ranks(ranks: Any, count: int, own: int) -> None:
    """The message has the ranks of the sampler and of this process; `shard=False` accepts it."""
    loader = sharded(RankInfo(own, own, count, count))

    def body(rendezvous: Any) -> Any:
        if rendezvous.rank.rank == 1:
            return None
        assert len(shard_loader(loader, runtime(rendezvous), seed=SEED, shard=False)) == len(loader)
        return shard_loader(loader, runtime(rendezvous), seed=SEED)

    error = ranks(body, 2)[0]
    assert isinstance(error, ConfigError)
    assert error.what_and_why == (
        f"the `DistributedSampler` of a loader shards for rank {own} of {count}: this process is "
        "rank 0 of 2"
    )


def test_datasets_that_shard_themselves(ranks: Any) -> None:
    """With `shard=False` each rank gets all batches of its loader."""
    (rounds,) = shares(ranks, lambda: DataLoader(Whole(3)), 2, shard=False)
    assert rounds == [([i], [i]) for i in range(3)]


def test_lengths_that_differ(ranks: Any) -> None:
    """Each rank names the number of batches of each."""

    def body(rendezvous: Any) -> Any:
        loader = DataLoader(dataset(9 + rendezvous.rank.rank), batch_size=2)
        return [*shard_loader(loader, runtime(rendezvous), seed=SEED)]

    errors = ranks(body, 4)
    assert all(isinstance(error, RunError) for error in errors)
    for error in errors:
        assert error.what == "the processes of this run differ in the batches of a loader"
        assert error.why == (
            "number of batches:\n  ranks 0-1: 5\n  ranks 2-3: 6\n"
            "number of samples:\n  rank 0: 9\n  rank 1: 10\n  rank 2: 11\n  rank 3: 12"
        )


@pytest.mark.parametrize("waits", [True, False])
def test_streams_of_different_lengths(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    """The numbers of all ranks are shown, also if a rank with more waits in a collective."""
    monkeypatch.setattr(batch_order, "_BEAT_SECONDS", 0.05)

    def body(rendezvous: Any) -> Any:
        rank = rendezvous.rank.rank
        loader = DataLoader(Whole(4 + 2 * rank))
        for number, _ in enumerate(
            shard_loader(loader, runtime(rendezvous), seed=SEED, shard=False)
        ):
            if waits and number == 4:  # as in a collective that rank 0 never joins
                end = time.monotonic() + 30
                while not rendezvous.reported_failure() and time.monotonic() < end:
                    time.sleep(0.02)
                return "left"
        return None

    begin = time.monotonic()
    short, long = ranks(body, 2, timeout=20.0)
    assert time.monotonic() - begin < 10
    assert isinstance(short, RunError)
    assert short.what == "the ranks read different numbers of batches in an epoch"
    assert short.why in ("rank 0: 4\nrank 1: 5 or more", "rank 0: 4\nrank 1: 6")
    assert long == "left" if waits else isinstance(long, RunError)


def test_one_rank_looks_for_the_end(ranks: Any) -> None:
    """A rank that reads `is_last` does not wait there for ranks that do not."""

    def body(rendezvous: Any) -> Any:
        batches = shard_loader(DataLoader(Whole(6)), runtime(rendezvous), seed=SEED)
        marks = []
        for _ in batches:
            marks.append(rendezvous.rank.rank == 0 and batches.is_last)
            rendezvous.barrier("a collective")
        return marks

    assert ranks(body, 2) == [[False, False, True], [False] * 3]


class OwnLoader(DataLoader[Any]):
    """A loader with its own settings and its own batches."""

    def __init__(self, *, offset: int) -> None:
        super().__init__(dataset(4), batch_size=1)
        self.offset = offset

    def __iter__(self) -> Any:
        return (values(batch)[0] + self.offset for batch in super().__iter__())


def test_settings_are_kept(ranks: Any) -> None:
    """The user's loader stays as it is; a copy of it, subclasses included, has another order."""
    (rounds,) = shares(ranks, lambda: [torch.tensor(x) for x in OwnLoader(offset=10)], 2)
    assert rounds == [(10, 11), (12, 13)]

    def start(number: int) -> None: ...

    def body(rendezvous: Any) -> Any:
        loader = DataLoader(
            dataset(),
            batch_size=2,
            shuffle=True,
            num_workers=1,
            timeout=30,
            worker_init_fn=start,
            persistent_workers=True,
            prefetch_factor=3,
            drop_last=True,
        )
        before = dict(vars(loader))
        batches = shard_loader(loader, runtime(rendezvous), seed=SEED)
        assert vars(loader) == before
        changed = {
            name for name, value in vars(batches._source).items() if value is not before[name]
        }
        own = [*shard_loader(OwnLoader(offset=10), runtime(rendezvous), seed=SEED)]
        return changed, own

    found = ranks(body, 2)
    assert found == [
        ({"batch_sampler", "generator"}, [10, 12]),
        ({"batch_sampler", "generator"}, [11, 13]),
    ]


def test_workers_draw_numbers_of_their_rank(ranks: Any) -> None:
    """Seeds of worker processes differ by rank and epoch; of a stream, which all read, by epoch."""

    def body(rendezvous: Any) -> Any:
        seeds = []
        for data in (dataset(), Whole(3)):
            batches = shard_loader(DataLoader(data), runtime(rendezvous), seed=SEED)
            for _ in range(2):
                for _ in batches:
                    pass
                seeds.append(batches.generator.initial_seed())
        return seeds

    first, second = ranks(body, 2)
    assert len({*first[:2], *second[:2]}) == 4
    assert first[2:] == second[2:]
    assert len({*first[2:]}) == 2


def test_no_batches(ranks: Any) -> None:
    """An epoch without batches ends at once on all ranks."""
    assert shares(ranks, lambda: DataLoader(Whole(0)), 2) == [[]]
    assert shares(ranks, list, 2) == [[]]


def distributed(rank: RankInfo, count: int, **options: Any) -> DataLoader[Any]:
    data = dataset(count)
    sampler = DistributedSampler(data, rank.world_size, rank.rank, shuffle=False)
    return DataLoader(data, batch_size=2, sampler=sampler, **options)


COUNTS = (1, 6, 7, 9)
METRICS = {
    "indices": lambda rank, count: DataLoader(dataset(count), batch_size=2),
    "own sampler": lambda rank, count: DataLoader(dataset(9), batch_size=2, sampler=Odd(count)),
    "endless": lambda rank, count: DataLoader(dataset(9), batch_size=2, sampler=NoLength(count)),
    "stream": lambda rank, count: DataLoader(Whole(count), batch_size=2),
    "list": lambda rank, count: numbers(count),
    "distributed": distributed,
    "distributed, dropped": lambda rank, count: distributed(rank, count, drop_last=True),
}


class NoLength(Odd):
    """Sampler of an unknown number of indices."""

    __len__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", METRICS)
def test_metrics_have_each_sample_once(ranks: Any, name: str, size: int) -> None:
    """In the order of a plain loop, whether or not the ranks divide the number of batches."""

    def body(rendezvous: Any) -> Any:
        found = []
        for count in COUNTS:
            whole = runtime(rendezvous)
            whole.processes.gather = rendezvous.gather
            if size == 1:
                whole.processes = None
            recent = RecentEpochs()
            loader = METRICS[name](rendezvous.rank, count)
            batches = shard_loader(loader, whole, seed=SEED, recent=recent)
            samples = []
            for batch in batches:
                epoch = recent.current()
                assert epoch is not None
                samples += gather_samples(whole, values(batch), epoch.count_new)
            assert recent.current() is None
            found.append(samples)
        return found

    for rank, found in enumerate(ranks(body, size)):
        if isinstance(found, BaseException):
            raise found
        for count, samples in zip(COUNTS, found, strict=True):
            place = RankInfo(0, 0, 1, 1)
            plain = [values(batch) for batch in METRICS[name](place, count)]
            wanted = [sample for batch in plain for sample in batch]
            if name.startswith("distributed"):  # dealt out by sample; drops the last of a rank
                assert len({*samples}) == len(samples)
                assert {*samples} == {*wanted} or "dropped" in name
            else:
                assert samples == wanted, (rank, count)


@pytest.mark.parametrize("size, later", [(2, 2), (3, 3), (3, 2), (2, 3)])
@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_an_epoch_goes_on_with_other_ranks(ranks: Any, kind: str, size: int, later: int) -> None:
    """The rest has each batch that was not taken once, also with other ranks."""

    def loader() -> Any:
        samples = list(range(36))
        if kind == "stream":
            return [torch.tensor(samples[at : at + 2]) for at in range(0, 36, 2)]
        return DataLoader(samples, 2, shuffle=True)

    def begin(rendezvous: Any) -> Any:
        batches = shard_loader(loader(), runtime(rendezvous), seed=SEED)
        if kind == "shuffled":
            values(list(batches))
        taken, rest, state = [], [], {}
        for number, batch in enumerate(batches, start=1):
            (taken if number <= 6 // size else rest).extend(batch.tolist())
            if number == 6 // size:
                state = batches.state_dict()
        return taken, rest, state

    begun = ranks(begin, size)
    state = begun[0][2]

    def go_on(rendezvous: Any) -> Any:
        batches = shard_loader(loader(), runtime(rendezvous), seed=SEED)
        batches.load_state_dict(state)
        rest = [number for batch in batches for number in batch.tolist()]
        return rest, len(list(batches))

    found = ranks(go_on, later)
    if size == later:
        assert [rest for rest, _ in found] == [rest for _, rest, _ in begun]
    taken = {number for own, _, _ in begun for number in own}
    left = [number for rest, _ in found for number in rest]
    assert len(taken) == 12
    assert sorted(left) == sorted(set(range(36)) - taken)
    assert {number for _, number in found} == {18 // later}
