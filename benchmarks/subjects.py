"""lmcore as a contender of the benchmarks: through the framework, and without it."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from train_step import Shape

    from lmcore.data.loading.loader import BatchLoader
    from lmcore.train.report.run_report import RunReport


_SENTINELS = 20
_T5 = [
    *("--model-family", "t5", "--position-embedding-type", "relative", "--t5-feed-forward", "relu"),
    *("--no-t5-scaled-attention", "--t5-scaled-head", "--no-t5-head-bias"),
    *("--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--vocab-extra-ids", str(_SENTINELS)),
]


def _flags(shape: Shape, prefix: str, *, compiled: bool, threads: int) -> list[str]:
    return [
        *("--num-layers", str(shape.num_layers), "--hidden-size", str(shape.hidden_size)),
        *("--num-attention-heads", str(shape.num_heads), "--seq-length", str(shape.seq_length)),
        *("--micro-batch-size", str(shape.micro_batch_size), "--train-iters", "100000"),
        *("--data-path", prefix, "--split", "1,0,0", "--eval-iters", "0", "--lr", "1e-4"),
        *("--lr-decay-style", "constant", "--lr-warmup-fraction", "0"),
        *("--progress", "none", "--no-tensorboard", "--num-threads", str(threads)),
        *(["--compile"] if compiled else []),
        *_tokenizer(shape, Path(prefix).parent),
    ]


def _tokenizer(shape: Shape, directory: Path) -> list[str]:
    """Return flags of family and tokenizer; BERT and T5 are the originals, as in transformers."""
    if shape.family in {"gpt", "llama"}:
        null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(shape.vocab_size - 1)]
        return null if shape.family == "gpt" else [*null, *_llama(shape)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]"]
    extra = 0 if shape.family == "bert" else _SENTINELS
    words = [*special, *(f"w{i}" for i in range(shape.vocab_size - len(special) - extra))]
    vocabulary = directory / "vocab.txt"
    vocabulary.write_text("\n".join(words) + "\n", encoding="utf-8")
    tokenizer = ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocabulary))
    if shape.family == "t5":
        return [*_T5, "--decoder-seq-length", str(shape.decoder_length), *tokenizer]
    return ["--model-family", "bert", "--bert-post-norm", "--bert-gelu", "erf", *tokenizer]


def _llama(shape: Shape) -> list[str]:
    return [
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
        *("--disable-bias-linear", "--untie-embeddings-and-output-weights"),
        *("--group-query-attention", "--num-query-groups", str(shape.num_groups)),
        *("--ffn-hidden-size", str(shape.ffn_size)),
    ]


def _data(shape: Shape, directory: Path) -> str:
    """Write random token ids as an indexed dataset; return its prefix."""
    import numpy as np

    from lmcore.data.indexed.writer import IndexedDatasetWriter

    random = np.random.default_rng(0)
    prefix = str(directory / "ids")
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(200):
            ids = random.integers(7, min(50257, shape.vocab_size - 1), size=4 * shape.seq_length)
            sentences = None
            if shape.family in {"bert", "t5"}:
                sentences = [shape.seq_length // 8] * 32
            writer.add_document(ids.tolist(), sentences)
    return prefix


class Parts:
    """The pieces of a run, made as `lmcore train` makes them; closed when the process ends.

    In one of several processes, as their environment says, they are connected first.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        compiled: bool,
        threads: int,
        flags: Sequence[str] = (),
        device: str = "cpu",
    ) -> None:
        """Make device, data, model and state; *flags* are added to the flags of the shape."""
        from lmcore.cli.selection import find_plugins
        from lmcore.runtime.device_choice import choose_device
        from lmcore.runtime.launch.rank import rank_info
        from lmcore.runtime.process.join import join_processes

        plugins, rank = find_plugins([]), rank_info(os.environ)
        self.plugins = plugins
        selection = choose_device(plugins, device, rank)  # before torch is imported
        from lmcore.config.load import load_config
        from lmcore.config.resolve import resolve
        from lmcore.config.tokenizer import TokenizerIdentity, TokenizerSettings
        from lmcore.config.validate import validate
        from lmcore.data.tokenizer import tokenizer_from
        from lmcore.parallel.parallel_model import parallelize
        from lmcore.runtime.runtime import start_runtime
        from lmcore.train.datasets import build_datasets
        from lmcore.train.state import TrainState

        self.stack = ExitStack()
        atexit.register(self.stack.close)  # a step may outlive this object, but not its files
        self.directory = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        own = _flags(shape, _data(shape, self.directory), compiled=compiled, threads=threads)
        loaded = load_config([*own, *flags])
        tokenizer = tokenizer_from(TokenizerSettings.of(loaded.config.data))
        self.plan = resolve(
            validate(loaded, world_size=rank.world_size),
            tokenizer=TokenizerIdentity.of(tokenizer),
        )
        rendezvous = None
        if rank.world_size > 1:
            rendezvous = self.stack.enter_context(join_processes(rank, timeout=120.0))
        self.runtime = self.stack.enter_context(
            start_runtime(self.plan.config, plugins, selection, rank, rendezvous)
        )
        self.datasets = build_datasets(self.plan, tokenizer, self.directory)
        parallel = parallelize(
            self.plan.shape,
            self.plan.layout,
            self.runtime,
            compile_blocks=compiled,
        )
        parallel.initialize(1)
        self.state = TrainState.create(parallel, self.plan, self.runtime)
        parallel.model.train()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def report(self) -> RunReport:
        """Return the report of a run that shows nothing, its files opened."""
        from lmcore.train.report.display import SilentDisplay
        from lmcore.train.report.run_directory import RunDirectory
        from lmcore.train.report.run_report import RunReport
        from lmcore.train.report.startup_clock import PhaseClock

        directory = RunDirectory(self.directory)
        report = RunReport(
            self.plan, self.runtime, self.plugins, directory, SilentDisplay(), PhaseClock()
        )
        self.stack.enter_context(report.recording(after_step=0))
        return report

    def batches(self) -> BatchLoader:
        """Return the loader of this process."""
        from lmcore.data.loading.loader import BatchLoader

        return self.stack.enter_context(
            BatchLoader(
                self.datasets.train,
                micro_batch_size=self.plan.config.training.micro_batch_size,
                data_parallel_rank=self.state.parallel.mesh.data_rank,
                data_parallel_size=self.plan.layout.data,
                collation=self.datasets.collation,
            )
        )


def lmcore_step(
    shape: Shape,
    *,
    compiled: bool,
    threads: int,
    device: str = "cpu",
    precision: str | None = None,
) -> Callable[[], float]:
    """Return a step as `lmcore train` takes it, metrics and display included."""
    from lmcore.train.step import TrainStep
    from lmcore.train.step_queue import StepQueue

    flags = [] if precision is None else ["--precision", precision]
    parts = Parts(shape, compiled=compiled, threads=threads, device=device, flags=flags)
    batches = parts.batches()
    queue = StepQueue(TrainStep(parts.state, parts.plan, parts.runtime), batches)
    report = parts.report()

    def take() -> float:
        queue.submit(parts.state.iteration + 1)
        (record,) = queue.completed(wait=True)
        report.step(record)
        return record.loss

    return take


def bare_step(
    shape: Shape, *, compiled: bool, threads: int, precision: str = "fp32"
) -> Callable[[], float]:
    """Return a hand-written step on the same model, its batch made ahead."""
    flags = ["--precision", precision]
    parts = Parts(shape, compiled=compiled, threads=threads, flags=flags)
    import torch

    from lmcore.train.token_mean import mean_loss

    model, optimizer = parts.state.model, parts.state.optimizer
    batch = next(parts.batches())
    parameters = [p for group in optimizer.groups for p in group.parameters]
    device = torch.device("cpu")

    def take() -> float:
        model.zero_grad()
        with parts.runtime.precision.context():
            loss = mean_loss(model.loss, batch, model.family, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step(1e-4)
        return loss.item()

    return take
