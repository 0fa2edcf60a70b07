"""Training runs of a tiny GPT in this process, by the core's own parts, on one device.

A plugin's device is created once in a process, so runs that differ in policies or kernels share it:
each gets a separate `Runtime` around the same device.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.config.load import load_config
from lmcore.config.resolve import resolve
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate
from lmcore.contract.op.records import missing_packages, parse_preferences
from lmcore.contract.op.spec import OP_SPECS
from lmcore.data.blend.check import inspect_sources
from lmcore.data.loading.loader import BatchLoader
from lmcore.data.prepare.plain_text import prepare_text
from lmcore.data.tokenizer import build_tokenizer
from lmcore.parallel.parallel_model import ParallelModel, parallelize
from lmcore.parallel.random_states import random_states, seed_everything
from lmcore.plugin import build_op_table, create_device
from lmcore.plugin.registrations import plugin_sections
from lmcore.plugin.selection import chosen_plugin
from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.policies import start_policies
from lmcore.runtime.runtime import Runtime, deterministic_algorithms
from lmcore.train.datasets import build_datasets
from lmcore.train.resume.point import find_resume_point
from lmcore.train.resume.restore import restore
from lmcore.train.resume.save import Saver, Snapshot, take_snapshot
from lmcore.train.state import TrainState
from lmcore.train.step import TrainStep
from lmcore_conformance.registry import NotApplicable

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.contract import Device
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.parallel.tensor_layout import TensorLayout
    from lmcore.plugin import PluginSet, Selection
    from lmcore.runtime.process.group import Processes
    from lmcore_conformance.bench import Bench

__all__ = ["DROPOUT", "REFERENCES", "TinyRuns", "Trained", "shape_flags", "tiny_runs"]

_FLAGS = (
    "--num-layers 2 --hidden-size 24 --num-attention-heads 3 --seq-length 20"
    " --make-vocab-size-divisible-by 8 --eval-iters 0 --lr 5e-3 --lr-decay-style constant"
    " --num-prefetch 1"
)
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
REFERENCES = "--ops " + " ".join(f"{spec.name}=reference" for spec in OP_SPECS)
"""The flags that bind the core's reference for every op."""

_FLAGS_OF_OP = MappingProxyType(
    {
        "swiglu": ("bias_gelu", "--swiglu"),
        "rms_norm": ("layer_norm", "--normalization RMSNorm"),
        "rotary_embedding": ("", "--position-embedding-type rope"),
    }
)
"""Flags of a model with an op that the tiny model lacks, and the op that it has instead."""

_CHARACTERS = 6_000


def _close(right: list[float], found: list[float], limit: float) -> bool:
    """Return True if all are as close as a relative difference; NaN is equal to NaN."""
    return len(right) == len(found) and all(
        one == other
        or abs(one - other) <= limit * abs(one)
        or (math.isnan(one) and math.isnan(other))
        for one, other in zip(right, found, strict=True)
    )


def shape_flags(*, micro: int = 4, batch: int = 4) -> str:
    """Return the flags of the tiny model and its batches, for a run by the command line."""
    return f"{_FLAGS} --micro-batch-size {micro} --global-batch-size {batch}"


@dataclass(frozen=True)
class Trained:
    """Result of a run.

    Attributes:
        losses, norms: values of each step; a norm is NaN if the step was skipped.
        tensors: Weights, optimizer state and random states at the end, on the host.
        kernels: bound kernels by op.
        layouts: part of the whole tensor that each weight is, by its name.
    """

    losses: list[float]
    norms: list[float]
    tensors: dict[str, Tensor]
    kernels: dict[str, str]
    layouts: dict[str, TensorLayout]

    def differing(self, other: Trained) -> list[str]:
        """Return the names that are not bitwise equal in both."""
        found = [
            name
            for name in sorted(self.tensors.keys() | other.tensors.keys())
            if name not in self.tensors
            or name not in other.tensors
            or not torch.equal(self.tensors[name], other.tensors[name])
        ]
        pairs = {"losses": (self.losses, other.losses), "norms": (self.norms, other.norms)}
        return [name for name, (first, second) in pairs.items() if first != second] + found

    def apart(self, other: Trained, *, curve: float, tensors: float) -> list[str]:
        """Return the names that differ by more than rounding; whole numbers must be equal.

        Args:
            curve: Largest relative difference of a loss or a norm.
            tensors: Largest norm of the difference of a tensor, by the norm of the tensor.
        """
        pairs = {"losses": (self.losses, other.losses), "norms": (self.norms, other.norms)}
        found = [name for name, (own, others) in pairs.items() if not _close(own, others, curve)]
        for name in self.differing(other):
            first, second = self.tensors.get(name), other.tensors.get(name)
            if name in pairs or (
                first is not None
                and second is not None
                and first.is_floating_point()
                and first.shape == second.shape
                and (second - first).double().norm() <= tensors * first.double().norm()
            ):
                continue
            found.append(name)
        return found


class TinyRuns:
    """Runs on the plugin's device, and on the host for comparison; data is prepared once.

    Attributes:
        used: names of the plugins whose kernels, policies or backend a run used.
    """

    def __init__(self, bench: Bench, folder: Path) -> None:
        """Write below *folder*."""
        self.bench = bench
        self.folder = folder
        self.used: set[str] = set()
        self._host: tuple[Selection, Device] | None = None

    @cached_property
    def prefix(self) -> str:
        """The dataset: some thousand characters of the bundled text."""
        text = (resources.files("lmcore.data") / "bundled/shakespeare.txt").read_text("utf-8")
        file = self.folder / "text.txt"
        file.write_text(text[:_CHARACTERS], "utf-8")
        prepare_text(file, self.tokenizer, self.folder / "text", document_characters=256)
        return str(self.folder / "text_text_document")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of bytes."""
        return build_tokenizer("ByteTokenizer", vocab_file=None, merge_file=None, vocab_size=None)

    def train(
        self,
        flags: str = "",
        *,
        steps: int = 6,
        host: bool = False,
        processes: Processes | None = None,
        around_step: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        see: Callable[[str, Tensor], None] | None = None,
    ) -> Trained:
        """Train and return the results.

        Args:
            flags: flags of `lmcore train`, beside the tiny model's.
            steps: Until this one; a run that is continued begins where its checkpoint is.
            host: True to train on the CPU, by its own plugin.
            processes: processes that train together and all call this; None: this one alone.
            around_step: makes the context of each step.
            see: gets the name and the gradient of each weight, before gradients are clipped.
        """
        plan = self._plan(flags, processes.rank.world_size if processes else 1)
        plugins, selection, device = self._place(host=host)
        with deterministic_algorithms(wanted=plan.config.accelerator.deterministic):
            runtime = _runtime(plan, plugins, selection, device, processes)
            return self._trained(plan, runtime, steps, around_step, see)

    def _plan(self, flags: str, world_size: int) -> RunPlan:
        arguments = [*shape_flags().split(), *self._op_flags()]
        arguments += ["--data-path", self.prefix, *flags.split()]
        arguments = _last_of_each(arguments)
        if "--train-iters" not in arguments:
            arguments += ["--train-iters", "20"]
        loaded = load_config(arguments, plugins=plugin_sections(self.bench.plugins))
        sources, problems = inspect_sources(loaded.sources[0])
        return resolve(
            validate(loaded, world_size=world_size, further=problems),
            tokenizer=TokenizerIdentity.of(self.tokenizer),
            sources=sources,
            resume=find_resume_point(loaded.config.checkpoint),
        )

    def _op_flags(self) -> list[str]:
        """Return the flags of a model that has the ops whose kernels alone are tried."""
        if not self.bench.subject:
            return []
        ops = {impl.op for impl in self.bench.kernels if not missing_packages(impl)}
        pairs = _FLAGS_OF_OP.items()
        chosen = [flags for op, (other, flags) in pairs if op in ops and other not in ops]
        return " ".join(chosen).split()

    def _place(self, *, host: bool) -> tuple[PluginSet, Selection, Device]:
        bench = self.bench
        if not host or bench.selection.plugin == "cpu":
            return bench.plugins, bench.selection, bench.device
        if self._host is None:
            record = bench.plugins.usable_record("cpu")
            selection = chosen_plugin(bench.plugins, record, "it is compared with")
            self._host = selection, create_device(bench.plugins, selection, bench.config)
        return bench.plugins, *self._host

    def _trained(
        self,
        plan: RunPlan,
        runtime: Runtime,
        steps: int,
        around_step: Callable[[], AbstractContextManager[Any]],
        see: Callable[[str, Tensor], None] | None = None,
    ) -> Trained:
        directory = Path(plan.config.checkpoint.save or self.folder / "unused")
        datasets = build_datasets(plan, self.tokenizer, directory)
        order = datasets.order
        seed_everything(plan.config.training.seed, runtime, plan.layout)
        with runtime.ops.bind_all():
            parallel = parallelize(
                plan.shape,
                plan.layout,
                runtime,
                compile_blocks=bool(plan.config.training.compile),
            )
            if plan.config.training.step_graph:
                parallel.capture_graph(runtime.device)
            state = TrainState.create(parallel, plan, runtime)
            if see is not None:
                _show_gradients(parallel, see)
            step = TrainStep(state, plan, runtime)
        restore(state, plan, runtime, order=order)
        state.model.train()

        def snapshot() -> Snapshot:
            return take_snapshot(
                state,
                plan,
                runtime,
                self.tokenizer,
                directory=directory / "checkpoints",
                order=order,
            )

        losses, norms = [], []
        with (
            Saver(snapshot, background=plan.config.checkpoint.async_save) as saver,
            BatchLoader(
                datasets.train,
                micro_batch_size=plan.config.training.micro_batch_size,
                consumed_samples=state.consumed_samples,
                data_parallel_rank=parallel.mesh.data_rank,
                data_parallel_size=plan.layout.data,
                prefetch=plan.config.data.num_prefetch,
                pin=runtime.device.pin_memory,
                collation=datasets.collation,
            ) as batches,
        ):
            while state.iteration < steps:
                with around_step():
                    result = step(batches).result()
                losses.append(math.nan if result.loss is None else result.loss)
                norms.append(math.nan if result.grad_norm is None else result.grad_norm)
                interval = plan.config.checkpoint.save_interval
                if interval and state.iteration % interval == 0:
                    saver.save()
        runtime.device.synchronize()
        tensors = {
            name: tensor.detach().to("cpu").clone()
            for name, tensor in (state.tensors() | random_states(runtime)).items()
        }
        bound = {
            resolution.op: f"{resolution.plugin}:{resolution.chosen}"
            for resolution in runtime.ops.resolutions
        }
        layouts = {f"model.{name}": layout for name, layout in parallel.layouts.items()}
        self.used |= {resolution.plugin for resolution in runtime.ops.resolutions}
        self.used |= {runtime.precision.plugin, runtime.recompute.plugin}
        self.used |= {runtime.stager.plugin} if plan.config.checkpoint.save_interval else set()
        self.used |= {runtime.processes.backend.plugin} if runtime.processes else set()
        return Trained(losses, norms, tensors, bound, layouts)


@contextlib.contextmanager
def tiny_runs(bench: Bench) -> Iterator[TinyRuns]:
    """Return runs that write into a separate folder, which is removed afterwards.

    Raises:
        NotApplicable: The runs used nothing of the plugin whose offers alone are tried.
    """
    with tempfile.TemporaryDirectory(prefix="lmcore-conformance-") as folder:
        runs = TinyRuns(bench, Path(folder))
        yield runs
    if bench.subject and bench.subject not in runs.used:
        raise NotApplicable(f"its runs use nothing of plugin `{bench.subject}`")


def _show_gradients(parallel: ParallelModel, see: Callable[[str, Tensor], None]) -> None:
    """Have a model show the gradients of each step to a function, when they are complete."""
    complete = parallel.gradients

    def gradients() -> list[Tensor]:
        found = complete()
        for local in parallel.parameters:
            if local.tensor.grad is not None:
                see(local.name, local.tensor.grad)
        return found

    parallel.gradients = gradients  # type: ignore[method-assign]  # of this one model


def _runtime(
    plan: RunPlan,
    plugins: PluginSet,
    selection: Selection,
    device: Device,
    processes: Processes | None,
) -> Runtime:
    section = plan.config.accelerator
    policies = start_policies(plan.config, plugins, selection, device)
    return Runtime(
        rank=processes.rank if processes else RankInfo(),
        processes=processes,
        selection=selection,
        device=device,
        rng=device.rng_tracker(),
        precision=policies.precision,
        recompute=policies.recompute,
        placement=policies.placement,
        stager=policies.stager,
        ops=build_op_table(
            plugins,
            selection,
            device,
            preferences=parse_preferences(section.ops),
            strict=section.strict_ops,
            deterministic=section.deterministic,
        ),
    )


def _last_of_each(arguments: list[str]) -> list[str]:
    """Return the words with the last use of each flag alone."""
    uses: dict[str, list[str]] = {}
    flag: list[str] = []
    for word in arguments:
        if word.startswith("--"):
            uses[word] = flag = [word]
        else:
            flag.append(word)
    return [word for use in uses.values() for word in use]
