"""One rank of runs in several layouts; arguments: file of cases (JSON: name -> flags), folder.

For each case it writes: loss and gradient norm of every step, all gradients of the first step, all
weights after the last, each local tensor with its position in the whole tensor.  Replicas must be
bitwise equal after every step.  In a case whose first word is `twice`, a forward pass calls every
layer twice.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from step_gradients import StepGradients

from layouts.steps import STEPS
from layouts.stored import store
from lmcore.config.derived.data_source import TaskData
from lmcore.config.load import load_config
from lmcore.config.plan import RunPlan
from lmcore.config.resolve import resolve
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate
from lmcore.data.dataset.bert import BertSample
from lmcore.data.dataset.document_mask import DocumentMasks
from lmcore.data.dataset.ict import ICTSample
from lmcore.data.dataset.t5 import T5Sample
from lmcore.data.loading.batch import CausalLMCollation
from lmcore.data.loading.loader import BatchLoader
from lmcore.data.task.dataset import TaskSample
from lmcore.families.bert.samples import BertCollation
from lmcore.families.gpt.model import GPT
from lmcore.families.heads.samples import PairFormat, TaskCollation
from lmcore.families.ict.samples import IctCollation
from lmcore.families.retro.samples import RetroCollation, RetroSample
from lmcore.families.t5.family import decoder_length
from lmcore.families.t5.samples import T5Collation
from lmcore.parallel.random_states import seed_everything
from lmcore.plugin import PluginSet, Selection, build_op_table, discover
from lmcore.plugin.selection import HANDED_DOWN
from lmcore.runtime.launch.rank import rank_info
from lmcore.runtime.launch.worker_protocol import end_with_launcher
from lmcore.runtime.policies import start_policies
from lmcore.runtime.process.join import join_processes
from lmcore.runtime.runtime import Runtime, start_runtime
from lmcore.train.diagnose.replica_drift import ReplicaCheck
from lmcore.train.engine import build_engine
from lmcore.train.state import TrainState

VOCABULARY = 120
END = 0
"""End-of-document token."""

DRAWN_STEPS = 5
"""Smallest number of steps for which samples are drawn, as in the limits of `results.py`."""
BASE = {
    "--num-layers": "4",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "16",
    "--precision": "fp32",
    "--make-vocab-size-divisible-by": "32",
    "--global-batch-size": "8",
    "--micro-batch-size": "2",
    "--train-iters": str(STEPS),
    "--lr": "1e-2",
    "--lr-decay-style": "constant",
    "--init-method-std": "0.2",
    "--adam-eps": "1e-3",  # Adam makes steps of gradients that are rounding errors
}
"""Flags of every case, unless it has its own."""


class Samples:
    """Random tokens, the same in every process."""

    def __init__(self, count: int, length: int) -> None:
        """Draw *count* samples of *length* + 1 tokens."""
        drawn = np.random.default_rng(5)
        self.tokens = drawn.integers(1, VOCABULARY, (count, length + 1))
        self.tokens[drawn.random(self.tokens.shape) < 0.15] = END

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.tokens)

    def __getitem__(self, i: int) -> Any:
        """Return tokens [S + 1]."""
        return self.tokens[i]


class Read(Samples):
    """Random samples of Retro; some neighbours are shorter, some chunks have fewer, or none."""

    def __init__(self, count: int, length: int, own: dict[str, Any]) -> None:
        """Draw *count* samples of *length* + 1 tokens with neighbours."""
        super().__init__(count, length)
        chunk, drawn = own["retro_chunk_length"], np.random.default_rng(6)
        read = chunk * own["retro_num_retrieved_chunks"]
        size = (count, length // chunk, own["retro_num_neighbors"])
        self.neighbors = drawn.integers(1, VOCABULARY, (*size, read))
        lengths = drawn.integers(0, read + 1, size)
        lengths[drawn.random(size[:2]) < 0.2] = 0
        self.padding = np.arange(read) >= lengths[..., None]

    def __getitem__(self, i: int) -> RetroSample:
        """Return a sample."""
        return RetroSample(self.tokens[i], self.neighbors[i], self.padding[i])


class Masked:
    """Random samples of BERT, the same in every process; some have padding, some fewer targets."""

    def __init__(self, count: int, length: int) -> None:
        """Draw *count* samples of *length* tokens."""
        self.length, self.drawn = length, [np.random.default_rng([7, i]) for i in range(count)]
        self.samples = [self._draw(rng) for rng in self.drawn]

    def _draw(self, rng: np.random.Generator) -> BertSample:
        size = self.length - int(rng.integers(0, 4))
        tokens = np.zeros(self.length, dtype=np.int64)
        tokens[:size] = rng.integers(1, VOCABULARY, size)
        types = (np.arange(self.length) >= size // 2).astype(np.int64)
        chosen = rng.permutation(size)[: int(rng.integers(1, PREDICTED + 1))]
        labels, mask = np.full(self.length, -1), np.zeros(self.length, dtype=np.int64)
        labels[chosen], mask[chosen] = tokens[chosen], 1
        tokens[chosen] = 3
        padding = (np.arange(self.length) < size).astype(np.int64)
        swapped = bool(rng.random() < 0.5)
        return BertSample(tokens, types, labels, padding, mask, swapped, truncated=False)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def __getitem__(self, i: int) -> BertSample:
        """Return a sample."""
        return self.samples[i]


class Spans:
    """Random samples of T5, the same in every process; some have padding in both sequences."""

    def __init__(self, count: int, length: int, decoder: int) -> None:
        """Draw *count* samples of *length* tokens, and *decoder* tokens of the decoder."""
        self.sizes = (length, decoder)
        self.samples = [self._draw(np.random.default_rng([11, i])) for i in range(count)]

    def _draw(self, rng: np.random.Generator) -> T5Sample:
        drawn = [rng.integers(1, VOCABULARY, size) for size in self.sizes]
        ends = [size - int(rng.integers(0, 4)) for size in self.sizes]
        encoder, decoder = (
            (np.arange(size) < end).astype(np.int64)
            for size, end in zip(self.sizes, ends, strict=True)
        )
        tokens, labels = drawn[0] * encoder, np.where(decoder > 0, drawn[1], -1)
        inputs = np.concatenate([[2], drawn[1][:-1]]) * decoder
        return T5Sample(tokens, inputs, labels, decoder, encoder, decoder, truncated=False)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def __getitem__(self, i: int) -> T5Sample:
        """Return a sample."""
        return self.samples[i]


class Found:
    """Random samples of ICT, the same in every process, with padding: no two texts are equal."""

    def __init__(self, count: int, length: int) -> None:
        """Draw *count* samples with texts of at most *length* tokens."""
        self.length = length
        self.samples = [self._draw(np.random.default_rng([8, i])) for i in range(count)]

    def _draw(self, rng: np.random.Generator) -> ICTSample:
        texts = np.zeros((2, self.length), dtype=np.int64)
        masks = np.zeros_like(texts)
        for row, least in enumerate((4, 9)):
            size = int(rng.integers(least, self.length + 1))
            texts[row, :size] = rng.integers(1, VOCABULARY, size)
            masks[row, :size] = 1
        return ICTSample(texts[0], masks[0], texts[1], masks[1], (0, 0, 0, 0))

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def __getitem__(self, i: int) -> ICTSample:
        """Return a sample."""
        return self.samples[i]


class Labelled:
    """Random samples of a task, the same in every process, some longer than a sequence.

    The text of each class, and each right choice, is one token, repeated.
    """

    def __init__(self, count: int, task: TaskData) -> None:
        """Draw *count* samples."""
        self.samples = [self._draw(np.random.default_rng([9, i]), task) for i in range(count)]

    def _draw(self, rng: np.random.Generator, task: TaskData) -> TaskSample:
        texts = int(rng.integers(2, task.num_choices + 1)) if task.num_choices else 1
        first, *second = (
            rng.integers(9, VOCABULARY, int(rng.integers(1, 11))) for _ in range(1 + texts)
        )
        label = int(rng.integers(0, texts if task.num_choices else task.num_labels))
        (second[label] if task.num_choices else first)[:] = 4 if task.num_choices else 4 + label
        return TaskSample(first, tuple(second), label, float(rng.random() < 0.8))

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def __getitem__(self, i: int) -> TaskSample:
        """Return a sample."""
        return self.samples[i]


PREDICTED = 4
"""Most masked tokens of a sample of BERT."""


def samples_of(plan: RunPlan, count: int) -> tuple[Any, Any]:
    """Return the samples of a case, and their collation."""
    length, task = plan.config.model.seq_length, plan.sources.task
    if task is not None:
        bidirectional = plan.shape.model_family == "bert"
        special = ((1,), (2,), (2,)) if bidirectional else ((), (3,), ())
        pairs = PairFormat(length, *special, pad=0, bidirectional=bidirectional, second_type=1)
        return Labelled(count, task), TaskCollation(pairs, task.num_choices)
    if plan.shape.model_family == "bert":
        return Masked(count, length), BertCollation(PREDICTED, binary_head=True)
    if plan.shape.model_family == "t5":
        return Spans(count, length, decoder_length(plan.config)), T5Collation()
    if plan.shape.model_family == "retro":
        return Read(count, length, plan.shape.own), RetroCollation(CausalLMCollation())
    if plan.shape.model_family == "ict":
        return Found(count, length), IctCollation(VOCABULARY)
    return Samples(count, length), CausalLMCollation(masks=masks_of(plan))


def plan_of(flags: str, world_size: int) -> RunPlan:
    """Return the plan of a case."""
    arguments = shlex.split(flags)
    defaults = [
        word for name, value in BASE.items() if name not in arguments for word in (name, value)
    ]
    loaded = load_config([*defaults, *arguments])
    valid = validate(loaded, world_size=world_size)
    sources, _ = loaded.sources
    if (task := sources.task) is not None:
        found = {"num_choices": 3} if task.choices else {"labels": ("a", "b", "c")}
        sources = dataclasses.replace(sources, task=dataclasses.replace(task, **found))
    return resolve(valid, tokenizer=TokenizerIdentity(VOCABULARY), sources=sources)


def pieces(state: TrainState, tensors: dict[str, torch.Tensor]) -> list[Any]:
    """Return (name, whole shape, offset, values) of every chunk on this rank."""
    found = []
    for name, tensor in tensors.items():
        layout = state.parallel.layouts[name]
        for piece in layout.chunks:
            part = tensor
            for dim, (start, size) in enumerate(zip(piece.start, piece.size, strict=True)):
                part = part.narrow(dim, start, size)
            found.append((name, layout.shape, piece.offset, part.detach().to("cpu", copy=True)))
    return found


def masks_of(plan: RunPlan) -> DocumentMasks | None:
    """Return the document-boundary masks of a case; None if it has none."""
    data = plan.config.data
    masks = DocumentMasks(
        END,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
    )
    return None if masks == DocumentMasks(END) else masks


def run(plan: RunPlan, runtime: Runtime, *, twice: bool = False) -> dict[str, Any]:
    """Train and return the results that the tests compare."""
    seed_everything(plan.config.training.seed, runtime, plan.layout)
    with build_engine(plan, runtime) as engine:
        state = engine.state
        state.parallel.initialize(plan.config.training.seed)
        if twice:
            call_twice(state.model)
        engine.begin()
        state.model.train()
        replicas = ReplicaCheck(state, runtime, interval=1)
        replicas.check()
        steps = plan.train_iters
        count = max(steps, DRAWN_STEPS) * plan.global_batch_size
        samples, collation = samples_of(plan, count)
        results, gradients = [], []
        with BatchLoader(
            samples,
            micro_batch_size=plan.config.training.micro_batch_size,
            data_parallel_rank=state.parallel.mesh.data_rank,
            data_parallel_size=plan.layout.data,
            collation=collation,
        ) as batches:
            kept = StepGradients(state)
            for number in range(steps):
                result = engine.step(batches).result()
                replicas.check()
                results.append((result.loss, result.grad_norm))
                if number == 0:
                    gradients = pieces(state, kept.of_step())
        weights = pieces(state, dict(state.parallel.named_parameters()))
        count = sum(p.numel() for p in state.model.parameters())
        return {"steps": results, "grads": gradients, "weights": weights, "count": count}


def call_twice(model: GPT) -> None:
    """Make `run_blocks` call every layer twice in a row."""
    once = model.run_blocks

    def run_blocks(
        x_BSH: torch.Tensor, documents_BS: Any = None, layers: Any = None, **more: Any
    ) -> torch.Tensor:
        found = model.layers if layers is None else layers
        return once(x_BSH, documents_BS, [layer for layer in found for _ in range(2)], **more)

    model.run_blocks = run_blocks


def of_case(runtime: Runtime, plan: RunPlan, plugins: PluginSet) -> Runtime:
    """Return the runtime with the policies and the op table of a case."""
    selection, device = runtime.selection, runtime.device
    policies = start_policies(plan.config, plugins, selection, device)
    return dataclasses.replace(
        runtime,
        rng=device.rng_tracker(),
        precision=policies.precision,
        recompute=policies.recompute,
        placement=policies.placement,
        stager=policies.stager,
        ops=build_op_table(plugins, selection, device),
    )


def main(cases: dict[str, str], out: Path) -> None:
    """Run all cases in one set of processes."""
    place = rank_info(os.environ)
    plugins = discover()
    selection = Selection.from_json(os.environ[HANDED_DOWN])
    torch.set_num_threads(1)
    plans = {
        name: plan_of(flags.removeprefix("twice"), place.world_size)
        for name, flags in cases.items()
    }
    first = next(iter(plans.values()))
    with (
        join_processes(place, timeout=60.0) as rendezvous,
        start_runtime(first.config, plugins, selection, place, rendezvous) as runtime,
    ):
        for name, plan in plans.items():
            twice = cases[name].startswith("twice")
            found = run(plan, of_case(runtime, plan, plugins), twice=twice)
            store(found, out / f"{name}.{place.rank}.found")


if __name__ == "__main__":
    end_with_launcher(os.environ)
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
