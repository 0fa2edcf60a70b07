"""Generation with tensor parallelism and pipelines: the texts of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from lmcore.checkpoint import save_checkpoint
from lmcore.contract import OP_SPECS, OpTable
from lmcore.conversion.convert import convert
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.data.tokenizer.saved import save_tokenizer
from lmcore.families.build import create_model
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape

WORKER = Path(__file__).with_name("generation_worker.py")
SHAPES = {
    # The rows of the vocabulary are no multiple of the ranks.
    "gpt": ModelShape(3, 32, 4, 48, 64, 261, init_method_std=0.3),
    # The slopes of a rank's heads are not those of the first heads.
    "alibi": ModelShape(
        *(3, 32, 4, 48, 64, 261),
        init_method_std=0.3,
        position_embedding_type="alibi",
        embed_layernorm=True,
    ),
    "llama": ModelShape(
        4,
        32,
        4,
        48,
        64,
        384,
        init_method_std=0.3,
        num_query_groups=2,
        normalization="RMSNorm",
        swiglu=True,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        add_bias_linear=False,
    ),
}

_T5 = {
    "decoder_num_layers": 3,
    "relative_attention_max_distance": 12,
    "relative_attention_num_buckets": 8,
    "t5_feed_forward": "gelu",
    "t5_head_bias": True,
    "t5_scaled_attention": True,
    "t5_scaled_head": False,
}
_RELATIVE = {"t5_feed_forward": "gated-gelu", "t5_head_bias": False, "t5_scaled_attention": False}
ENCODERS = {
    "t5": ModelShape(
        *(2, 32, 4, 48, 64, 261),
        init_method_std=0.3,
        model_family="t5",
        further=tuple(sorted(_T5.items())),
    ),
    "t5-relative": ModelShape(
        *(2, 32, 4, 48, 64, 384),
        init_method_std=0.2,
        normalization="RMSNorm",
        position_embedding_type="relative",
        add_bias_linear=False,
        model_family="t5",
        further=tuple(sorted((_T5 | _RELATIVE).items())),
    ),
}

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with random weights, by family; the first one also in Hugging Face's format."""
    folder = tmp_path_factory.mktemp("runs")
    for name, shape in (SHAPES | ENCODERS).items():
        model: Any = create_model(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
        model.initialize(3)
        with torch.no_grad():
            model.head_weight[257:] *= 5  # padding, which would often be the most probable token
        tensors = {f"model.{key}": tensor.detach() for key, tensor in model.named_parameters()}
        save_checkpoint(folder / name / "checkpoints", 5, tensors, {}, model_shape=shape.to_dict())
        save_tokenizer(ByteTokenizer(), folder / name / "tokenizer")
    convert(folder / "gpt", folder / "foreign", "huggingface")
    return {name: folder / name for name in (*SHAPES, "foreign", *ENCODERS)}


Generate = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def generate(start: Callable[..., Any], runs: dict[str, Path]) -> Generate:
    """Runs models in processes, all decoders or others; gives what rank 0 found."""

    def call(
        tensor: int, pipeline: int, precision: str, names: Iterable[str] = (*SHAPES, "foreign")
    ) -> list[dict[str, Any]]:
        case = {
            "runs": [str(runs[name]) for name in names],
            "tensor": tensor,
            "pipeline": pipeline,
            "precision": precision,
        }
        ranks = start(
            "generate",
            lambda _: {"GENERATION_CASE": json.dumps(case)},
            world_size=tensor * pipeline,
            worker=WORKER,
        )
        for rank in ranks:
            assert rank.status == 0, rank.errors
        assert not any(rank.printed for rank in ranks[1:])
        printed: list[dict[str, Any]] = ranks[0].printed
        return printed

    return call


@pytest.mark.parametrize(
    "tensor, pipeline",
    [(2, 1), (1, 2), (2, 2), pytest.param(1, 3, marks=pytest.mark.full)],
)
def test_texts_are_those_of_one_process(generate: Generate, tensor: int, pipeline: int) -> None:
    """Sampled and greedy texts, beams and log-probabilities, with requests that come and go."""
    expected, made = generate(1, 1, "fp32"), generate(tensor, pipeline, "fp32")
    assert len(made) == len(expected) == len(SHAPES) + 1
    for left, right in zip(expected, made, strict=True):
        for name in ("tokens", "beams", "plain", "parameters"):
            assert right[name] == left[name], name
        for name in ("logprobs", "prompt", "scores"):
            assert right[name] == pytest.approx(left[name], abs=2e-4), name
        assert min(map(len, right["tokens"])) >= 3


def test_answers_are_those_of_one_process(generate: Generate) -> None:
    """Sources of several lengths, with requests that come and go, and beam search."""
    expected, made = (generate(tensor, 1, "fp32", ENCODERS) for tensor in (1, 2))
    assert len(made) == len(expected) == len(ENCODERS)
    for left, right in zip(expected, made, strict=True):
        for name in ("tokens", "beams", "parameters"):
            assert right[name] == left[name], name
        for name in ("logprobs", "scores"):
            assert right[name] == pytest.approx(left[name], abs=2e-4), name
        assert len({tuple(tokens) for tokens in right["tokens"]}) > 1, "each has its own source"


@pytest.mark.full
@pytest.mark.parametrize("tensor, pipeline", [(2, 1), (1, 2)])
def test_bf16(generate: Generate, tensor: int, pipeline: int) -> None:
    """A prompt's log-probabilities equal the ones of one process within the rounding of bf16."""
    expected, made = generate(1, 1, "bf16"), generate(tensor, pipeline, "bf16")
    for left, right in zip(expected, made, strict=True):
        assert right["prompt"] == pytest.approx(left["prompt"], abs=0.15)


class Command:
    """`lmcore` in several processes; see `subprocess`."""

    def __init__(self, *argv: str) -> None:
        command = [sys.executable, "-m", "lmcore", *argv, "--device", "cpu"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            self.lines.extend(self.process.stderr)

    def ended(self) -> tuple[int, str]:
        """Return the exit status and standard output."""
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        return self.process.wait(60), out


TWO = ("--tensor-model-parallel-size", "2", "--nproc-per-node", "2")


def test_generate(runs: dict[str, Path]) -> None:
    """The command starts its processes and writes the same text."""
    flags = ("generate", "--load", str(runs["gpt"]), "--prompt", "Hello", "--tokens", "8")
    texts = []
    for more in ((), TWO):
        with Command(*flags, *more) as command:
            status, text = command.ended()
            assert status == 0, command.lines
            texts.append(text)
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("Hello")


@pytest.mark.parametrize(
    "flags, problem",
    [
        (("--tensor-model-parallel-size", "3", "--nproc-per-node", "3"), "4 attention heads"),
        (("--pipeline-model-parallel-size", "4", "--nproc-per-node", "4"), "3 layers"),
    ],
)
def test_models_that_cannot_be_divided(
    runs: dict[str, Path], flags: tuple[str, ...], problem: str
) -> None:
    """The error has the numbers, once."""
    with Command("generate", "--load", str(runs["gpt"]), "--prompt", "a", *flags) as command:
        status, out = command.ended()
        command.reader.join()
        assert (status, out) == (2, "")
        assert sum(problem in line for line in command.lines) == 1, command.lines
