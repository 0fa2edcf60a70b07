"""Shares of the worker processes of a `DataLoader` in the samples of an `IterableDataset`.

torch gives each worker a copy of the dataset, which reads all samples: with two workers every
sample comes twice, unless the dataset divides itself by `torch.utils.data.get_worker_info`.  Here
worker w of W keeps samples w, w + W, ...; a dataset that looks at the information, or whose
`worker_init_fn` does, has divided itself and is left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import data
from torch.utils.data import DataLoader, IterableDataset

from lmcore.base.errors import RunError

__all__ = ["shared_by_workers"]

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
