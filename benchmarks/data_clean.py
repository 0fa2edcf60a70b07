r"""Each step of `lmcore data clean` on real text, and what it is built on beside its peers.

    python benchmarks/data_clean.py --corpus 'corpora/**/*.jsonl.gz' --tasks lambada_test.jsonl

Steps are whole commands, from a cold start to the last byte on the disk, by the clock and by the
time of the processor, which other work on the machine hardly changes; medians.  Signatures are
measured in one process, with the error of the similarity that they estimate against the true one
of each text and the same with some of its words gone.  A peer that is not installed
(`pip install datasketch rensa`) is left out and named.  Needs `lmcore-data-tools`.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, parse
from unique_text import unique_documents

_MB = 2**20
_HASHES = 100
_SHINGLE = 5
_PACKAGES = {"language": "py3langid"}
"""Packages that a step needs beyond lmcore's own requirements."""

Signature = Callable[[str], Any]


def paths(pattern: str) -> list[str]:
    """Return the files that match a pattern."""
    return glob.glob(pattern, recursive=True)  # noqa: PTH207  # absolute ones, too


def read_texts(patterns: Sequence[str]) -> list[str]:
    """Return the texts of all documents that have one."""
    from lmcore.data.input.compression import open_text

    texts = []
    for path in sorted({path for one in patterns for path in paths(one)}):
        with open_text(path) as lines:
            records = (json.loads(line) for line in lines)
            texts += [record["text"] for record in records if "text" in record]
    return texts


def time_step(
    step: str, corpus: Path, tasks: Sequence[str], workers: int, repeats: int
) -> tuple[float, float]:
    """Return the median MB/s of a whole command, and MB for each second of processor time."""
    size = corpus.stat().st_size
    flags = ["--input", str(corpus), "--output", f"{corpus}.out", "--workers", str(workers)]
    flags += ["--min-characters", "512", "--log-interval", "1000000", "--overwrite"]
    if step == "ngram":
        flags += ["--tasks", *tasks]
    seconds, processor_seconds = [], []
    for _ in range(repeats):
        start, before = time.perf_counter(), os.times()
        command = [sys.executable, "-m", "lmcore.cli.main", "data", "clean", step, *flags]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}")
        seconds.append(time.perf_counter() - start)
        after = os.times()
        used = after.children_user - before.children_user
        processor_seconds.append(used + after.children_system - before.children_system)
    megabytes = size / _MB
    return megabytes / statistics.median(seconds), megabytes / statistics.median(processor_seconds)


def speed(texts: Sequence[str], work: Callable[[str], object], repeats: int) -> float:
    """Return the median MB for each second of processor time of *work*, in this process."""
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        for text in texts:
            work(text)
        seconds.append(time.process_time() - start)
    return size / _MB / statistics.median(seconds)


def signatures() -> dict[str, Signature]:
    """Return what makes a signature of 100 numbers, by the name of its library."""
    from lmcore_data_tools.clean.minhash import MinHash

    ours = MinHash(hashes=_HASHES)
    found: dict[str, Signature] = {
        "lmcore": lambda text: ours.signatures([text])[0],
        "lmcore, numpy": lambda text: ours.signatures([text], native=False)[0],
    }
    for name in ("datasketch", "rensa"):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed: left out")
    if importlib.util.find_spec("datasketch"):
        from datasketch import MinHash as Datasketch

        def datasketch(text: str) -> Any:
            made = Datasketch(num_perm=_HASHES)
            made.update_batch([piece.encode() for piece in pieces(text)])
            return made.hashvalues

        found["datasketch"] = datasketch
    if importlib.util.find_spec("rensa"):
        import rensa

        for kind in ("RMinHash", "CMinHash"):

            def of_rensa(text: str, kind: str = kind) -> Any:
                made = getattr(rensa, kind)(num_perm=_HASHES, seed=1)
                made.update(pieces(text))
                return np.array(made.digest())

            found[f"rensa {kind}"] = of_rensa
    return found


def pieces(text: str) -> list[str]:
    """Return the shingles of a text as the other libraries want them."""
    return [text[at : at + _SHINGLE] for at in range(max(1, len(text) - _SHINGLE + 1))]


def errors(texts: Sequence[str], signature: Signature) -> tuple[float, float]:
    """Return mean and spread of the errors of estimates, in units of what theory allows."""
    from lmcore_data_tools.clean.minhash import jaccard, shingle_set

    choice = random.Random(0)
    found = []
    for text in texts:
        words = text.split(" ")
        less = " ".join(word for word in words if choice.random() > 0.02)
        truth = jaccard(shingle_set(text, _SHINGLE), shingle_set(less, _SHINGLE))
        if not 0.5 < truth < 0.99:
            continue
        estimate = float(np.mean(signature(text) == signature(less)))
        found.append((estimate - truth) / np.sqrt(truth * (1 - truth) / _HASHES))
    return float(np.mean(found)), float(np.std(found))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", nargs="+", required=True, help="patterns of JSON lines")
    parser.add_argument("--tasks", nargs="*", default=[], help="evaluation sets, for `ngram`")
    parser.add_argument("--megabytes", type=int, default=12, help="of text, the real one first")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    wanted = parse(parser, megabytes=1, workers=[1], repeats=1)
    check(wanted)
    from lmcore_data_tools.clean.chain import STEPS

    texts = read_texts(wanted.corpus)
    steps = [step for step in STEPS if step != "ngram" or wanted.tasks]
    for step, package in _PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            print(f"{step}: left out, {package} is not installed")
            steps.remove(step)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        with corpus.open("w", encoding="utf-8") as file:
            documents = unique_documents(texts, wanted.megabytes * _MB)
            for number, text in enumerate(documents):
                url = f"https://example.org/{number}"
                file.write(json.dumps({"text": text, "url": url}, ensure_ascii=False) + "\n")
        print(f"{corpus.stat().st_size / _MB:.1f} MiB of JSON, load {os.getloadavg()[0]:.1f}")
        print("MB/s, MB/processor s", *(f"{count} workers".rjust(16) for count in wanted.workers))
        for step in steps:
            row = [
                time_step(step, corpus, wanted.tasks, count, wanted.repeats)
                for count in wanted.workers
            ]
            shown = (f"{whole:8.1f}{used:8.1f}" for whole, used in row)
            print(step.ljust(20), *shown, flush=True)
    sample = texts[:: max(1, len(texts) // 1000)]
    print("\nsignature".ljust(16), "MB/s".rjust(12), "mean error".rjust(12), "spread".rjust(12))
    for name, signature in signatures().items():
        mean, spread = errors(sample, signature)
        shown = (speed(sample, signature, wanted.repeats), mean, spread)
        print(name.ljust(16), *(f"{one:12.2f}" for one in shown), flush=True)
    if importlib.util.find_spec("ftfy"):
        import ftfy

        from lmcore_data_tools.clean.filter.fix import fixed

        print("\nmending", f"lmcore {speed(sample, fixed, wanted.repeats):.1f} MB/s,", end=" ")
        print(f"ftfy {speed(sample, ftfy.fix_text, wanted.repeats):.1f} MB/s")


if __name__ == "__main__":
    main()
