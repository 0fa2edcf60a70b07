"""One rank of a model that generates; rank 0 prints a JSON object of each run directory.

The environment has the run directories and the sizes of the layout, as JSON.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.section import AcceleratorSection, Config
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.generation.beam import beam_search
from lmcore.generation.continuous_batch import ContinuousBatch
from lmcore.generation.generate import recompute
from lmcore.generation.request import Request
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.inference.load import LoadedModel, load_model
from lmcore.inference.parallel.start import parallel_model
from lmcore.plugin import Selection, discover
from lmcore.plugin.selection import HANDED_DOWN
from lmcore.runtime.launch.rank import rank_info
from lmcore.runtime.launch.worker_protocol import end_with_launcher
from lmcore.runtime.runtime import Runtime, connect_processes, start_runtime

REQUESTS = [
    Request([5, 6, 7], 12, seed=1),
    Request(list(range(40, 70)), 9, SamplingOptions(top_k=20), seed=2, top_logprobs=2),
    Request([9], 14, SamplingOptions(0.8, top_p=0.9), seed=3, prompt_logprobs=True),
    Request(
        [3, 1, 4, 1, 5], 10, SamplingOptions(greedy=True), top_logprobs=0, prompt_logprobs=True
    ),
    Request(list(range(100, 120)), 6, SamplingOptions(greedy=True)),
]


SOURCES = ([5, 6, 7, 256], [*range(40, 70), 256], [9, 256], [3, 1, 4, 1, 5, 256])


@contextmanager
def opened(path: Path, runtime: Runtime, layout: ParallelLayout):
    """Give the model of a run, on rank 0 only."""
    choice = TokenizerSettings(tokenizer_type="ByteTokenizer")
    if layout.world_size == 1:
        yield load_model(path, runtime, choice=choice)
        return
    with parallel_model(path, runtime, layout, choice=choice, extra={}, rows=3) as loaded:
        yield loaded


def answers(loaded: LoadedModel) -> dict[str, Any]:
    """Return the answers of a decoder to several sources, and of beam search."""
    model, size = loaded.model, loaded.tokenizer.vocab_size
    batch = ContinuousBatch(model, vocab_size=size, max_requests=3, execution=loaded.execution)
    greedy, sampled = SamplingOptions(greedy=True), SamplingOptions(0.8, top_p=0.9)
    made = [
        batch.add(
            Request(
                *([0], count, options, seed),
                top_logprobs=0,
                source=source,
            )
        )
        for seed, (source, count, options) in enumerate(
            zip(SOURCES, (12, 5, 9, 7), (greedy, sampled, greedy, sampled), strict=True)
        )
    ]
    batch.run()
    beams = beam_search(
        *(model, [0]),
        source=SOURCES[1],
        width=3,
        max_tokens=6,
        vocab_size=size,
        execution=loaded.execution,
    )
    return {
        "tokens": [one.tokens for one in made],
        "logprobs": [one.logprob for text in made for one in text.logprobs],
        "beams": [[*one.tokens] for one in beams],
        "scores": [one.score for one in beams],
        "parameters": loaded.num_parameters,
    }


def found(path: Path, runtime: Runtime, layout: ParallelLayout) -> dict[str, Any] | None:
    """Return texts of the batch, of beam search and without a cache; None on other ranks."""
    with opened(path, runtime, layout) as loaded:
        if loaded is None:
            return None
        if loaded.reads_source:
            return answers(loaded)
        model, size = loaded.model, loaded.tokenizer.vocab_size
        batch = ContinuousBatch(model, vocab_size=size, max_requests=3, execution=loaded.execution)
        made = [batch.add(request) for request in REQUESTS]
        while len(made[0].tokens) < 3:
            batch.step()
        batch.cancel(made[0])
        batch.run()
        beams = beam_search(
            model, [1, 2], width=3, max_tokens=6, vocab_size=size, execution=loaded.execution
        )
        (plain,) = recompute(model, [Request([7, 8], 4, seed=6)], size, loaded.execution)
        return {
            "tokens": [one.tokens for one in made],
            "logprobs": [one.logprob for text in made for one in text.logprobs],
            "prompt": [one.logprob for text in made for one in text.prompt_logprobs],
            "beams": [[*one.tokens] for one in beams],
            "scores": [one.score for one in beams],
            "plain": plain.tokens,
            "parameters": loaded.num_parameters,
        }


def main() -> None:
    """Run all directories."""
    given = json.loads(os.environ["GENERATION_CASE"])
    layout = ParallelLayout(tensor=given["tensor"], pipeline=given["pipeline"])
    rank = rank_info(os.environ)
    end_with_launcher(os.environ)
    torch.set_num_threads(1)
    plugins, selection = discover(env={}), Selection.from_json(os.environ[HANDED_DOWN])
    config = Config(accelerator=AcceleratorSection(device="cpu", precision=given["precision"]))
    with (
        connect_processes(config, rank, "their settings", given) as rendezvous,
        start_runtime(config, plugins, selection, rank, rendezvous) as runtime,
    ):
        for name in given["runs"]:
            values = found(Path(name), runtime, layout)
            if values is not None:
                print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
