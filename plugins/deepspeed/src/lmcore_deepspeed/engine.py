"""`--engine deepspeed`: the step of a run taken by DeepSpeed, which shards by ZeRO.

Loss, optimizer, learning rate, loss scale and checkpoints are lmcore's own: a run may resume with
the other engine.  DeepSpeed reduces gradients, gathers weights, keeps the shards, clips, and
offloads state to the host with `--cpu-offload`.

Source: Rajbhandari et al., 2020; Ren et al., 2021.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lmcore.config.foreign.engine_file import read_engine_file
from lmcore.contract.op.records import OpContext
from lmcore.families.build import build_model
from lmcore.optim.loss_scale import loss_scale_of
from lmcore.optim.optimizer import Optimizer
from lmcore.optim.schedule import LearningRateSchedule
from lmcore.parallel.data_parallel import LossModule
from lmcore.parallel.mesh import ParallelMesh, ReplicaClass
from lmcore.parallel.scalar_collectives import all_reduce_scalars
from lmcore.runtime.process.consistency import check_equal
from lmcore.runtime.profiler_range import ProfilerRange, no_range
from lmcore.train.compilation import compiles_blocks
from lmcore.train.diagnose.non_finite import HINT, NonFiniteError, is_finite, where_in_run
from lmcore.train.state import TrainState
from lmcore.train.step_record import PendingStep, StepRecord
from lmcore.train.token_mean import TokenMean, may_mask_targets, no_valid_target
from lmcore_deepspeed.configuration import deepspeed_config, zero_stage
from lmcore_deepspeed.flat_optimizer import FlatUpdate, StateKind, state_kinds
from lmcore_deepspeed.package import initialize, open_deepspeed, time_waits
from lmcore_deepspeed.shards import Shards

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.loading.batch import Batch
    from lmcore.parallel.parallel_model import ParallelModel
    from lmcore.parallel.tensor_layout import TensorLayout
    from lmcore.runtime.runtime import Runtime

__all__ = ["DeepSpeedEngine", "DeepSpeedState", "open_deepspeed_engine"]

logger = logging.getLogger(f"lmcore.{__name__}")  # of the lines that lmcore formats

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@contextlib.contextmanager
def open_deepspeed_engine(
    plan: RunPlan, runtime: Runtime, profiler_range: ProfilerRange
) -> Iterator[DeepSpeedEngine]:
    """Build the model of a run for DeepSpeed; all processes must call it.

    Args:
        plan: The run.
        runtime: Device, kernels and processes.
        profiler_range: Names the parts of a step in a profile.

    Raises:
        ConfigError: The file of `--deepspeed-config` cannot be read, or DeepSpeed refuses it.
        DeviceError: DeepSpeed cannot be imported or connected.
        MissingPackageError: DeepSpeed is not installed.
        RunError: The ranks read different files.
    """
    path = plan.config.parallel.deepspeed_config
    precision = runtime.precision
    config = deepspeed_config(
        plan,
        read_engine_file(path) if path is not None else {},
        compute=precision.compute,
        reduce=precision.reduce,
    )
    if runtime.processes is not None:
        check_equal(
            runtime.processes.rendezvous,
            "their DeepSpeed configuration",
            config,
            hint="give all processes the same file",
        )
    with open_deepspeed(runtime) as package:
        engine = DeepSpeedEngine(plan, runtime, package, config, profiler_range)
        try:
            yield engine
        finally:
            engine.close()


class DeepSpeedEngine:
    """The engine of DeepSpeed; `begin` comes between loading and the first step.

    Attributes:
        parallel: The model on the processes of the run.
        state: State of the run.
        divided: True if each process holds a part of the model only.
        run_files: DeepSpeed's version and configuration, for the run directory.
    """

    def __init__(
        self,
        plan: RunPlan,
        runtime: Runtime,
        package: Any,
        config: dict[str, Any],
        profiler_range: ProfilerRange = no_range,
    ) -> None:
        """Build the model on the host, to be initialized or loaded there.

        Args:
            plan: The run.
            runtime: Device, kernels and processes.
            package: The package `deepspeed`.
            config: Configuration of DeepSpeed.
            profiler_range: Names the parts of a step in a profile.
        """
        self.profiler_range = profiler_range
        self.plan, self.runtime, self.package, self.config = plan, runtime, package, config
        self.batch_sizes = plan.batch_sizes
        self.samples_at_once = plan.global_batch_size // plan.num_micro_batches
        self.device = runtime.device.torch_device
        self.context = runtime.precision.context
        self.stage = zero_stage(plan)
        self.divided = self.stage == 3
        self.run_files = {"deepspeed.json": {"version": package.__version__, "config": config}}
        self._half = _HALVES.get(runtime.precision.compute)
        self.parallel = DeepSpeedModel(plan, runtime)
        self._kinds = state_kinds(plan.config.optimizer, self._bind)
        self._engine: Any = None
        self._update: FlatUpdate | None = None
        self._shards: Shards | None = None
        self._loaded: dict[str, Tensor] = {}
        self.state = DeepSpeedState(
            cast("ParallelModel", self.parallel),
            _ShardedOptimizer(()),
            LearningRateSchedule.from_plan(plan),
            loss_scale_of(plan.config.accelerator, runtime.precision),
            engine=self,
        )

    def begin(self) -> None:
        """Pass the model with its present weights to DeepSpeed; all processes must call it.

        Raises:
            ConfigError: DeepSpeed refuses its configuration.
        """
        root, asked = self.parallel.root, self.plan.config.optimizer
        parameters = dict(self.parallel.model.named_parameters())
        exact = {name: weight.detach() for name, weight in parameters.items()} if self._half else {}
        # Before weights are sharded: weight decay depends on their shapes.
        self._update = FlatUpdate(asked, parameters.items(), self._bind)
        if self.stage == 3:
            self._shard(root)
        self._engine = initialize(self.package, root, self._update, self.config, self.runtime)
        time_waits(self.package, self.parallel.mesh.clock)
        shards = Shards(self.package, self._engine, parameters, self._update)
        for name, weight in exact.items():
            shards.set_weight(name, weight)  # DeepSpeed's own copies are rounded
        for kind in self._kinds if self._loaded else []:
            for name in parameters:
                shards.set_state(name, kind, self._loaded.pop(_state_name(name, kind)))
        self._shards = shards
        host = ", offloaded to the host" if self.plan.config.parallel.cpu_offload else ""
        logger.info(
            "engine    DeepSpeed %s, ZeRO stage %d%s", self.package.__version__, self.stage, host
        )

    def _shard(self, root: nn.Module) -> None:
        """Move the weights from the host to the device one by one, to each rank its shard."""
        if self._half is not None:
            for parameter in root.parameters():
                parameter.data = parameter.data.to(self._half)
        self.package.zero.Init(module=root, config_dict_or_path=self.config, dtype=self._half)
        # The weight of the head may be the embedding's, and is used outside of that module.
        head = self.parallel.model.head_weight
        if head is not None:
            self.package.zero.register_external_parameter(root, head)

    def step(
        self,
        batches: Iterator[Batch],
        requests: Callable[[], tuple[float, ...]] = tuple,
    ) -> PendingStep:
        """Take one step and count it; see `TrainStep`.

        Raises:
            DataError: All targets of the global batch are masked; nothing was updated.
            NonFiniteError: Loss or gradient norm is NaN or infinite, and no loss scale can be
                lowered; nothing was updated.
        """
        state = self.state
        samples = self.batch_sizes.at(state.consumed_samples)
        own = self._run(batches, samples, state.loss_scale.value)
        with self.profiler_range("reduce"):
            wait = self.parallel.mesh.clock.wait
            summed = wait(all_reduce_scalars, self.runtime, *own, *requests())
        totals, summed = summed[: len(own)], summed[len(own) :]
        terms = [total / self.runtime.rank.world_size for total in totals]
        loss = sum(terms)
        if not math.isfinite(loss) and self._half is not torch.float16:
            raise _non_finite(state, f"the loss is {loss}", samples)
        rate = state.schedule(state.scheduled_samples + samples)
        with self.profiler_range("optimizer"):
            norm = self._step(rate)
        skipped = not math.isfinite(norm)
        if not state.loss_scale.update(overflow=skipped):
            raise _non_finite(state, f"the gradient norm is {norm}", samples)
        if skipped:
            state.skipped_iterations += 1
        else:
            state.scheduled_samples += samples
        seq_length = self.plan.config.model.seq_length
        rate = state.schedule(state.scheduled_samples)
        record = StepRecord.count(state, samples, seq_length, rate)
        names = [one.key for one in self.parallel.model.family.losses]
        losses = dict(zip(names, terms, strict=True))
        return PendingStep.of(record.complete(losses, None if skipped else norm, tuple(summed)))

    def _run(self, batches: Iterator[Batch], samples: int, scale: float) -> list[float]:
        """Run forward and backward of each micro-batch; return this rank's sum of each loss."""
        engine, count = self._engine, samples // self.samples_at_once
        engine.set_train_batch_size(samples)
        if hasattr(engine.optimizer, "gradient_accumulation_steps"):
            engine.optimizer.gradient_accumulation_steps = count
        if self._half is torch.float16:
            engine.optimizer.override_loss_scale(scale)
        mean = TokenMean(self.plan, self.parallel.model.family, self.device)
        share, losses = 1.0 / count, []
        taken: Iterator[Batch] = map(mean.count, itertools.islice(batches, count))
        if may_mask_targets(self.plan):
            # Counted before the first one runs: DeepSpeed clips gradients.
            taken = mean.take(batches, count, self.runtime)
            self._require_targets(mean, samples)
        for number in range(1, count + 1):
            engine.set_gradient_accumulation_boundary(number == count)
            with self.profiler_range("data"):
                batch = mean.batch(next(taken), share=share)
            with self.profiler_range("forward"), self.context():
                loss = engine(**batch)
            # Not the output itself: without a loss scale, DeepSpeed would divide its gradient by
            # the number of micro-batches, as the loss already is.
            with self.profiler_range("backward"):
                engine.backward(loss.sum() * 1.0, scale_wrt_gas=False)
            self.runtime.device.step_boundary()
            losses.append(loss.detach())
        rows = [one.reshape(-1).tolist() for one in losses]
        return [sum(column) for column in zip(*rows, strict=True)]

    def _require_targets(self, mean: TokenMean, samples: int) -> None:
        ranks, wait = self.runtime.rank.world_size, self.parallel.mesh.clock.wait
        excluded = wait(all_reduce_scalars, self.runtime, *mean.excluded)
        if not mean.has_targets(excluded, ranks):
            raise no_valid_target(where_in_run(self.state, samples))

    def _step(self, rate: float) -> float:
        """Clip and update; return the gradient norm, infinite if DeepSpeed skipped the update."""
        assert self._update is not None, "the engine has begun"
        for group in self._update.param_groups:
            group["lr"] = rate
        self._engine.step()
        self.runtime.device.step_boundary()
        return float(self._engine.get_global_grad_norm())

    def tensors(self, *, optimizer: bool) -> dict[str, Tensor]:
        """Return weights and, if wanted, optimizer state; all processes must call it.

        Before `begin` they are the live tensors on the host, to be loaded; afterwards whole copies,
        each on the host of one rank.

        Args:
            optimizer: True to include the optimizer state.

        Raises:
            NonFiniteError: A weight is NaN or infinite.
        """
        if self._shards is None:
            found = {f"model.{name}": p.detach() for name, p in self.parallel.named_parameters()}
            if optimizer:
                self._loaded = self._loaded or self._empty_state()
                found |= {f"optimizer.{name}": tensor for name, tensor in self._loaded.items()}
            return found
        return self._gathered(self._kinds if optimizer else [])

    def _gathered(self, kinds: list[StateKind]) -> dict[str, Tensor]:
        names = [name for name, _ in self.parallel.named_parameters()]
        assert self._shards is not None, "the engine has begun"
        found: dict[str, Tensor] = {}
        wanted: list[tuple[str, str, StateKind | None]] = [("model", name, None) for name in names]
        wanted += [("optimizer", name, kind) for kind in kinds for name in names]
        size, rank = self.runtime.rank.world_size, self.runtime.rank.rank
        for number, (part, name, kind) in enumerate(wanted):
            tensor = self._shards.weight(name) if kind is None else self._shards.state(name, kind)
            if kind is None and not is_finite(tensor):
                raise NonFiniteError(
                    f"weights are not finite after step {self.state.iteration}: `{name}`",
                    why="the last update moved them too far; they are not saved",
                    hint=HINT,
                )
            if number % size == rank:
                own = name if kind is None else _state_name(name, kind)
                found[f"{part}.{own}"] = tensor.detach().to("cpu", copy=True)
        return found

    def close(self) -> None:
        """Destroy DeepSpeed's engine."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = self._shards = None

    def _empty_state(self) -> dict[str, Tensor]:
        """Return zeros for the optimizer's state on the host, to be loaded."""
        return {
            _state_name(name, kind): torch.zeros(
                parameter.shape if kind.shaped else (), dtype=kind.dtype, device="cpu"
            )
            for kind in self._kinds
            for name, parameter in self.parallel.named_parameters()
        }

    def _bind(self, op: str) -> Callable[..., None]:
        offload = self.plan.config.parallel.cpu_offload
        device_type = "cpu" if offload else self.runtime.device.type
        where = OpContext(device_type, self.runtime.precision.keep)
        bound: Callable[..., None] = self.runtime.ops.bind(op, where)
        return bound


class DeepSpeedModel:
    """The model of the DeepSpeed engine, with the interface of `ParallelModel`.

    Attributes:
        root: Module that is passed to DeepSpeed.
        mesh: Mesh of the run; all ranks are data-parallel.
        shape: Shape of the model.
    """

    def __init__(self, plan: RunPlan, runtime: Runtime) -> None:
        """Build the model on the host, its weights not yet initialized."""
        self.shape, self._stage = plan.shape, zero_stage(plan)
        self.mesh = ParallelMesh.of(plan.layout, runtime)
        model = build_model(
            self.shape,
            runtime,
            compile_blocks=compiles_blocks(plan, runtime.device),
            masked=plan.config.data.reset_attention_mask,
            device=torch.device("cpu"),
        )
        self.root, self.model = LossModule(model), model

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters by name, as this rank holds them now."""
        return list(self.model.named_parameters())

    def initialize(self, seed: int) -> None:
        """Set every weight to its initial value; to be called before `DeepSpeedEngine.begin`."""
        self.model.initialize(seed)

    def replica_classes(self) -> list[ReplicaClass]:
        """Return the weights that all ranks hold, in the dtype of the model; none in stage 3."""
        if self._stage == 3 or self.mesh.replicas.size == 1:
            return []
        groups = self.mesh.replica_groups(tensor=True)
        return [ReplicaClass(groups, dict(self.named_parameters()))]

    def reshard(self) -> None:
        """Do nothing: DeepSpeed gathers weights for each pass."""

    def loss(self, **batch: Tensor) -> Tensor:
        """Return `Model.loss`."""
        found: Tensor = self.root(**batch)
        return found

    def total_loss(self, total: float) -> float:
        """Return the mean loss over all ranks from the sum of their losses."""
        return total / self.mesh.layout.world_size


@dataclass
class DeepSpeedState(TrainState):
    """The state of a run whose tensors are sharded by DeepSpeed.

    Attributes:
        engine: Engine that gathers the tensors.
    """

    engine: DeepSpeedEngine = field(kw_only=True)

    @contextlib.contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Do nothing: the weights in training are the weights to use."""
        yield

    def tensors(self, *, optimizer: bool = True) -> dict[str, Tensor]:
        """Return whole tensors by checkpoint name; see `DeepSpeedEngine.tensors`."""
        return self.engine.tensors(optimizer=optimizer)

    def layouts(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorLayout]:  # noqa: ARG002
        """Return nothing: all tensors are whole."""
        return {}


class _ShardedOptimizer(Optimizer):
    """A placeholder: the optimizer of the run is called by DeepSpeed."""

    def _step(self, lr: float) -> None:
        raise AssertionError(f"DeepSpeed takes the step, at rate {lr}")


def _state_name(parameter: str, kind: StateKind) -> str:
    return f"{kind.name}.{parameter}"


def _non_finite(state: TrainState, what: str, samples: int) -> NonFiniteError:
    why = "nothing was updated in this step"
    if state.loss_scale.limit:
        why = f"{state.loss_scale.limit}; {why}"
    return NonFiniteError(f"{what} at {where_in_run(state, samples)}", why=why, hint=HINT)
