"""Several ranks write one checkpoint and read it: every piece once, each rank its own part."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmcore.base.errors import CheckpointError, OtherRankError
from lmcore.checkpoint import (
    WritePlanner,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    verify_checkpoint,
)
from lmcore.checkpoint import verify as verify_module
from lmcore.checkpoint import write_plan as write_plan_module
from lmcore.checkpoint.chunks import ChunkBounds
from lmcore.parallel.tensor_layout import Chunk, TensorLayout

WHOLE = {
    "rows": torch.randn(12, 5, generator=torch.Generator().manual_seed(1)),
    "packed": torch.randn(24, 3, generator=torch.Generator().manual_seed(2)),
    "columns": torch.randn(4, 8, generator=torch.Generator().manual_seed(3)),
    "same": torch.arange(7, dtype=torch.bfloat16),
    "number": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
}


def held(rank: int, size: int) -> tuple[dict[str, Tensor], dict[str, TensorLayout]]:
    """Return what a rank has in a divided layout: zeros, and which part of the whole they are."""
    layouts = {
        "rows": TensorLayout.split((12 // size, 5), 0, rank=rank, size=size),
        "packed": TensorLayout.split(
            (24 // size, 3), 0, rank=rank, size=size, groups=(8 // size,) * 3
        ),
        "columns": TensorLayout.split((4, 8 // size), 1, rank=rank, size=size),
    }
    tensors = {}
    for name, whole in WHOLE.items():
        shape = list(whole.shape)
        if name in layouts:
            dim = 1 if name == "columns" else 0
            shape[dim] //= size
        tensors[name] = torch.zeros(shape, dtype=whole.dtype)
    return tensors, layouts


def filled(rank: int, size: int) -> tuple[dict[str, Tensor], dict[str, TensorLayout]]:
    """Return the same with values, and a tensor that this rank alone has."""
    tensors, layouts = held(rank, size)
    for name, tensor in tensors.items():
        layout = layouts.get(name) or TensorLayout.whole(tuple(tensor.shape))
        layout.fill(tensor, WHOLE[name])
    tensors[f"rng.{rank}"] = torch.full((3,), rank)
    return tensors, layouts


def save(rendezvous: Any, directory: Path, size: int, failure: Exception | None = None) -> Path:
    """Save together."""
    planner, me = WritePlanner(rendezvous), rendezvous.rank.rank if rendezvous else 0
    tensors, layouts = filled(me, size)
    found = planner.plan(tensors, layouts)
    return save_checkpoint(
        directory,
        7,
        found.views(tensors),
        {"me": me},
        model_shape={},
        plan=found,
        channel=planner.saves,
        failure=failure,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_its_part(
    ranks: Callable[..., list[Any]], tmp_path: Path, rank: int
) -> None:
    """A rank that cannot write fails with its error, the other with its text; nothing is saved."""
    failure = CheckpointError("no copy of the tensors")

    def body(rendezvous: Any) -> None:
        save(rendezvous, tmp_path, 2, failure if rendezvous.rank.rank == rank else None)

    found = ranks(body)
    assert found[rank] is failure
    assert isinstance(found[1 - rank], OtherRankError)
    assert "no copy of the tensors" in str(found[1 - rank])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_any_number_to_any_other(
    ranks: Callable[..., list[Any]], tmp_path: Path, before: int, after: int
) -> None:
    """Any number of ranks reads the tensors bit for bit, packed and replicated ones too."""
    paths = ranks(lambda rendezvous: save(rendezvous, tmp_path, before), before)
    assert set(paths) == {tmp_path / "iter_0000007"}
    assert verify_checkpoint(paths[0]) == []
    assert read_manifest(paths[0]).meta == {"me": 0}

    def load(rendezvous: Any) -> dict[str, Tensor]:
        me = rendezvous.rank.rank
        tensors, layouts = held(me, after)
        load_checkpoint(paths[0], tensors, layouts=layouts, channel=WritePlanner(rendezvous).loads)
        return tensors

    for rank, found in enumerate(ranks(load, after)):
        wanted = filled(rank, after)[0]
        assert all(torch.equal(found[name], wanted[name]) for name in WHOLE)
    own = {f"rng.{rank}": torch.zeros(3, dtype=torch.long) for rank in range(before)}
    load_checkpoint(paths[0], own)
    assert all(bool((own[f"rng.{rank}"] == rank).all()) for rank in range(before))


def test_replicas_are_written_once_and_by_all(ranks: Callable[..., list[Any]]) -> None:
    """Whole tensors on every rank: each is written by one, and all ranks write as much."""

    def body(rendezvous: Any) -> tuple[list[str], int]:
        tensors = {f"w{number}": torch.ones(1000 + number) for number in range(12)}
        found = WritePlanner(rendezvous).plan(tensors, {})
        views = found.views(tensors)
        return list(views), sum(view.nbytes for view in views.values())

    found = ranks(body, 3)
    written = sorted(name for names, _ in found for name in names)
    assert written == sorted(f"w{number}" for number in range(12))
    sizes = [size for _, size in found]
    assert max(sizes) - min(sizes) < 100


def test_unequal_tensors_are_written_by_their_first_rank(ranks: Callable[..., list[Any]]) -> None:
    """Whole tensors with other values on each rank."""

    def body(rendezvous: Any) -> list[str]:
        tensors = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}
        if rendezvous.rank.rank == 0:
            del tensors["c"]
        found = WritePlanner(rendezvous).plan(tensors, {}, unequal=tensors)
        return sorted(found.views(tensors))

    assert ranks(body, 3) == [["a", "b"], ["c"], []]


def test_large_tensors_are_cut(
    ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor that all hold is written by all of them, in pieces of bounded size."""
    monkeypatch.setattr(write_plan_module, "_LARGEST_BYTES", 4000)
    whole = torch.randn(101, 30)

    def body(rendezvous: Any) -> tuple[list[int], Path]:
        planner = WritePlanner(rendezvous)
        found = planner.plan({"w": whole}, {})
        views = found.views({"w": whole})
        path = save_checkpoint(
            tmp_path, 1, views, {}, model_shape={}, plan=found, channel=planner.saves
        )
        return [view.nbytes for view in views.values()], path

    found = ranks(body, 2)
    assert [len(sizes) for sizes, _ in found] == [2, 2]
    assert all(size <= 4000 for sizes, _ in found for size in sizes)
    target = {"w": torch.zeros(101, 30)}
    load_checkpoint(found[0][1], target)
    assert torch.equal(target["w"], whole)


def test_nothing_is_exchanged_twice(ranks: Callable[..., list[Any]]) -> None:
    """The same tensors are assigned once; others again."""

    def body(rendezvous: Any) -> list[bool]:
        planner = WritePlanner(rendezvous)
        one = planner.plan({"a": torch.ones(4)}, {})
        again = planner.plan({"a": torch.zeros(4)}, {})
        other = planner.plan({"b": torch.zeros(4)}, {})
        return [again is one, other is one]

    assert ranks(body, 2) == [[True, False], [True, False]]


@pytest.mark.parametrize("odd", ["a hole", "other shapes", "twice"])
def test_parts_that_make_no_whole(ranks: Callable[..., list[Any]], odd: str) -> None:
    """They are an error on every rank, and nothing is written."""

    def body(rendezvous: Any) -> None:
        me = rendezvous.rank.rank
        layout = TensorLayout.split((2, 3), 0, rank=me, size=2)
        if odd == "a hole":
            layout = TensorLayout.split((2, 3), 0, rank=0, size=2)
        if odd == "other shapes" and me:
            layout = TensorLayout.split((2, 3), 0, rank=1, size=3)
        if odd == "twice" and me:
            layout = TensorLayout((4, 3), TensorLayout.whole((4, 3)).chunks)
        shape = (4, 3) if odd == "twice" and me else (2, 3)
        WritePlanner(rendezvous).plan({"w": torch.ones(shape)}, {"w": layout})

    first, second = ranks(body, 2)
    assert isinstance(first, ValueError)
    assert isinstance(second, OtherRankError)
    assert "`w`" in second.what


def test_a_directory_that_others_do_not_see(
    ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `--save` that hosts do not share is said to be that; nothing is left."""
    real = Path.is_dir
    seen = []

    def is_dir(path: Path, **how: Any) -> bool:
        if ".tmp-" in path.name and not seen:
            seen.append(path)
            return False
        return real(path, **how)

    monkeypatch.setattr(Path, "is_dir", is_dir)
    found = ranks(lambda rendezvous: save(rendezvous, tmp_path, 2), 2)
    assert all(isinstance(one, (CheckpointError, OtherRankError)) for one in found)
    assert all("that all hosts of the run share" in one.hint for one in found)
    assert list(tmp_path.iterdir()) == []


def test_damage_is_found_once_and_reported_to_all_ranks(
    ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are verified by one rank each; what one finds keeps every rank from reading."""
    path = ranks(lambda rendezvous: save(rendezvous, tmp_path, 2), 2)[0]
    content = bytearray((path / "__1_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "__1_0.distcp").write_bytes(content)
    summed: list[str] = []
    plain = verify_module.file_checksum
    monkeypatch.setattr(
        verify_module, "file_checksum", lambda file: (summed.append(file.name), plain(file))[1]
    )

    def body(rendezvous: Any) -> dict[str, Tensor]:
        tensors, layouts = held(rendezvous.rank.rank, 2)
        with pytest.raises(CheckpointError, match="is damaged") as caught:
            load_checkpoint(path, tensors, layouts=layouts, channel=WritePlanner(rendezvous).loads)
        assert "`__1_0.distcp` was altered" in str(caught.value.why)
        return tensors

    for found in ranks(body, 2):
        assert not any(bool(tensor.any()) for tensor in found.values())
    assert sorted(summed) == [".metadata", "__0_0.distcp", "__1_0.distcp"]


def test_a_missing_tensor_of_one_rank_is_reported_to_all(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """A tensor that one rank alone wants and the checkpoint lacks ends the load of all, at once."""
    path = save_checkpoint(tmp_path, 1, {"a": torch.ones(2)}, {}, model_shape={})

    def body(rendezvous: Any) -> CheckpointError | OtherRankError:
        wanted = {"a": torch.zeros(2)}
        if rendezvous.rank.rank:
            wanted["b"] = torch.zeros(2)
        with pytest.raises((CheckpointError, OtherRankError), match="does not hold 1") as caught:
            load_checkpoint(path, wanted, channel=WritePlanner(rendezvous).loads)
        assert not wanted["a"].any()
        return caught.value

    first, second = ranks(body, 2)
    assert isinstance(first, OtherRankError)
    assert isinstance(second, CheckpointError)
    assert first.why == second.why == "missing: `b`"


def _cut_at_random(draw: random.Random, shape: tuple[int, ...]) -> list[ChunkBounds]:
    """Return chunks of any size that make a whole; each cut goes through one chunk."""
    chunks = [ChunkBounds((0,) * len(shape), shape)]
    for _ in range(draw.randint(0, 5)):
        chunk = chunks.pop(draw.randrange(len(chunks)))
        dim = draw.randrange(len(shape))
        at = draw.randint(0, chunk.size[dim])
        for low, size in ((0, at), (at, chunk.size[dim] - at)):
            offset = [o + low * (i == dim) for i, o in enumerate(chunk.offset)]
            sizes = [size if i == dim else n for i, n in enumerate(chunk.size)]
            chunks.append(ChunkBounds(tuple(offset), tuple(sizes)))
    return [chunk for chunk in chunks if math.prod(chunk.size)]


def _deal(draw: random.Random, chunks: list[ChunkBounds], size: int) -> list[list[ChunkBounds]]:
    """Return what each rank holds: any of the chunks, each by one rank or by two."""
    found: list[list[ChunkBounds]] = [[] for _ in range(size)]
    for chunk in chunks:
        for rank in draw.sample(range(size), k=draw.randint(1, 2)):
            found[rank].append(chunk)
    return found


def _held_chunks(whole: Tensor, chunks: list[ChunkBounds]) -> tuple[Tensor, TensorLayout]:
    """Return zeros that hold the chunks, one below the other and each in a corner, and a layout."""
    rows = [chunk.size[0] for chunk in chunks]
    local = torch.zeros(sum(rows), *whole.shape[1:], dtype=whole.dtype)
    starts = [(sum(rows[:i]), *(0,) * (whole.ndim - 1)) for i in range(len(chunks))]
    pieces = (Chunk(start, b.offset, b.size) for start, b in zip(starts, chunks, strict=True))
    return local, TensorLayout(tuple(whole.shape), tuple(pieces))


@pytest.mark.parametrize("seed", range(12))
def test_boxes_of_any_size(ranks: Callable[..., list[Any]], tmp_path: Path, seed: int) -> None:
    """Every element is read back by each rank, however unevenly a tensor is cut and distributed."""
    draw = random.Random(seed)
    wholes = {
        "two": torch.randn(draw.randint(1, 13), draw.randint(1, 7)),
        "three": torch.randint(0, 99, (draw.randint(1, 5), draw.randint(1, 5), 3)),
    }
    cuts = {}
    for when in ("before", "after"):
        for name, whole in wholes.items():
            cuts[when, name] = _deal(draw, _cut_at_random(draw, tuple(whole.shape)), 3)

    def body(rendezvous: Any) -> None:
        me, planner = rendezvous.rank.rank, WritePlanner(rendezvous)
        made = {n: _held_chunks(w, cuts["before", n][me]) for n, w in wholes.items()}
        layouts = {name: layout for name, (_, layout) in made.items()}
        for name, (local, layout) in made.items():
            layout.fill(local, wholes[name])
        tensors = {name: local for name, (local, layout) in made.items() if layout.chunks}
        found = planner.plan(tensors, layouts)
        path = save_checkpoint(
            tmp_path,
            1,
            found.views(tensors),
            {},
            model_shape={},
            plan=found,
            channel=planner.saves,
        )
        assert verify_checkpoint(path) == []
        wanted = {n: _held_chunks(w, cuts["after", n][me]) for n, w in wholes.items()}
        load_checkpoint(
            path,
            {name: local for name, (local, _) in wanted.items()},
            layouts={name: layout for name, (_, layout) in wanted.items()},
            channel=planner.loads,
        )
        for name, (local, layout) in wanted.items():
            expected = torch.zeros_like(local)
            layout.fill(expected, wholes[name])
            assert torch.equal(local, expected)

    assert ranks(body, 3) == [None] * 3


def test_rows_that_may_differ(tmp_path: Path) -> None:
    """More or fewer rows than the file has after the required ones; missing rows stay unchanged."""
    path = save_checkpoint(tmp_path, 1, {"w": torch.ones(6, 2)}, {}, model_shape={})
    more, fewer = torch.full((8, 2), 5.0), torch.full((4, 2), 5.0)
    load_checkpoint(path, {"w": more}, rows={"w": 4})
    assert more.tolist() == [[1.0, 1.0]] * 6 + [[5.0, 5.0]] * 2
    load_checkpoint(path, {"w": fewer}, rows={"w": 4})
    assert bool((fewer == 1).all())
    last = torch.zeros(4, 2)
    part = TensorLayout.split((4, 2), 0, rank=1, size=2)
    load_checkpoint(path, {"w": last}, rows={"w": 4}, layouts={"w": part})
    assert last.tolist() == [[1.0, 1.0]] * 2 + [[0.0, 0.0]] * 2
    for rows, wrong in (({"w": 5}, (4, 2)), ({"w": 7}, (8, 2)), ({"w": 4}, (6, 3)), ({}, (8, 2))):
        with pytest.raises(CheckpointError, match="another shape"):
            load_checkpoint(path, {"w": torch.zeros(wrong)}, rows=rows)
