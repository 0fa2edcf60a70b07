"""Loaders of the user's own: batches are sharded over the ranks and moved to the device.

In one process the batches equal the batches of the user's loader, with the same draws from torch's
random generators.  With several ranks there is one global order of batches, and each round of it
has one batch for each rank; see `lmcore.library.batch_order`.

torch gives each worker of a `DataLoader` a copy of an `IterableDataset`, which reads all samples:
with two workers every sample comes twice, unless the dataset divides itself by
`torch.utils.data.get_worker_info`.  Here worker w of W keeps samples w, w + W, ...; a dataset that
looks at the information, or whose `worker_init_fn` does, has divided itself and is left alone.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.utils import data
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
)

from lmcore.base.errors import ConfigError, RunError
from lmcore.data.loading.device_prefetch import BatchCopier, CopiedAhead, copies_ahead
from lmcore.data.loading.nested import map_tensors, to_device
from lmcore.library.batch_order import (
    RankOrder,
    Share,
    checked_to_end,
    drops_last,
    length_of,
    ranks_share,
    replace_order,
    require_a_round,
    rounds,
    seed_of,
    sharding_sampler,
)
from lmcore.library.epoch import Epoch, RecentEpochs
from lmcore.library.position import (
    Position,
    order_of,
    random_states_at_begin,
    random_states_of,
    rest_of,
    without_first,
)

if TYPE_CHECKING:
    from lmcore.runtime.runtime import Runtime

__all__ = ["ShardedLoader", "shard_loader"]

_last_epochs: WeakKeyDictionary[DataLoader[Any], int] = WeakKeyDictionary()
"""Last epoch of each `DataLoader`: one that is given again, as in a loop over epochs, continues."""


def shard_loader(
    loader: Iterable[Any],
    runtime: Runtime,
    *,
    seed: int,
    shard: bool = True,
    recent: RecentEpochs | None = None,
) -> ShardedLoader:
    """Return the loader of this rank's share of the batches, on the device.

    Args:
        loader: A `torch.utils.data.DataLoader`, or another iterable of batches.  Its batch size is
            the size for one rank.
        runtime: Device and processes of this process.
        seed: Seed of the order of random samplers without a generator of the user's own, if there
            are several ranks; the same on all ranks.
        shard: False if the dataset gives each rank its own samples already.
        recent: Record of the epochs of a session.

    Raises:
        ConfigError: *loader* gives no batches, was returned by this function, or has a sampler that
            shards for another number of ranks.
    """
    _require_batches(loader)
    return ShardedLoader(loader, runtime, seed=seed, shard=shard, recent=recent or RecentEpochs())


class ShardedLoader:
    """Iterable of this rank's batches on the device, for any number of epochs.

    It has the attributes of the user's loader, too, such as `dataset`.

    With R ranks, rank r gets batch k * R + r of the global order in round k.  That order is

    - the order of the indices without a shuffle; of a random sampler of torch without a generator
      of the user's own, an order that depends on the seed and the epoch alone;
    - the order that rank 0 draws, of every other sampler, which the other ranks receive from it;
    - of an `IterableDataset` or an iterable without indices, the order in which it is read: each
      rank reads all batches, which must be the same on all ranks, and keeps its share.

    A sampler that shards already, such as `DistributedSampler`, is left as it is.  If the last
    round has too few batches, the remaining ranks get their batch of the first round again, so
    that every sample is seen and all ranks have the same number of batches; a `DataLoader` with
    `drop_last=True` leaves the round out instead.

    The workers of an `IterableDataset` share its samples; see `lmcore.library.loader`.

    If the length is known, ranks compare it before each epoch.  Without a length, each rank waits
    at the end of its epoch for the other ranks, and a difference is an error.  Neither sees a rank
    that leaves an epoch early by `break`.

    Args:
        loader: As of `shard_loader`.
        runtime: As of `shard_loader`.
        seed: As of `shard_loader`.
        shard: As of `shard_loader`.
        recent: As of `shard_loader`.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        runtime: Runtime,
        *,
        seed: int,
        shard: bool,
        recent: RecentEpochs,
    ) -> None:
        self._loader, self._source = loader, loader
        device = runtime.device
        self._on_device: Callable[[Iterator[Any]], Iterator[Any]]
        if copies_ahead(device):
            self._on_device = functools.partial(CopiedAhead, copier=BatchCopier(device, pins=True))
        else:
            move = functools.partial(to_device, device=device.torch_device)
            self._on_device = functools.partial(map, move)
        self._seed, self._recent = seed, recent
        self._processes = runtime.processes
        self._order: RankOrder | None = None
        self._generator: torch.Generator | None = None
        self._sampler = sharding_sampler(loader, runtime.rank) if shard else None
        self._indexed = isinstance(loader, DataLoader) and not isinstance(
            loader.dataset, IterableDataset
        )
        self._reads_all = shard and self._sampler is None and self._processes is not None
        if self._processes is not None and self._reads_all and isinstance(loader, DataLoader):
            if self._indexed:
                self._reads_all = False
                self._order = RankOrder(loader, self._processes, seed)
                require_a_round(loader, self._processes.rank.world_size)
            # The user's generator is kept; else the processes of a map-style dataset draw other
            # numbers on each rank, and those of a stream, which all ranks read, the same.
            self._generator = torch.Generator() if loader.generator is None else None
            self._source = replace_order(loader, self._order, self._generator)
        if shard and isinstance(loader, DataLoader) and not self._indexed:
            self._source = shared_by_workers(cast("DataLoader[Any]", self._source))
        self._current: ReferenceType[Epoch] | None = None
        own = self._processes is not None and not self._reads_all and self._order is None
        decides = seed if self._order is not None and self._order.is_seeded else None
        self._order_name = order_of(loader, decides, indexed=self._indexed, shards_itself=own)
        self._random = random_states_of(loader)
        self._resumed: Position | None = None

    def __len__(self) -> int:
        """Return the number of batches of this rank in an epoch.

        Raises:
            TypeError: The user's loader has no length.
        """
        if self._order is not None:
            return len(self._order)
        length = len(self._loader)  # type: ignore[arg-type]
        if self._reads_all and self._processes is not None:
            size = self._processes.rank.world_size
            return rounds(length, size, drop_last=drops_last(self._loader))
        return length

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; with several ranks, all must begin it.

        Raises:
            ConfigError: The session has ended.
            RunError: The ranks have different numbers of batches.
        """
        total = len(self) if self._counts_batches() else None
        share = Share(padding=_padding(self._sampler, self._loader))
        resumed, self._resumed = self._resumed, None
        taken = 0 if resumed is None else resumed.taken
        if resumed is None or not taken:
            self._random = random_states_of(self._loader)
            batches = self._begin(share, self._source)
        else:
            self._random = dict(resumed.random)
            source, rest = rest_of(self._source, taken, indexed=self._indexed)
            with random_states_at_begin(self._loader, self._random):
                batches = self._begin(share, source)
                if rest is not None:
                    rest.draw()
                else:
                    batches = without_first(batches, taken)
        epoch = Epoch(self._on_device(batches), total, share, self._recent, taken)
        self._current = ref(epoch)
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order of batches, for `rt.save(..., batches=batches)`.

        A batch that was taken counts as used.  After the end of an epoch, or after `break`, the
        position is the beginning of the next one.
        """
        own = getattr(self._source, "state_dict", None)
        if callable(own):
            return own()  # type: ignore[no-any-return]
        if self._resumed is not None:
            return vars(self._resumed) | {"random": dict(self._resumed.random)}
        epoch = self._current() if self._current is not None else None
        is_within = epoch is not None and not epoch.is_over
        number = _last_epochs.get(self._loader) if isinstance(self._loader, DataLoader) else None
        if number is not None and (self._processes is None or not is_within):
            number += 1
        return {
            "epoch": number,
            "taken": epoch.taken if epoch is not None and is_within else 0,
            "ranks": self._ranks,
            "batches": self._num_batches(),
            "order": self._order_name,
            "random": dict(self._random),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next epoch at a position, as `rt.load(..., batches=batches)` does.

        Args:
            state: Result of `state_dict`, in this run or an earlier one.

        Raises:
            ConfigError: The position is of a loader with another order of batches.
        """
        own = getattr(self._source, "load_state_dict", None)
        if callable(own):
            own(state)
            return
        found = Position.from_state(state)
        self._resumed = found.in_loader(self._ranks, self._num_batches(), self._order_name)
        if found.epoch is not None:
            self.set_epoch(found.epoch)

    @property
    def _ranks(self) -> int:
        return 1 if self._processes is None else self._processes.rank.world_size

    def _num_batches(self) -> int | None:
        """Return the number of batches in an epoch of all ranks; None if it is unknown."""
        return length_of(self._loader) if self._counts_batches() else None

    @property
    def is_last(self) -> bool:
        """True while the last batch of an epoch is in use.

        If the number of batches is unknown, the next batch is read to see it.
        """
        epoch = self._current() if self._current is not None else None
        return epoch is not None and epoch.is_last()

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, as after a resumed run; by default they count from 0.

        It is passed on to the sampler and the dataset if they have `set_epoch`.

        Args:
            epoch: Number of the epoch, from 0.
        """
        if operator.index(epoch) < 0:
            raise ValueError(f"an epoch cannot have the number {epoch}")
        if self._resumed is not None and self._resumed.epoch not in (None, epoch):
            self._resumed = None  # another epoch than the one of the checkpoint
        if not isinstance(self._loader, DataLoader):
            _pass_on(epoch, self._loader)
            return
        _last_epochs[self._loader] = epoch - 1
        batch_sampler = self._loader.batch_sampler
        inner = getattr(batch_sampler, "sampler", None)
        _pass_on(epoch, batch_sampler, inner, self._loader.sampler, self._loader.dataset)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's loader."""
        if name.startswith("_"):
            raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`")
        if name in {"dataset", "worker_init_fn"}:
            return getattr(self._loader, name)
        return getattr(self._source, name)

    def _counts_batches(self) -> bool:
        """Return True if the length is known, and not only the estimate of a stream."""
        if isinstance(self._loader, DataLoader) and not self._indexed:
            return False
        return length_of(self) is not None

    def _begin(self, share: Share, source: Iterable[Any]) -> Iterator[Any]:
        """Return this rank's batches of an epoch on the host; all ranks must call it.

        Args:
            share: Record of this rank's share of the epoch.
            source: The loader of the batches, or of the rest of them.
        """
        if self._processes is None:
            return iter(source)
        from lmcore.runtime.process.consistency import check_equal

        if not self._recent.is_open:
            raise ConfigError(
                "the session of a loader has ended", hint="call `lmcore.start` for a new one"
            )
        rendezvous = self._processes.rendezvous
        check_equal(
            rendezvous,
            "the batches of a loader",
            self._description(),
            hint="every rank must be given the same dataset and the same settings of its loader, "
            "and must begin the same epochs",
        )
        turn, epoch = rendezvous.turn(), self._next_epoch()
        rank = self._processes.rank
        if self._generator is not None:
            own = () if self._order is None else (1 + rank.rank,)
            self._generator.manual_seed(seed_of(self._seed, epoch, *own))
        if self._order is not None:
            self._order.begin(epoch, turn, share)
        batches = iter(source)
        if self._reads_all:
            keep = functools.partial(map_tensors, function=Tensor.clone)
            dropping = drops_last(self._loader)
            batches = ranks_share(
                batches, rank.rank, rank.world_size, keep, share=share, drop_last=dropping
            )
        if self._order is None and not self._counts_batches():
            batches = checked_to_end(batches, rendezvous, turn)
        return batches

    def _description(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks, by their names for messages."""
        found: dict[str, Any] = {"kind": type(self._loader).__name__}
        if self._counts_batches():
            found["number of batches"] = length_of(self._loader)
        if self._indexed:
            found["number of samples"] = length_of(self._source.dataset)  # type: ignore[attr-defined]
        return found | (self._order.description if self._order is not None else {})

    def _next_epoch(self) -> int:
        """Return the number of the epoch that begins, and set it in a sampler that shards."""
        loader = self._loader
        if not isinstance(loader, DataLoader):
            return 0
        last = _last_epochs.get(loader)
        epoch = 0 if last is None else last + 1
        if self._sampler is not None and hasattr(self._sampler, "set_epoch"):
            own = getattr(self._sampler, "epoch", last)
            if own is not None and own != last:
                epoch = own  # the user has called its `set_epoch`
            self._sampler.set_epoch(epoch)
        _last_epochs[loader] = epoch
        return epoch


def _padding(sampler: Any, loader: Any) -> int:
    """Return the number of samples that torch's `DistributedSampler` repeats in the last batch.

    It fills the last round of samples with samples from the beginning.
    """
    if type(sampler) is not DistributedSampler or type(loader.batch_sampler) is not BatchSampler:
        return 0
    last = (sampler.num_samples - 1) * sampler.num_replicas + sampler.rank
    is_dropped = loader.drop_last and sampler.num_samples % loader.batch_size
    return int(last >= len(sampler.dataset) and not is_dropped)  # type: ignore[arg-type]


def _pass_on(epoch: int, *parts: Any) -> None:
    """Call `set_epoch` of each part that has it, once."""
    for part in {id(part): part for part in parts}.values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def _require_batches(loader: Any) -> None:
    """Raise unless *loader* is an iterable of batches.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(loader, ShardedLoader):
        raise ConfigError(
            "this loader was returned by `loader` already",
            hint="give the `DataLoader` itself, once, before the loop over epochs",
        )
    is_dataset = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    if (
        is_dataset
        or isinstance(loader, str | bytes | Mapping | Tensor | type)
        or not isinstance(loader, Iterable)
    ):
        kind = type(loader).__name__
        raise ConfigError(
            "`loader` takes a `torch.utils.data.DataLoader` or another iterable of batches",
            why=f"it was given a `{kind}`" + (", which has samples" if is_dataset else ""),
            hint=f"wrap it: `DataLoader({'dataset' if is_dataset else '...'}, batch_size=...)`",
        )


_DIVIDING = frozenset({"id", "num_workers", "dataset"})
"""Attributes of the information about a worker by which a dataset divides itself."""

_SELF_SHARDING: Any = getattr(data, "IterDataPipe", ())
"""Type of datasets that torch itself divides over workers."""


def shared_by_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader whose workers share the samples; *loader* itself with fewer than two.

    Args:
        loader: Loader of an `IterableDataset`, which stays as it is.
    """
    if loader.num_workers < 2 or isinstance(loader.dataset, _SELF_SHARDING):
        return loader
    copied = copy.copy(loader)
    values: dict[str, Any] = {"dataset": _Shared(loader.dataset), "_iterator": None}
    values["worker_init_fn"] = _Watch(loader.worker_init_fn)
    vars(copied).update(values)  # assignments to these attributes are refused
    return copied


class _WorkerInfo:
    """Information about this worker, which records whether a dataset looks at it."""

    def __init__(self, info: Any) -> None:
        self.info, self.is_watched = info, False

    def __getattr__(self, name: str) -> Any:
        if name == "info":  # of a copy that is being made
            raise AttributeError(name)
        value = getattr(self.info, name)
        if name in _DIVIDING:
            self.is_watched = True
        return value.dataset if name == "dataset" else value


class _Watch:
    """Function that a worker calls at its start, before the user's."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self.function = function

    def __call__(self, worker_id: int) -> None:
        from torch.utils.data._utils import worker

        worker._worker_info = _WorkerInfo(worker._worker_info)  # type: ignore[assignment]  # noqa: SLF001
        if self.function is not None:
            self.function(worker_id)


class _Shared(IterableDataset[Any]):
    """The samples of a dataset that are this worker's."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        found: Any = data.get_worker_info()
        if not isinstance(found, _WorkerInfo):  # another start of the worker's own
            yield from self.dataset
            return
        divides = False
        for index, sample in enumerate(self.dataset):
            if index == 0:
                divides = not found.is_watched
            elif divides and found.is_watched:
                raise RunError(
                    f"`{type(self.dataset).__name__}` looks at `get_worker_info()` after its first "
                    "sample",
                    why="until then its samples were divided over the workers: others would be "
                    "left out",
                    hint="look at it at the beginning of `__iter__`, or pass `shard=False`",
                )
            if not divides or index % found.info.num_workers == found.info.id:
                yield sample
