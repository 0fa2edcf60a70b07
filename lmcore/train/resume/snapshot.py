"""A run's state to checkpoints: one moment of it, which its processes write together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.accelerator.staging import stage_tensors
from lmcore.checkpoint import WritePlanner, save_checkpoint
from lmcore.train.diagnose.non_finite import check_weights
from lmcore.train.state import named_random_states

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.checkpoint import WritePlan
    from lmcore.config.plan import RunPlan
    from lmcore.data.blend.cyclic_sampler import OrderedSamples
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.runtime.process.channel import Channel
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.state import TrainState

__all__ = ["Snapshot", "data_order", "take_snapshot"]


def data_order(dataset: OrderedSamples) -> str:
    """Return a fingerprint of the order in which a dataset gives its samples.

    It is equal for two data sets whose samples are the same in the same order, however many of
    them a run is to use; no sample is read for it.
    """
    return dataset.order


@dataclass(frozen=True)
class Snapshot:
    """One moment of a run, on the host and ready to be written.

    Attributes:
        directory: Where checkpoints are.
        iteration: Steps done.
        tensors: What this process writes of weights, optimizer and random states.
        meta: What is no tensor.
        model_shape: The model's numbers.
        keep_last: Checkpoints that stay.
        write_plan: Write plan of this rank.
        channel: Connects the processes that write.
    """

    directory: Path
    iteration: int
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]
    model_shape: Mapping[str, Any]
    keep_last: int | None
    write_plan: WritePlan
    channel: Channel

    def write(self) -> Path:
        """Write the checkpoint and return its directory; all processes must call it.

        Raises:
            CheckpointError: It could not be written; earlier checkpoints are as they were.
            OtherRankError: So it is for another process.
        """
        return save_checkpoint(
            self.directory,
            self.iteration,
            self.tensors,
            self.meta,
            model_shape=self.model_shape,
            keep_last=self.keep_last,
            plan=self.write_plan,
            channel=self.channel,
        )


def take_snapshot(
    state: TrainState,
    plan: RunPlan,
    runtime: Runtime,
    tokenizer: Tokenizer,
    *,
    directory: Path,
    order: str,
    data: Mapping[str, Any] | None = None,
    planner: WritePlanner | None = None,
) -> Snapshot:
    """Bring *state* to the host as the run's stager does it; all processes must call it.

    The weights are those that the model holds: take and write it within `state.weights_for_use`,
    as the stager may hand out the live ones.
    Only what this process is to write comes to the host.

    Args:
        state: What is saved.
        plan: Says what of it.
        runtime: This process.
        tokenizer: Of the data.
        directory: Where checkpoints are.
        order: `data_order` of the training samples.
        data: Where the run stands in its data.
        planner: The processes of the run; None: this is the only one.

    Raises:
        NonFiniteError: A weight is NaN or infinite.
        PluginError: The stager did not do its work.
    """
    asked = plan.config.checkpoint
    check_weights(state)
    tensors = state.tensors(optimizer=asked.save_optim)
    layouts = state.layouts(tensors)
    if asked.save_rng:
        tensors |= named_random_states(runtime)
    planner = planner or WritePlanner()
    write_plan = planner.plan(tensors, layouts)
    meta: dict[str, Any] = {
        "counters": state.counters(),
        "schedule": state.schedule_settings(),
        "loss_scale": state.loss_scale.state(),
        "data_order": order,
        "data": data,
        "seed": plan.config.training.seed,
        "layout": dataclasses.asdict(plan.layout),
        "config": plan.to_dict(),
        "tokenizer": {"describe": tokenizer.describe(), "fingerprint": tokenizer.fingerprint()},
    }
    return Snapshot(
        directory,
        state.iteration,
        stage_tensors(runtime.stager, write_plan.views(tensors)),
        meta,
        state.parallel.shape.to_dict(),
        asked.keep_last,
        write_plan,
        planner.saves,
    )
