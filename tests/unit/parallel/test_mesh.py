"""Axes of a run: every one covers the world exactly once, and all ranks make the same groups."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.section.parallel import SCHEDULES
from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.family import Stack
from lmcore.model.shape import ModelShape
from lmcore.parallel.mesh import Axis, ParallelMesh
from lmcore.parallel.pipeline_split import own_part

AXES = ("tensor", "context", "pipeline", "replicas", "shards", "shard_replicas")


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    """Draw sizes of at most 96 processes."""
    small = st.integers(1, 4)
    tensor, context, pipeline = draw(small), draw(small), draw(small)
    room = max(1, 96 // (tensor * context * pipeline))
    replicas = draw(st.integers(1, min(room, 3)))
    shards = draw(st.integers(1, max(1, min(room // replicas, 4))))
    return ParallelLayout(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        data=replicas * shards,
        replicas=replicas,
        sequence=draw(st.booleans()),
        zero_stage=draw(st.integers(0, 3)),
        schedule=draw(st.sampled_from(SCHEDULES)),
    )


def mesh_of(layout: ParallelLayout, rank: int) -> tuple[ParallelMesh, list[tuple[int, ...]]]:
    """Return a rank's mesh and the groups that it created, as tuples of ranks."""
    made: list[tuple[int, ...]] = []

    def new_group(ranks: Sequence[int], _name: str) -> Any:
        made.append(tuple(ranks))
        return tuple(ranks)

    return ParallelMesh(layout, rank, new_group=new_group), made


@given(layouts())
def test_axes_cover_the_world(layout: ParallelLayout) -> None:
    """Each rank is once in one line of each axis, at the index that its own mesh says."""
    meshes = {rank: mesh_of(layout, rank) for rank in range(layout.world_size)}
    groups = {tuple(made) for _, made in meshes.values()}
    assert len(groups) == 1, "ranks make other groups, or in another order"
    for name in AXES:
        seen: collections.Counter[int] = collections.Counter()
        lines = {getattr(mesh, name).ranks for mesh, _ in meshes.values()}
        for line in lines:
            seen.update(line)
        assert seen == dict.fromkeys(range(layout.world_size), 1), name
        for rank, (mesh, made) in meshes.items():
            axis: Axis = getattr(mesh, name)
            assert axis.ranks[axis.rank] == rank
            assert axis.size == len(axis.ranks)
            assert axis.group == (axis.ranks if axis.size > 1 else None)
            assert axis.group is None or axis.group in made


@given(layouts())
def test_axes_have_their_sizes(layout: ParallelLayout) -> None:
    """Sizes are the layout's; together the axes that divide are the world."""
    for rank in {0, layout.world_size // 2, layout.world_size - 1}:
        mesh, _ = mesh_of(layout, rank)
        assert mesh.tensor.size == layout.tensor
        assert mesh.context.size == layout.context
        assert mesh.pipeline.size == layout.pipeline
        assert mesh.replicas.size == layout.data * layout.context
        assert mesh.tensor.size * mesh.pipeline.size * mesh.replicas.size == layout.world_size
        if layout.zero_stage:
            assert mesh.shards.size == layout.data * layout.context // layout.replicas
            assert mesh.shards.size * mesh.shard_replicas.size == mesh.replicas.size
            together = sorted(set(mesh.shards.ranks) | set(mesh.shard_replicas.ranks))
            assert set(together) <= set(mesh.replicas.ranks)
        else:
            assert mesh.shards.size == mesh.shard_replicas.size == 1


@given(layouts())
def test_samples_are_shared_out(layout: ParallelLayout) -> None:
    """Each slice of the samples belongs to the ranks of one replica, on all other axes."""
    found = collections.defaultdict(list)
    meshes = [mesh_of(layout, rank)[0] for rank in range(layout.world_size)]
    for rank, mesh in enumerate(meshes):
        found[mesh.data_rank].append(rank)
        for axis in (mesh.tensor, mesh.context, mesh.pipeline):
            assert {meshes[other].data_rank for other in axis.ranks} == {mesh.data_rank}
    assert sorted(found) == list(range(layout.data))
    assert {len(ranks) for ranks in found.values()} == {layout.world_size // layout.data}


def test_neighbours_divide_layers() -> None:
    """Tensor-parallel ranks are neighbours; pipeline stages are farthest apart."""
    layout = ParallelLayout(tensor=2, context=2, pipeline=2, data=2)
    mesh, _ = mesh_of(layout, 5)
    assert mesh.tensor.ranks == (4, 5)
    assert mesh.context.ranks == (5, 7)
    assert mesh.replicas.ranks == (1, 3, 5, 7)
    assert mesh.pipeline.ranks == (5, 13)
    assert mesh.coordinates == (0, 0, 1, 0, 1)


def test_shards_lie_within_a_replica() -> None:
    """The processes of a replica are neighbours; their counterparts hold the same shards."""
    layout = ParallelLayout(data=4, context=2, replicas=2, zero_stage=3)
    mesh, _ = mesh_of(layout, 6)
    assert mesh.shards.ranks == (4, 5, 6, 7)
    assert mesh.shard_replicas.ranks == (2, 6)
    assert mesh.replicas.ranks == tuple(range(8))


def test_holders_in_a_pipeline() -> None:
    """Ranks that share a weight are an axis; all ranks create the group of each pipeline."""
    layout = ParallelLayout(pipeline=4, tensor=2)
    for rank, ranks in enumerate([(0, 4, 6), (1, 5, 7), (2,), (3,), (0, 4, 6), (1, 5, 7)]):
        mesh, made = mesh_of(layout, rank)
        assert mesh.pipeline_holders((0, 2, 3)).ranks == ranks
        assert made[-2:] == [(0, 4, 6), (1, 5, 7)]


def test_ends_share_a_tied_embedding() -> None:
    """The first and the last part do, unless one rank has both."""
    shape = ModelShape(4, 8, 2, 16, 8, 16)
    model = GPT(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    for schedule, stages, holders in (("1f1b", 1, (0, 3)), ("zero-bubble-v", 2, None)):
        layout = ParallelLayout(pipeline=4, schedule=schedule, stages_per_process=stages)
        stacks = (Stack("", 4 * stages, "tokens_BS"),)
        found = model.holders([own_part(stacks, rank, layout) for rank in range(4)])
        assert found == ({} if holders is None else {"token_embedding.weight": holders})


def test_one_process_makes_no_group() -> None:
    """One rank needs no process group."""
    mesh = ParallelMesh(ParallelLayout(), 0)
    assert {getattr(mesh, name) for name in AXES} == {Axis(0, 1, (0,), None)}


@given(layouts(), st.booleans(), st.booleans())
def test_replica_groups(layout: ParallelLayout, tensor: bool, ends: bool) -> None:
    """Ranks hold the same part if the axes that it is replicated over connect them."""
    meshes = [mesh_of(layout, rank)[0] for rank in range(layout.world_size)]
    connects = ends and meshes[0].pipeline.size > 1
    holders = (0, layout.pipeline - 1) if connects else ()
    ends_of = [mesh.pipeline_holders(holders) for mesh in meshes] if connects else []
    groups = {(mesh.rank,) for mesh in meshes}
    names = ["shard_replicas" if layout.zero_stage else "replicas", *(["tensor"] * tensor)]
    axes = [getattr(mesh, name) for name in names for mesh in meshes]
    for axis in [*axes, *ends_of]:
        joined = [group for group in groups if set(group) & set(axis.ranks)]
        groups = (groups - set(joined)) | {tuple(sorted(sum(joined, ())))}
    if connects:
        size = layout.world_size // layout.pipeline
        middle = range(size, layout.world_size - size)
        groups = {group for group in groups if not set(group) & set(middle)}
    found = meshes[0].replica_groups(tensor=tensor, holders=holders).tolist()
    assert {tuple(sorted(group)) for group in found} == groups
