"""State of Adam in Megatron's rank files, read and written.

Megatron numbers parameters by group: first parameters with weight decay, then biases and gains,
each in the order in which the model makes them.  Its file has only the numbers, so the mapping is
rebuilt in the same order and checked by the shapes; main parameters are also compared with the
weights of the model when they are read.

A run in half precision has float32 main parameters beside the state of torch's optimizer; in
float32 the model has them.

State of Megatron's distributed optimizer beside a rank file, in `distrib_optim.pt`.

The file has the buffers of `lmcore.conversion.megatron.optimizer.coalesced` for each part of the
model on the rank; the groups with the settings are in the rank file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmcore.base.errors import counted
from lmcore.conversion.foreign_pickle.records import load_content
from lmcore.conversion.megatron.directory import APART_NAME
from lmcore.conversion.megatron.optimizer.coalesced import coalesced_buffers, starts_in
from lmcore.conversion.megatron.optimizer.groups import (
    INNER,
    group_contents,
    group_values,
    settings_of,
    step_of,
    updates,
)
from lmcore.conversion.megatron.optimizer.loss_scale import grad_scaler, megatron_loss_scale
from lmcore.conversion.megatron.optimizer.moments import (
    Moments,
    UnreadOptimizer,
    other_optimizer,
)
from lmcore.conversion.megatron.parameters.names import TIED
from lmcore.conversion.megatron.rank_files.rank_file import Part, RankFile
from lmcore.conversion.state import ADAM, WEIGHT, OptimizerStateError, Progress

__all__ = [
    "moments_content",
    "read_distributed",
    "read_moments",
]

_NAME = "distrib_optim.pt"


def read_distributed(rank: RankFile, content: Mapping[str, Any]) -> Moments:
    """Return the state of a distributed Adam of one rank.

    Args:
        rank: File of the rank.
        content: Value of `optimizer` in it, which has the groups.

    Raises:
        UnreadOptimizer: There is no file with the state, or it is of another version.
        OptimizerStateError: The state does not fit the model.
        CheckpointError: The file is damaged.
    """
    path = rank.path.with_name(_NAME)
    if not path.is_file():
        raise UnreadOptimizer(f"it was distributed, and there is no `{_NAME}`")
    saved: Mapping[Any, Any] = load_content(path, compare=rank.compare)
    if not saved.get("buckets_coalesced"):
        raise UnreadOptimizer("it was distributed by a version of Megatron before 2024")
    tensors: dict[str, list[Tensor]] = {kind: [] for kind in (WEIGHT, *ADAM)}
    for number, part in enumerate(rank.parts):
        buffers = coalesced_buffers(path, saved.get(number))
        for kind, found in _parameters(path, part, buffers).items():
            tensors[kind] += found
    if len(rank.parts) in saved:
        raise UnreadOptimizer("it has several buffers for one part of the model")
    step, settings = group_values(content)
    return Moments(tensors, step, settings)


def _parameters(path: Path, part: Part, buffers: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the state of each parameter of one part, in the order of the file."""
    starts = starts_in(path, part.order, buffers[WEIGHT])
    sizes = [weight.shape for _, weight in part.order]
    return {
        kind: [
            buffer[start : start + size.numel()].view(size)
            for start, size in zip(starts, sizes, strict=True)
        ]
        for kind, buffer in buffers.items()
    }


_EMBEDDINGS = ("token_embedding", "output_embedding", TIED)
"""Beginnings of the names of parameters that `--decoupled-lr` is for."""
_MAIN = ("fp32_from_fp16_params", "fp32_from_fp16")
_HALF = (torch.float16, torch.bfloat16)


def read_moments(rank: RankFile) -> Moments | None:
    """Return the state of Adam of one rank; None if its file has no optimizer.

    Args:
        rank: File of the rank.

    Raises:
        UnreadOptimizer: It is another optimizer, or it is stored in an unknown form.
        OptimizerStateError: The state does not fit the model.
    """
    content = rank.content.get("optimizer")
    if isinstance(content, list) and len(content) == 1:
        content = content[0]
    if not content:
        if rank.path.name == APART_NAME and not rank.args.get("no_save_optim"):
            raise UnreadOptimizer(
                "it was distributed by a version of Megatron before 2024, and the learning-rate "
                "schedule is saved with it"
            )
        return None
    if not isinstance(content, dict):
        raise UnreadOptimizer("the run had several optimizers")
    if (other := other_optimizer(rank.args)) is not None:
        raise UnreadOptimizer(f"it is that of `{other}`")
    inner = next((content[name] for name in INNER if name in content), content)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(groups, list) or not all(isinstance(one, dict) for one in groups):
        raise UnreadOptimizer("it is of an unknown form")
    if all("params" in group for group in groups):
        main = next((content[name] for name in _MAIN if name in content), None)
        moments = _Reader(rank, groups, inner.get("state"), main).read()
    else:
        moments = read_distributed(rank, content)
    scale = megatron_loss_scale(content.get("grad_scaler"))
    return dataclasses.replace(moments, loss_scale=scale)


class _Reader:
    """Mapping of the optimizer's numbers to the parameters of one rank."""

    def __init__(self, rank: RankFile, groups: Sequence[Any], state: Any, main: Any) -> None:
        self._rank, self._groups, self._state, self._main = rank, groups, state, main
        self._names = [name for part in rank.parts for name, _ in part.order]
        self._weights = [tensor for part in rank.parts for _, tensor in part.order]

    def read(self) -> Moments:
        if not isinstance(self._state, dict) or not self._state:
            raise UnreadOptimizer("it has no state yet")
        tensors: dict[str, list[Tensor]] = {
            WEIGHT: list(self._weights),
            **{kind: [torch.empty(0)] * len(self._weights) for kind in ADAM},
        }
        expected = self._expected()
        steps: list[int | None] = []
        keys = [self._key(group) for group in self._groups]
        filled = [
            key
            for key, group in zip(keys, self._groups, strict=True)
            if isinstance(group["params"], list) and group["params"]
        ]
        if len(set(filled)) < len(filled):
            raise UnreadOptimizer("two of its groups of parameters cannot be told apart")
        for number, group in enumerate(self._groups):
            places = expected.pop(keys[number], [])
            numbers = group["params"]
            if not isinstance(numbers, list) or len(numbers) != len(places):
                found = (
                    counted(len(numbers), "parameter") if isinstance(numbers, list) else "no list"
                )
                raise self._unfit(f"a group has {found}, the model {len(places)}")
            mains = self._mains(number, places)
            for place, key in zip(places, numbers, strict=True):
                held = self._state.get(key) if isinstance(key, int) else None
                if not isinstance(held, dict) or not set(ADAM) <= held.keys():
                    raise UnreadOptimizer("it is not Adam's")
                steps.append(
                    step_of(held.get("step", group.get("step", self._state.get("common_step"))))
                )
                for kind, tensor in (
                    *((kind, held[kind]) for kind in ADAM),
                    (WEIGHT, mains[place]),
                ):
                    self._check(place, kind, tensor)
                    tensors[kind][place] = tensor.detach()
        if any(expected.values()):
            raise self._unfit("parameters are in no group")
        known = [step for step in steps if step is not None]
        return Moments(tensors, max(known, default=None), settings_of(self._groups))

    def _expected(self) -> dict[tuple[bool, bool], list[int]]:
        """Return the places of the parameters of each group."""
        separate = any(self._is_decoupled(group) for group in self._groups)
        found: dict[tuple[bool, bool], list[int]] = {}
        for place, (name, tensor) in enumerate(zip(self._names, self._weights, strict=True)):
            embedding = separate and name.startswith(_EMBEDDINGS)
            found.setdefault((tensor.ndim > 1, embedding), []).append(place)
        return found

    def _key(self, group: Mapping[str, Any]) -> tuple[bool, bool]:
        """Return if a group has weight decay, and if it has a separate learning rate."""
        scale = group.get("wd_mult", group.get("pre_wd_mult"))
        if not isinstance(scale, int | float):
            first = next(iter(group["params"]), None) if isinstance(group["params"], list) else None
            held = self._state.get(first) if isinstance(first, int) else None
            tensor = held.get(ADAM[0]) if isinstance(held, dict) else None
            decays = isinstance(tensor, Tensor) and tensor.ndim > 1
        else:
            decays = bool(scale)
        return decays, self._is_decoupled(group)

    def _is_decoupled(self, group: Mapping[str, Any]) -> bool:
        """Return True for a group of embeddings with a separate learning rate.

        Since 2025 all groups have `is_decoupled_lr: False`, and only the rate differs.
        """
        rate, usual = (self._rank.args.get(name) for name in ("decoupled_lr", "lr"))
        own = rate is not None and rate != usual and group.get("max_lr") == rate
        return group.get("is_decoupled_lr") is True or own

    def _mains(self, group: int, places: Sequence[int]) -> dict[int, Tensor]:
        """Return the main parameter of each place; parameters in float32 are their own."""
        found = {place: self._weights[place] for place in places}
        half = [place for place in places if found[place].dtype in _HALF]
        if not half:
            return found
        listed = isinstance(self._main, list) and group < len(self._main)
        saved = self._main[group] if listed else None
        if not isinstance(saved, list) or len(saved) != len(half):
            raise self._unfit(f"it lacks float32 parameters for {counted(len(half), 'weight')}")
        return found | dict(zip(half, saved, strict=True))

    def _check(self, place: int, kind: str, tensor: object) -> None:
        expected = tuple(self._weights[place].shape)
        if isinstance(tensor, Tensor) and tuple(tensor.shape) == expected:
            return
        found = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise self._unfit(f"{kind} of `{self._names[place]}` is {found}, not {list(expected)}")

    def _unfit(self, why: str) -> OptimizerStateError:
        return OptimizerStateError(
            f"the optimizer's state in `{self._rank.path}` does not fit the model",
            why=why,
            hint="copy the directories of all ranks again, or take the weights without it: "
            "`lmcore checkpoint convert --weights-only`",
        )


def moments_content(
    shares: Sequence[Mapping[str, Tensor]],
    dtype: torch.dtype,
    progress: Progress | None,
    *,
    step_of_parameters: bool,
) -> dict[str, Any]:
    """Return Megatron's value of `optimizer` in one rank's file.

    Args:
        shares: Tensors of each kind, of each parameter in the order of the file.
        dtype: Dtype of the model's weights.
        progress: Position of the run.
        step_of_parameters: True if the state of each parameter has the number of updates, as
            torch's Adam needs; the groups have it in any case, as fused optimizers need.
    """
    groups = group_contents(progress)
    step = updates(progress)
    state: dict[int, dict[str, Tensor]] = {}
    mains: list[list[Tensor]] = []
    for group in groups:
        decays = bool(group["wd_mult"])
        members = [one for one in shares if (one[WEIGHT].ndim > 1) == decays]
        first = len(state)
        for number, share in enumerate(members, start=first):
            state[number] = {kind: share[kind] for kind in ADAM}
            if step_of_parameters:
                state[number]["step"] = torch.tensor(float(step))
        mains.append([share[WEIGHT] for share in members])
        group["params"] = list(range(first, first + len(members)))
    inner = {"state": state, "param_groups": groups}
    if dtype == torch.float32:
        return inner
    return {"optimizer": inner, "fp32_from_fp16_params": mains, **grad_scaler(progress, dtype)}
