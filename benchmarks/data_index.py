"""Sample indices: lmcore beside megatron-core, on the same files, compared byte for byte.

Both map one dataset of many documents, each in a separate process.  They take turns at every
task, so that a change of the machine's speed falls on both; the figures are medians over the turns,
and the medians of the ratios within a turn.  What they build is compared by hash before.

    python benchmarks/data_index.py                        # 10 million documents
    python benchmarks/data_index.py --documents 1000000 --peer-python /path/to/python

The dataset's `.bin` is as large as its documents say and has no content (a sparse file), for
building an index reads none of it; samples are read from a smaller dataset that has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, marked, parse

NO, YES = False, True  # what the peer's helpers take by position
SEED = 1234
LONGEST = 1000  # tokens of a document: 1 to so many
SENTENCES = 6
WEIGHTS = [0.1, 0.2, 0.3, 0.4]

TASKS = {
    "sample index": "one epoch's sample index, of shuffled documents",
    "whole index": "documents shuffled, sample index, shuffle index",
    "blend": "which of four datasets each sample is from",
    "sentences": "mapping of sentences to BERT samples, six sentences a document",
    "cold": "opening a GPT dataset without a cache: build and write it",
    "warm": "opening a GPT dataset whose index is cached",
    "read in order": "samples, one after another",
    "read shuffled": "samples, at random positions",
}

Task = Callable[[], Any]


@dataclass(frozen=True)
class Work:
    """Input of both contenders.

    Attributes:
        large, small: Datasets, without content and with.
        cache: Folder of indices.
        length: Tokens of a sample.
        reads: Samples that are read.
        blend: Samples of the blend.
    """

    large: str
    small: str
    cache: Path
    length: int
    reads: int
    blend: int

    def fresh(self) -> Path:
        """Return an empty directory for a cache."""
        directory = self.cache / "cold"
        shutil.rmtree(directory, ignore_errors=True)
        return directory

    def order(self, samples: int) -> list[int]:
        """Return the positions that are read at random."""
        return np.random.default_rng(0).integers(0, samples, self.reads).tolist()


def write_dataset(prefix: Path, documents: int, *, content: bool) -> str:
    """Write an indexed dataset of uint16 tokens."""
    rng = np.random.default_rng(documents)
    sizes = rng.integers(1, LONGEST + 1, documents, dtype=np.int32)
    ends = np.cumsum(sizes, dtype=np.int64) * 2
    with Path(f"{prefix}.idx").open("wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        for part in (sizes, np.concatenate([[0], ends[:-1]]), np.arange(documents + 1)):
            part.tofile(index)
    with Path(f"{prefix}.bin").open("wb") as tokens:
        if content:
            rng.integers(0, 50_000, int(ends[-1]) // 2, dtype=np.uint16).tofile(tokens)
        tokens.truncate(int(ends[-1]))
    return str(prefix)


def lmcore_tasks(work: Work) -> dict[str, Task]:
    """Return the tasks as lmcore does them."""
    from lmcore.data.blend.index import build_blend_index
    from lmcore.data.dataset.gpt import GPTDataset
    from lmcore.data.dataset.gpt_index import build_gpt_index, build_sample_index
    from lmcore.data.dataset.sentence_index import build_segment_mapping
    from lmcore.data.indexed.dataset import IndexedDataset

    large, small = IndexedDataset(work.large), IndexedDataset(work.small)
    tokens = large.tokens
    samples = (tokens - 1) // work.length
    sizes = np.array(large.sizes)
    short = sizes % 60
    documents = build_gpt_index(
        sizes, (0, len(sizes)), sequence_length=work.length, num_samples=1, seed=SEED
    ).document_index

    def opened(indexed: IndexedDataset, cache: Path) -> GPTDataset:
        return GPTDataset(
            indexed,
            document_range=(0, indexed.document_count),
            num_samples=(indexed.tokens - 1) // work.length,
            sequence_length=work.length,
            seed=SEED,
            cache_dir=cache,
        )

    def whole() -> list[np.ndarray]:
        made = build_gpt_index(
            large.sizes,
            (0, len(sizes)),
            sequence_length=work.length,
            num_samples=samples,
            seed=SEED,
        )
        return [made.document_index, made.sample_index, made.shuffle_index]

    def sentences() -> np.ndarray:
        return build_segment_mapping(
            np.arange(0, len(sizes) + 1, SENTENCES),
            short,
            num_samples=None,
            longest=509,
            short_probability=0.1,
            seed=SEED,
            least_sentences=2,
        )

    reading = opened(small, work.cache / "read")
    order = work.order(len(reading))
    return {
        "sample index": lambda: build_sample_index(
            sizes, documents, sequence_length=work.length, num_samples=samples
        ),
        "whole index": whole,
        "blend": lambda: list(build_blend_index(WEIGHTS, work.blend)),
        "sentences": sentences,
        "cold": lambda: opened(large, work.fresh()),
        "warm": lambda: opened(large, work.cache / "warm"),
        "read in order": lambda: [reading[i] for i in range(work.reads)],
        "read shuffled": lambda: [reading[i] for i in order],
    }


def megatron_tasks(work: Work) -> dict[str, Task]:
    """Return the tasks as megatron-core does them."""
    from megatron.core.datasets import gpt_dataset, helpers, helpers_cpp
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    large, small = IndexedDataset(work.large), IndexedDataset(work.small)
    sizes = np.array(large.sequence_lengths)
    short = sizes % 60
    tokens = int(sizes.sum())
    everything = np.arange(len(sizes), dtype=np.int32)
    shuffled = gpt_dataset._build_document_index(  # noqa: SLF001  # has no public name
        everything, 1, np.random.RandomState(SEED), NO
    )

    class Tokenizer:
        """Attributes of a tokenizer that the dataset reads."""

        eod, vocab_size, unique_identifiers = 0, 50_000, {"class": "benchmark"}

    def opened(indexed: Any, prefix: str, cache: Path) -> Any:
        cache.mkdir(parents=True, exist_ok=True)
        config = gpt_dataset.GPTDatasetConfig(
            random_seed=SEED,
            sequence_length=work.length,
            blend=([prefix], None),
            split="1,0,0",
            path_to_cache=str(cache),
            tokenizer=Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        lengths = indexed.sequence_lengths
        samples = (int(lengths.sum()) - 1) // work.length
        documents = np.arange(len(lengths), dtype=np.int32)
        return gpt_dataset.GPTDataset(indexed, prefix, documents, samples, Split.train, config)

    def whole() -> list[np.ndarray]:
        rng = np.random.RandomState(SEED)
        documents = gpt_dataset._build_document_index(everything, 1, rng, NO)  # noqa: SLF001
        starts = helpers.build_sample_idx(
            large.sequence_lengths.copy(), documents, work.length, 1, tokens, YES, YES
        )
        count = len(starts) - 1
        return [documents, starts, gpt_dataset._build_shuffle_index(count, count, rng)]  # noqa: SLF001

    def blend() -> list[np.ndarray]:
        dataset, sample = np.zeros(work.blend, np.int16), np.zeros(work.blend, np.int64)
        shares = np.array(WEIGHTS)
        helpers_cpp.build_blending_indices(dataset, sample, shares, len(shares), work.blend, NO)
        return [dataset, sample]

    reading = opened(small, work.small, work.cache / "read")
    order = work.order(len(reading))
    starts = np.arange(0, len(sizes) + 1, SENTENCES)
    return {
        "sample index": lambda: helpers_cpp.build_sample_idx_int32(
            sizes, shuffled, work.length, 1, tokens, YES, 1
        ),
        "whole index": whole,
        "blend": blend,
        "sentences": lambda: helpers_cpp.build_mapping(
            starts, short, 1, 2**62, 509, 0.1, SEED, NO, 2
        ),
        "cold": lambda: opened(large, work.large, work.fresh()),
        "warm": lambda: opened(large, work.large, work.cache / "warm"),
        "read in order": lambda: [reading[i] for i in range(work.reads)],
        "read shuffled": lambda: [reading[i] for i in order],
    }


CONTENDERS: Mapping[str, Callable[[Work], dict[str, Task]]] = {
    "lmcore": lmcore_tasks,
    "megatron-core": megatron_tasks,
}


def digest(made: Any) -> str | None:
    """Return a hash of the arrays that a task made; None if it made none."""
    import hashlib

    arrays = made if isinstance(made, list) else [made]
    if not all(isinstance(array, np.ndarray) for array in arrays):
        return None
    hashed = hashlib.blake2b(digest_size=16)
    for array in arrays:
        hashed.update(f"{array.dtype} {array.shape}".encode())
        hashed.update(np.ascontiguousarray(array))
    return hashed.hexdigest()


def serve(name: str, work: Work) -> None:
    """Do the tasks that the lines of standard input name; the body of a contender's process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        tasks = CONTENDERS[name](work)
    except ImportError as missing:
        answers.write(json.dumps({"missing": str(missing)}) + "\n")
        answers.flush()
        return
    for line in itertools.chain([""], sys.stdin):
        answer: dict[str, Any] = {"ready": True}
        if line:
            began = time.perf_counter()
            made = tasks[line.strip()]()
            answer = {"seconds": time.perf_counter() - began, "digest": digest(made)}
            del made
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Contender:
    """One contender in a separate process."""

    def __init__(self, name: str, python: str, work: Work) -> None:
        """Start the process and wait until it has opened the datasets."""
        command = [python, "-W", "ignore", __file__, "--worker", name]
        for flag, value in vars(replace(work, cache=work.cache / name)).items():
            command += [f"--{flag}", str(value)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.missing = self._answer().get("missing")

    def do(self, task: str) -> dict[str, Any]:
        """Return how long a task took, and what it made."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{task}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return {"missing": f"its process ended with status {self.process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def measure(
    contenders: dict[str, Contender], tasks: list[str], turns: int
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of every task and contender; raise where they made different things."""
    taken: dict[str, dict[str, list[float]]] = {}
    for task in tasks:
        taken[task] = {name: [] for name in contenders}
        order = list(contenders)
        for turn in range(turns + 1):
            answers = {name: contenders[name].do(task) for name in order}
            if len({answer["digest"] for answer in answers.values()}) > 1 and "read" not in task:
                raise SystemExit(f"{task}: the contenders made different arrays")
            order.reverse()
            if turn:  # the first one warms up
                for name, answer in answers.items():
                    taken[task][name].append(answer["seconds"])
    return taken


def report(taken: dict[str, dict[str, list[float]]], asked: argparse.Namespace) -> None:
    """Print medians and ratios."""
    rows = {
        task: {
            "seconds": {name: statistics.median(values) for name, values in seconds.items()},
            "ratio": statistics.median(
                theirs / ours
                for theirs, ours in zip(seconds["megatron-core"], seconds["lmcore"], strict=True)
            )
            if "megatron-core" in seconds
            else None,
        }
        for task, seconds in taken.items()
    }
    if asked.json:
        print(json.dumps(marked(rows, asked), indent=2))
        return
    print(
        f"{asked.documents} documents, a blend of {asked.blend}, {asked.reads} reads of "
        f"{asked.length} tokens"
    )
    print(f"{'seconds':<16}{'lmcore':>10}{'megatron-core':>16}   ratio")
    for task, row in rows.items():
        ours, theirs = row["seconds"]["lmcore"], row["seconds"].get("megatron-core")
        beside = f"{theirs:>16.4f}   {row['ratio']:.1f}" if theirs else ""
        print(f"{task:<16}{ours:>10.4f}{beside}   {TASKS[task]}")


def main() -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sample")
    parser.add_argument("--blend", type=int, default=10_000_000, help="samples of the blend")
    parser.add_argument("--reads", type=int, default=4000, help="samples that are read")
    parser.add_argument("--read-documents", type=int, default=200_000, help="that they are of")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--peer-python", default=sys.executable, help="has megatron-core")
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    for hidden in ("--worker", "--large", "--small"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    asked = parse(
        parser, documents=2000, length=64, blend=1000, reads=20, read_documents=100, turns=1
    )
    if asked.worker:
        given = {one.name: getattr(asked, one.name) for one in fields(Work)}
        serve(asked.worker, Work(**given))
        return
    check(asked)
    with tempfile.TemporaryDirectory(dir=asked.directory) as folder:
        root = Path(folder)
        large = write_dataset(root / "large", asked.documents, content=False)
        small = write_dataset(root / "small", asked.read_documents, content=True)
        work = Work(large, small, root / "cache", asked.length, asked.reads, asked.blend)
        contenders = {
            "lmcore": Contender("lmcore", sys.executable, work),
            "megatron-core": Contender("megatron-core", asked.peer_python, work),
        }
        try:
            for name, contender in list(contenders.items()):
                if contender.missing:
                    print(f"{name}: left out, {contender.missing}", file=sys.stderr)
                    contenders.pop(name).close()
            report(measure(contenders, asked.tasks, asked.turns), asked)
        finally:
            for contender in contenders.values():
                contender.close()


if __name__ == "__main__":
    main()
