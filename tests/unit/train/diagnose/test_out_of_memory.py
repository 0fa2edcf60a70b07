"""The error of a run out of memory: the place, the uses of memory, the flags to change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmcore.base.errors import ConfigError, RunError
from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.load import load_config
from lmcore.config.resolve import resolve
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate
from lmcore.contract.memory_stats import MemoryStats
from lmcore.contract.recompute import full_policy, selective_policy
from lmcore.data.loading.loader import BatchLoader
from lmcore.model.family import layers_in_words
from lmcore.optim.optimizer import ParameterGroup
from lmcore.parallel.parallel_model import ParallelModel
from lmcore.train.diagnose.memory_breakdown import (
    Consumer,
    MemoryUse,
    activations,
    in_units,
    measure,
)
from lmcore.train.diagnose.memory_hints import host_remedies, remedies
from lmcore.train.diagnose.out_of_memory import OutOfMemoryError, out_of_memory_explained
from lmcore.train.step import TrainStep

GIB = 2**30
PLENTY = MemoryStats(allocated=70 * GIB, peak_allocated=72 * GIB, reserved=75 * GIB, total=80 * GIB)


@pytest.fixture
def device_of(runtime: Any) -> Callable[..., Any]:
    """Makes the runtime of a device of some type with the given memory statistics."""

    def make(stats: MemoryStats | None = PLENTY, **changes: Any) -> Any:
        device = SimpleNamespace(
            type="chip",
            index=0,
            name="Chip 9",
            torch_device="chip:0",
            dtypes={"float32", "bfloat16"},
            memory_stats=None if stats is None else lambda: stats,
            pin_memory=None,
            missing={"memory_stats": "it has no counters"},
        )
        return dataclasses.replace(runtime, device=device, **changes)

    return make


@pytest.fixture
def trained(make_plan: Any, make_state: Any, runtime: Any) -> Any:
    """A plan and its state after a backward pass."""
    plan = make_plan("--optimizer adam")
    state = make_state(plan)
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    state.model.loss(tokens, tokens, torch.ones(4, 16)).backward()
    return plan, state


def use_of(
    kept: int = 1, rest: int | None = 1, stats: MemoryStats | None = PLENTY, others: int = 0
) -> MemoryUse:
    """Return a use with so many GiB of weights and of activations."""
    one = Consumer("", 0)
    rest = None if rest is None else rest * GIB
    return MemoryUse(stats, others, Consumer("weights", kept * GIB), one, one, 0, rest)


def test_memory_of_other_processes_by_torch_accelerator(
    device_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's module of the device may lack `mem_get_info`: the free memory is known all the same.

    If neither reads it, or torch does not know the device, the use is unknown.
    """
    device = device_of().device
    assert measure(None, device).others is None

    def info(index: int) -> tuple[int, int]:
        return 3 * GIB, 80 * GIB

    monkeypatch.setattr(torch, "get_device_module", lambda device_type: SimpleNamespace())
    current = SimpleNamespace(type="chip")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: current)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", info, raising=False)
    assert measure(None, device).others == 2 * GIB
    monkeypatch.delattr(torch.accelerator, "get_memory_info")
    assert measure(None, device).others is None


@pytest.mark.parametrize(
    "count, words",
    [(5, "5 bytes"), (2048, "2 KiB"), (3 << 20, "3 MiB"), (int(1.5 * GIB), "1.5 GiB"),
     (1200 * GIB, "1200 GiB")],
)  # fmt: skip
def test_bytes_for_people(count: int, words: str) -> None:
    """The unit is the largest one with a value of at least 1."""
    assert in_units(count) == words


@pytest.mark.parametrize("optimizer, moments", [("adam", 2), ("sgd", 1), ("schedulefree", 3)])
def test_weights_gradients_and_state_are_counted(
    make_plan: Any, make_state: Any, runtime: Any, optimizer: str, moments: int
) -> None:
    """Each tensor counts once, tied and shared ones too; what is left are activations."""
    plan = make_plan(f"--optimizer {optimizer}")
    state = make_state(plan)
    size = 4 * plan.parameter_count
    before = measure(state, runtime.device)
    assert (before.weights.size, before.gradients.size, before.to_come) == (size, 0, size)
    # A count for each parameter may come on top.
    assert before.optimizer.size >= moments * size
    assert before.optimizer.size < (moments + 0.05) * size
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    state.model.loss(tokens, tokens, torch.ones(4, 16)).backward()
    after = measure(state, runtime.device)
    assert (after.gradients.size, after.to_come) == (size, 0)
    assert "`token_embedding.weight` [264, 16] float32" in after.weights.largest
    assert after.stats is not None
    assert after.rest is not None
    assert after.rest <= after.stats.allocated
    assert after.kept == after.weights.size + after.gradients.size + after.optimizer.size


def test_buckets_are_gradients_from_the_start(trained: Any, runtime: Any) -> None:
    """Copies of a model have room for all gradients before the first backward pass."""
    plan, state = trained
    state.parallel.zero_grad()
    use = measure(state, runtime.device, buckets=True)
    assert (use.gradients.size, use.to_come) == (4 * plan.parameter_count, 0)


def test_without_a_state_all_is_left(runtime: Any) -> None:
    """While the model is built nothing is counted, and nothing fails."""
    use = measure(None, runtime.device)
    assert use.weights.size == use.gradients.size == use.optimizer.size == 0
    uncounted = dataclasses.replace(
        runtime.device, memory_stats=None, missing={**runtime.device.missing, "memory_stats": "no"}
    )
    assert measure(None, uncounted).rest is None


def test_single_activations_follow_from_the_shape(make_plan: Any, runtime: Any) -> None:
    """Sizes of one process's tensors, by hand."""
    plan = make_plan("")
    found = {one.name: (one.shape, one.size) for one in activations(plan, runtime)}
    assert found == {
        "logits": ((4 * 16, 264), 4 * 16 * 264 * 4),
        "attention scores": ((4, 2, 16, 16), 4 * 2 * 16 * 16 * 4),
        "feed-forward channels": ((4, 16, 64), 4 * 16 * 64 * 4),
        "hidden states": ((4, 16, 16), 4 * 16 * 16 * 4),
    }
    divided = dataclasses.replace(
        plan, layout=ParallelLayout(tensor=2, context=2, sequence=True, data=1)
    )
    found = {one.name: (one.shape, one.size) for one in activations(divided, runtime)}
    assert found["logits"][0] == (4 * 8, 132)
    assert found["attention scores"][0] == (4, 1, 8, 16)
    assert found["feed-forward channels"][0] == (4, 8, 32)
    assert found["hidden states"][0] == (4, 4, 16)


@pytest.mark.parametrize(
    "changes,sequences",
    [
        ({"model_family": "bert", "further": (("bert_binary_head", True),)}, 4),
        ({"task": "classification", "num_labels": 3}, 4),
        ({"task": "multiple-choice", "num_labels": 3}, 4 * 3),
    ],
)
def test_activations_of_other_losses(
    make_plan: Any, runtime: Any, changes: Any, sequences: int
) -> None:
    """There are no logits of every token, and a sequence for each choice of a question."""
    plan = make_plan("")
    plan = dataclasses.replace(plan, shape=dataclasses.replace(plan.shape, **changes))
    found = {one.name: one.shape for one in activations(plan, runtime)}
    assert "logits" not in found
    assert found["attention scores"] == (sequences, 2, 16, 16)
    assert found["hidden states"] == (sequences, 16, 16)


T5_FLAGS = (
    "--model-family t5 --decoder-num-layers 3 --decoder-seq-length 10 --position-embedding-type "
    "relative --t5-feed-forward gated-gelu --mask-prob 0.1"
)


class Shapes(TorchDispatchMode):
    """Sizes of the results of all ops."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found |= {tuple(x.shape) for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        return out


def test_activations_of_two_stacks(make_plan: Any, make_state: Any, runtime: Any) -> None:
    """Encoder and decoder have their own lengths: the pass itself has tensors of these sizes."""
    plan = make_plan(T5_FLAGS)
    state = make_state(plan)
    source, answer = (torch.zeros(4, size, dtype=torch.int64) for size in (16, 10))
    batch = {"tokens_BS": source, "padding_BS": source > 0, "decoder_tokens_BD": answer}
    with Shapes() as shapes, sdpa_kernel(SDPBackend.MATH):
        state.model.loss(**batch, targets_BD=answer, loss_weight_BD=torch.ones(4, 10))
    found = {one.name: one.shape for one in activations(plan, runtime)}
    assert found == {
        "encoder attention scores": (4, 2, 16, 16),
        "encoder feed-forward channels": (4, 16, 128),
        "encoder hidden states": (4, 16, 16),
        "decoder attention scores": (4, 2, 10, 10),
        "decoder cross-attention scores": (4, 2, 10, 16),
        "decoder feed-forward channels": (4, 10, 128),
        "decoder hidden states": (4, 10, 16),
        "logits": (4 * 10, 264),
    }
    assert set(found.values()) <= shapes.found
    assert "2 encoder and 3 decoder layers" in layers_in_words(plan.shape)


def test_activations_of_neighbours(make_plan: Any, make_state: Any, runtime: Any) -> None:
    """The encoder has a sequence for each neighbour of each chunk."""
    plan = make_plan(
        "--model-family retro --retro-chunk-length 4 --retro-num-neighbors 3"
        " --retro-encoder-layers 1"
    )
    state = make_state(plan)
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    neighbors = torch.zeros(4, 4, 3, 8, dtype=torch.int64)
    with Shapes() as shapes, sdpa_kernel(SDPBackend.MATH):
        state.model.loss(tokens, tokens, neighbors_BLKR=neighbors)
    found = {one.name: one.shape for one in activations(plan, runtime)}
    crossed = found.pop("decoder cross-attention scores")
    assert found == {
        "encoder attention scores": (48, 2, 8, 8),
        "encoder feed-forward channels": (48, 8, 64),
        "encoder hidden states": (48, 8, 16),
        "decoder attention scores": (4, 2, 16, 16),
        "decoder feed-forward channels": (4, 16, 64),
        "decoder hidden states": (4, 16, 16),
        "logits": (4 * 16, 264),
    }
    assert set(found.values()) <= shapes.found
    by_chunks = (16, 2, 4, 24)  # tokens of a chunk read all neighbours of another
    assert by_chunks in shapes.found
    assert math.prod(crossed) == math.prod(by_chunks)


def test_activations_of_two_encoders(make_plan: Any, make_state: Any, runtime: Any) -> None:
    """Questions and blocks have as many tokens; no pipeline is proposed for their encoders."""
    plan = make_plan("--model-family ict")
    state = make_state(plan)
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    texts = {"query_BS": tokens, "block_BS": tokens}
    padding = {"query_padding_BS": tokens > 0, "block_padding_BS": tokens > 0}
    with Shapes() as shapes, sdpa_kernel(SDPBackend.MATH):
        state.model.loss(**texts, **padding, query_weight_B=torch.ones(4))
    found = {one.name: one.shape for one in activations(plan, runtime)}
    sizes = {"attention scores": (4, 2, 16, 16), "hidden states": (4, 16, 16)}
    sizes |= {"feed-forward channels": (4, 16, 64)}
    assert found == {
        f"{one} {name}": size for one in ("query", "block") for name, size in sizes.items()
    }
    assert set(found.values()) <= shapes.found
    shared = make_plan("--model-family ict --biencoder-shared-query-context-model")
    assert {one.name for one in activations(shared, runtime)} == set(sizes)


def test_hints_for_several_stacks(make_plan: Any, device_of: Any) -> None:
    """Recomputation counts the layers of all stacks; a pipeline is proposed where there is one."""
    t5, ict = (make_plan(f"--num-layers 4 {more}") for more in (T5_FLAGS, "--model-family ict"))
    block = SimpleNamespace(method="block", num_layers=4)
    runtime = device_of(recompute=full_policy(), placement=block)
    words = {
        plan.shape.model_family: "\n".join(remedies(plan, runtime, use_of())) for plan in (t5, ict)
    }
    assert "all 7 layers are recomputed" in words["t5"]
    assert "all 8 layers are recomputed" in words["ict"]
    small = device_of(MemoryStats(9, 9, 9, total=4 * ict.parameter_count))
    use = use_of(stats=small.device.memory_stats())
    assert "--pipeline-model-parallel-size" not in "\n".join(remedies(ict, small, use))
    gpt = make_plan("--num-layers 4")
    assert "--pipeline-model-parallel-size" in "\n".join(remedies(gpt, small, use))


ASKED = "CHIP out of memory. Tried to allocate 16.00 KiB. Chip 0 has a total of 80 GiB\nmore"


def explained(error: BaseException, plan: Any, runtime: Any, *more: Any) -> OutOfMemoryError:
    """Return what an error becomes."""
    with (
        pytest.raises(OutOfMemoryError) as caught,
        out_of_memory_explained(plan, runtime, *more),
    ):
        raise error
    return caught.value


def test_the_message_has_every_part(trained: Any, device_of: Any, tmp_path: Path) -> None:
    """Totals, consumers, sizes, torch's words, remedies and how to continue."""
    plan, state = trained
    (tmp_path / "run/checkpoints/iter_0000002").mkdir(parents=True)
    state.iteration = 2
    error = explained(
        torch.OutOfMemoryError(ASKED), plan, device_of(), state, tmp_path / "run/checkpoints"
    )
    assert error.what == "`chip:0` ran out of memory after step 2"
    lines = (error.why or "").split("\n  ")
    assert lines[0].startswith("`Chip 9` has 80 GiB: 70 GiB are in use")
    assert lines[0].endswith("at most 72 GiB were in use; 16 KiB more were requested")
    assert lines[1].startswith("activations and the rest: 70 GiB, by difference")
    assert "single tensors of a micro-batch of 4 x 16 tokens" in (error.why or "")
    assert "the size of the feed-forward channels" in (error.why or "")
    assert lines[-1] == f"torch says: {ASKED.splitlines()[0]}"
    hint = error.hint or ""
    assert "`--micro-batch-size 2 --global-batch-size 4`" in hint
    assert f"`--load {tmp_path}/run --save {tmp_path}/run`" in hint
    assert isinstance(error, RunError)


def test_a_device_that_does_not_count_is_no_fault(trained: Any, device_of: Any) -> None:
    """Its reason is where the figures would."""
    plan, state = trained
    error = explained(torch.OutOfMemoryError(""), plan, device_of(None), state)
    assert "`Chip 9` does not count its memory (it has no counters)" in (error.why or "")
    assert "torch says" not in (error.why or "")


@pytest.mark.parametrize(
    "message",
    [
        "CHIP error: out of memory",
        "cannot allocate memory",
        "CHIPBLAS_STATUS_ALLOC_FAILED when calling",
        "backend failed with error: 39 (RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "backend failed with error: 40 (RESULT_ERROR_OUT_OF_RESOURCES)",
    ],
)
def test_errors_in_words_count_too(trained: Any, device_of: Any, message: str) -> None:
    """Not all libraries raise torch's own error, and pipelines wrap it in another."""
    plan, state = trained
    explained(RuntimeError(message), plan, device_of(), state)
    wrapped = RuntimeError("[Stage 0] failed to run forward")
    wrapped.__cause__ = torch.OutOfMemoryError(message)
    assert message in (explained(wrapped, plan, device_of(), state).why or "")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes differ"),
        RuntimeError("CHIP_ERROR_LAUNCH_OUT_OF_RESOURCES: too many registers"),
        ConfigError("out of memory"),
        KeyError("x"),
    ],
)
def test_other_errors_pass(trained: Any, runtime: Any, error: Exception) -> None:
    """An error that is not about memory, or was explained already, is not changed."""
    plan, state = trained
    with (
        pytest.raises(type(error)) as caught,
        out_of_memory_explained(plan, runtime, state),
    ):
        raise error
    assert caught.value is error


def test_host_memory_is_distinguished(make_plan: Any, device_of: Any, trained: Any) -> None:
    """Host memory beside a device has different remedies; a host that is the device has not."""
    plan, state = trained
    error = explained(MemoryError(), plan, device_of(), state)
    assert error.what == "the host ran out of memory after step 0"
    assert "fewer processes on this host" in (error.hint or "")
    plan = make_plan("--async-save")
    offload = dataclasses.replace(full_policy(), name="full-offload")
    lines = "\n".join(host_remedies(plan, device_of(recompute=offload)))
    assert "`--recompute full`" in lines
    assert "`--num-prefetch 1`" in lines
    assert "`--no-async-save`" in lines


def test_the_phase_is_found_from_the_stack(
    make_plan: Any, make_state: Any, make_datasets: Any, runtime: Any, monkeypatch: Any
) -> None:
    """Forward, backward and update of a step, and the building of the model."""
    plan = make_plan("")
    state = make_state(plan)
    step = TrainStep(state, plan, runtime)

    def refuse(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    def raised(where: Any, name: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, refuse)
            with (
                BatchLoader(make_datasets(plan).train, micro_batch_size=4) as batches,
                pytest.raises(OutOfMemoryError) as caught,
                out_of_memory_explained(plan, runtime, state),
            ):
                step(batches)
        return caught.value.what

    assert raised(ParallelModel, "loss").endswith("in the forward pass of step 1")
    assert raised(torch.autograd, "_engine_run_backward").endswith("in the backward pass of step 1")
    assert raised(ParameterGroup, "gradients").endswith("in the update of step 1")
    assert explained(torch.OutOfMemoryError(), plan, runtime).what.endswith(
        "while the model was built"
    )


def test_a_model_that_does_not_fit_is_reported(trained: Any, device_of: Any) -> None:
    """Then no smaller activation helps, and none is suggested."""
    plan, state = trained
    small = MemoryStats(9, 9, 9, total=14 * plan.parameter_count)
    here = device_of(small)
    here.device.type = here.device.torch_device = "cpu"  # where the tensors are
    error = explained(torch.OutOfMemoryError(), plan, here, state)
    assert "weights, gradients and optimizer state need" in (error.why or "")
    assert "--micro-batch-size" not in (error.hint or "")
    assert "--optimizer adam8bit" in (error.hint or "")
    building = explained(torch.OutOfMemoryError(), plan, device_of(small))
    assert f"{plan.parameter_count:,} weights in float32 take" in (building.why or "")
    assert "--recompute" not in (building.hint or "")
    assert "--optimizer adam8bit" in (building.hint or "")
    tiny = MemoryStats(9, 9, 9, total=2 * plan.parameter_count)
    for known in ((), (state,)):
        hopeless = explained(torch.OutOfMemoryError(), plan, device_of(tiny), *known)
        assert "--optimizer adam8bit" not in (hopeless.hint or ""), "the weights do not fit"
        assert "a smaller model" in (hopeless.hint or "")


def test_suggestions_fit_the_memory(make_plan: Any, device_of: Any, monkeypatch: Any) -> None:
    """Parallelism is suggested as far as the model needs it, and a machine that is too small named.

    By hand, for 16 bytes per parameter and a device used up to 70%: 40 layers of 8 heads divide by
    1, 2, 4, 5, 8, 10, 20 and 40, and by 1, 2, 4 and 8.
    """
    layers = "--num-layers 40 --num-attention-heads 8"
    plan = make_plan(layers)
    need = 16 * plan.parameter_count

    def hints(parts: float, plan: Any = plan, kind: str = "chip") -> list[str]:
        runtime = device_of(MemoryStats(9, 9, 9, total=round(need / parts)))
        runtime.device.type = kind
        return remedies(plan, runtime, use_of(stats=runtime.device.memory_stats()))

    roomy = "\n".join(hints(0.5))
    assert "none on this machine" not in roomy
    assert "`--tensor-model-parallel-size 2`, with twice as many devices: " in roomy
    assert "parameters fits" not in roomy
    first, layout, smaller = hints(2.5)[0], *hints(2.5)[-2:]
    assert first.startswith("none on this machine: weights and gradients of the model take ")
    assert layout.startswith("`--tensor-model-parallel-size 4`, with 4 times as many devices: ")
    fits = round(0.7 / 2.5 * plan.parameter_count, -3)
    assert smaller.endswith(" parameters fits")
    assert abs(int(smaller.split("about ")[1].split()[0].replace(",", "")) - fits) < 1000
    assert hints(20)[-2].startswith(
        "`--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4`, with 32 times as many "
    )
    assert len(hints(1000)) == 2, "40 * 8 devices are not enough"
    assert "with 4 times as many hosts: " in hints(2.5, kind="cpu")[1]
    monkeypatch.setattr("lmcore.train.diagnose.memory_hints.device_count", lambda kind: 8)
    assert "none on this machine" not in "\n".join(hints(2.5))
    assert "`--tensor-model-parallel-size 4`, with 4 times as many devices: " in "".join(hints(2.5))


def test_the_largest_part_comes_first(make_plan: Any, device_of: Any) -> None:
    """Smaller activations where there is room for them, else less that stays."""
    plan = make_plan("")
    first = remedies(plan, device_of(), use_of(kept=20, rest=50))[0]
    assert "--micro-batch-size" in first
    first = remedies(plan, device_of(), use_of(kept=70, rest=9))[0]
    assert "--engine deepspeed" in first
    first = remedies(plan, device_of(), use_of(kept=1, rest=None, stats=None))[0]
    assert "--micro-batch-size" in first


def test_other_processes_and_fragmentation_are_reported(
    make_plan: Any, device_of: Any, monkeypatch: Any
) -> None:
    """Both only where they are much of the memory."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    plan = make_plan("")
    holes = MemoryStats(40 * GIB, 40 * GIB, 60 * GIB, 80 * GIB)
    lines = remedies(plan, device_of(), use_of(stats=holes, others=10 * GIB))
    assert lines[0].startswith("other processes use 10 GiB")
    assert lines[1].startswith("20 GiB are reserved in fragments")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert "fragments" not in "\n".join(remedies(plan, device_of(), use_of(stats=holes)))


@pytest.mark.parametrize(
    "flags, layout, present, absent",
    [
        ("", {}, "`--recompute full`", "--zero-stage 1"),
        ("--micro-batch-size 1", {}, "--precision bf16", "--micro-batch-size"),
        ("--micro-batch-size 9", {}, "--micro-batch-size 3 --global-batch-size 9", "x"),
        ("", {"data": 4}, "`--zero-stage 1`: optimizer state is divided by 4", "x"),
        ("", {"data": 4, "zero_stage": 2}, "`--zero-stage 3`", "`--zero-stage 2`"),
        ("", {"data": 4, "zero_stage": 3}, "--tensor-model", "`--zero-stage"),
        ("", {"data": 4, "replicas": 2}, "divided by 2", "--engine"),
        ("--optimizer muon", {"data": 4}, "--recompute", "--zero-stage"),
        ("", {"tensor": 2}, "--sequence-parallel", "adam8bit"),
        ("", {"tensor": 2, "sequence": True}, "smaller model", "--sequence-parallel"),
        ("", {"pipeline": 2, "schedule": "gpipe"}, "--pipeline-schedule 1f1b", "--engine"),
        ("", {"pipeline": 2, "data": 2, "schedule": "zero-bubble"}, "--zero-stage 2",
         "--zero-stage 3"),
        ("", {"pipeline": 2, "data": 2, "schedule": "zero-bubble-v"}, "smaller model",
         "--zero-stage"),
    ],
)  # fmt: skip
def test_remedies_go_with_the_run(
    make_plan: Any, device_of: Any, flags: str, layout: dict[str, Any], present: str, absent: str
) -> None:
    """Each is one that the run's settings allow and do not have yet."""
    plan = dataclasses.replace(make_plan(flags), layout=ParallelLayout(**layout))
    lines = "\n".join(remedies(plan, device_of(), use_of()))
    assert present in lines
    assert absent not in lines


def test_recomputation_is_offered_as_far_as_it_goes(make_plan: Any, device_of: Any) -> None:
    """From none and selective to full, then to all layers; offload where memory is pinned."""
    plan, use = make_plan(""), use_of()
    lines = "\n".join(remedies(plan, device_of(recompute=selective_policy()), use))
    assert "`--recompute full`" in lines
    lines = "\n".join(remedies(plan, device_of(recompute=full_policy()), use))
    assert "--recompute" not in lines
    block = SimpleNamespace(method="block", num_layers=1)
    lines = "\n".join(remedies(plan, device_of(recompute=full_policy(), placement=block), use))
    assert "`--recompute-method uniform`: all 2 layers" in lines
    pinned = device_of()
    pinned.device.pin_memory = torch.clone
    assert "`--recompute full-offload`" in "\n".join(remedies(plan, pinned, use))


@pytest.mark.parametrize("world_size", [1, 4])
def test_remedies_are_flags_of_a_valid_run(
    make_plan: Any, device_of: Any, data_prefix: str, world_size: int
) -> None:
    """Suggested flags are valid beside the flags of the run."""
    base = make_plan("")
    argv = [
        word
        for one in ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
        for word in (f"--{one.replace('_', '-')}", str(getattr(base.config.model, one)))
    ]
    argv += ["--train-iters", "2", "--data-path", data_prefix]
    plan = resolve(
        validate(load_config(argv), world_size=world_size),
        tokenizer=TokenizerIdentity(vocab_size=257),
    )
    tried = 0
    for line in remedies(plan, device_of(), use_of()):
        if not line.startswith("`--") or "deepspeed" in line or "`--seq-length`" in line:
            continue
        more = line.split("`")[1].split()
        size = world_size * (2 if "twice as many devices" in line else 1)
        resolve(
            validate(load_config([*argv, *more]), world_size=size),
            tokenizer=TokenizerIdentity(vocab_size=257),
        )
        tried += 1
    assert tried >= 4
