"""Start of a model in several processes: each loads its part, and rank 0 gets the whole."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lmcore.base.errors import ConfigError, LmcoreError, counted
from lmcore.checkpoint.load import load_checkpoint
from lmcore.config.derived.layout import ParallelLayout
from lmcore.conversion.native.manifest import WEIGHT_PREFIX
from lmcore.conversion.native.read import LmcoreState
from lmcore.inference.fix_weights import fix_weights
from lmcore.inference.load import LoadedModel, allocate, described_model, open_checkpoint
from lmcore.inference.parallel.driver import DividedModel
from lmcore.inference.parallel.messages import MessageChannel
from lmcore.inference.parallel.part import PartRunner
from lmcore.inference.text_model import PLAIN, Execution
from lmcore.model.family import answers_prompts, family_of, stacks_of
from lmcore.parallel import tensor_parallel
from lmcore.parallel.mesh import ParallelMesh
from lmcore.parallel.pipeline_split import own_part

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lmcore.config.derived.layout import ParallelLayout
    from lmcore.config.tokenizer import TokenizerSettings
    from lmcore.conversion.loading.weights import WeightReader
    from lmcore.data.tokenizer import TokenizerFactory
    from lmcore.families.protocol import CausalLM
    from lmcore.model.shape import ModelShape
    from lmcore.parallel.tensor_layout import TensorLayout
    from lmcore.runtime.runtime import Runtime

__all__ = ["divided_shape", "parallel_model"]

_MAX_IDLE_SECONDS = 60.0


@contextmanager
def parallel_model(
    path: Path,
    runtime: Runtime,
    layout: ParallelLayout,
    *,
    choice: TokenizerSettings,
    extra: Mapping[str, TokenizerFactory],
    rows: int = 1,
    require: Callable[[ModelShape], None] | None = None,
    quantization: str | None = None,
    check: Callable[[LoadedModel], None] | None = None,
) -> Iterator[LoadedModel | None]:
    """Load a model in parts; yield it on its first rank, and None on the others when it is closed.

    All ranks must call it.  The other ranks ignore signals that end a run: the first rank ends
    them.  On an axis `data` there are several replicas, each with a first rank.

    Args:
        path: See `load_model`; what rank 0 finds there is loaded by all.
        runtime: Device, precision, kernels and processes.
        layout: Sizes of the axes `tensor`, `pipeline` and `data`.
        choice, extra, rows, require, quantization: See `load_model`.
        check: See `load_model`; it is made by rank 0.

    Raises:
        CheckpointError, ConfigError, DataError: See `load_model`; or the model cannot be divided.
    """
    processes, rank = runtime.processes, runtime.rank.rank
    assert processes is not None
    weights, tokenizer = None, None
    if rank == 0:
        weights, tokenizer = open_checkpoint(path, choice, extra, require)
    directory = processes.gather(str(_directory(path, weights)), "the checkpoint")[0]
    if weights is None:
        weights, tokenizer = open_checkpoint(Path(directory), choice, extra, require)
    whole = divided_shape(weights.state.shape, layout)
    mesh = ParallelMesh.of(layout, runtime)
    with torch.device("meta"):
        described = described_model(weights.state.shape, runtime, path)
    if described.answers is False:
        raise ConfigError(
            f"a {described.family.name} is not generated with by several processes",
            why="the neighbours of each text would have to be encoded by all of them",
            hint="leave out `--tensor-model-parallel-size` and `--pipeline-model-parallel-size`",
        )
    if check is not None and rank == 0:
        assert tokenizer is not None
        check(LoadedModel(described, tokenizer, Path(directory), PLAIN))
    count = described.parameter_count()
    model = _part(whole, mesh, runtime, path)
    layouts = tensor_parallel.tensor_layouts(model, mesh.tensor)
    allocate(model, runtime)
    _fill(model, layouts, weights)
    model.eval()
    divided = layout.tensor > 1
    execution = fix_weights(model, runtime, rows, quantization, divided=divided)
    tensor_parallel.connect(model, mesh.tensor, sequence=False, rng=runtime.rng)
    first = mesh.data_rank * layout.tensor
    channel = MessageChannel(model.device, _model_group(mesh, runtime), first)
    runner = PartRunner(model, mesh, _logits_group(mesh, runtime))
    processes.barrier("all ranks to have loaded their part of the model")
    if rank != first:
        _make_calls(runner, channel, execution)
        yield None
        return
    assert tokenizer is not None
    driver = DividedModel(
        runner,
        channel,
        whole,
        weight_dtype=next(model.parameters()).dtype,
        idle_seconds=min(_MAX_IDLE_SECONDS, processes.timeout / 4),
        answers=described.answers,
    )
    try:
        yield LoadedModel(driver, tokenizer, Path(directory), execution, count)
    finally:
        driver.close()


def _directory(path: Path, weights: WeightReader | None) -> Path:
    """Return the directory that was opened: of one checkpoint."""
    state = None if weights is None else weights.state
    return state.checkpoint if isinstance(state, LmcoreState) else path


def _part(shape: ModelShape, mesh: ParallelMesh, runtime: Runtime, path: Path) -> CausalLM:
    """Return this rank's part of the model, whose parameters have no memory."""
    part = None
    if mesh.pipeline.size > 1:
        part = own_part(stacks_of(shape), mesh.pipeline.rank, mesh.layout)
    return described_model(shape.narrowed(mesh.tensor.size), runtime, path, part)


def _fill(model: CausalLM, layouts: Mapping[str, TensorLayout], weights: WeightReader) -> None:
    """Read this rank's part of each weight; further rows of a padded vocabulary are 0."""
    state = weights.state
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.zero_()
    if isinstance(state, LmcoreState):
        held = state.manifest.tensors
        load_checkpoint(
            state.checkpoint,
            {WEIGHT_PREFIX + name: parameter for name, parameter in parameters.items()},
            state.manifest,
            verify=False,
            layouts={WEIGHT_PREFIX + name: layouts[name] for name in parameters},
            rows={
                WEIGHT_PREFIX + name: held[WEIGHT_PREFIX + name].shape[0]
                for name in parameters
                if tuple(held[WEIGHT_PREFIX + name].shape) != layouts[name].shape
            },
        )
        return
    for name, parameter in parameters.items():
        saved = weights.read(name)
        size = layouts[name].shape
        if tuple(saved.shape) != size:
            padded = saved.new_zeros(size)
            padded[: len(saved)] = saved
            saved = padded
        layouts[name].fill(parameter, saved)


def _model_group(mesh: ParallelMesh, runtime: Runtime) -> ProcessGroup | None:
    """Return the group of this replica's ranks; None: all are of one."""
    if mesh.layout.data == 1:
        return None
    assert runtime.processes is not None
    groups = [
        runtime.processes.new_group([rank for stage in stages for rank in stage], "model")
        for stages in _stages_of_replicas(mesh)
    ]
    return groups[mesh.data_rank]


def _logits_group(mesh: ParallelMesh, runtime: Runtime) -> ProcessGroup | None:
    """Return the group of rank 0 and the last stage; None on other ranks."""
    if mesh.pipeline.size == 1:
        return mesh.tensor.group
    assert runtime.processes is not None
    groups = [
        runtime.processes.new_group([stages[0][0], *stages[-1]], "logits")
        for stages in _stages_of_replicas(mesh)
    ]
    return groups[mesh.data_rank]


def _stages_of_replicas(mesh: ParallelMesh) -> list[list[list[int]]]:
    """Return the ranks of each replica, by their stage."""
    size = mesh.tensor.size
    return [
        [stage[number * size : (number + 1) * size] for stage in mesh.stage_ranks()]
        for number in range(mesh.layout.data)
    ]


def _make_calls(runner: PartRunner, channel: MessageChannel, execution: Execution) -> None:
    """Make the calls of rank 0 until it closes the model."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with execution.passes():
        while (calls := channel.receive()) is not None:
            for call in calls:
                runner.run(call)
                execution.step_boundary()


def divided_shape(shape: ModelShape, layout: ParallelLayout) -> ModelShape:
    """Return the shape of a model with a vocabulary that can be divided.

    Args:
        shape: Sizes of the checkpoint's model.
        layout: Sizes of the axes `tensor` and `pipeline`.

    Raises:
        ConfigError: Heads, channels or layers cannot be divided; with all problems.
    """
    tensor, pipeline = layout.tensor, layout.pipeline
    widths = {
        "attention heads": shape.num_attention_heads,
        "heads of keys and values": shape.num_query_groups,
        "feed-forward channels": shape.ffn_hidden_size,
    }
    problems: list[LmcoreError] = []
    undivided = [f"{size} {name}" for name, size in widths.items() if size % tensor]
    if undivided:
        problems.append(
            ConfigError(
                f"`--tensor-model-parallel-size {tensor}` does not divide the model's "
                + " and ".join(undivided),
                why="each process has the same number of them",
            )
        )
    family = family_of(shape)
    if pipeline > 1 and answers_prompts(shape):
        problems.append(
            ConfigError(
                f"`--pipeline-model-parallel-size {pipeline}` is not supported by generation with "
                f"{family.name} models",
                why="each stage of the decoder would need the encoder's output of each text",
                hint="use `--tensor-model-parallel-size`",
            )
        )
    elif pipeline > shape.num_layers:
        problems.append(
            ConfigError(
                f"`--pipeline-model-parallel-size {pipeline}` is more than the model has layers",
                why=f"it has {counted(shape.num_layers, 'layer')}, and each process needs one",
            )
        )
    if problems:
        raise ConfigError.collect(problems)
    rows = -(-shape.padded_vocab_size // tensor) * tensor
    return replace(shape, padded_vocab_size=rows)
