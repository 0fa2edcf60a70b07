"""Compare two versions of lmcore bit for bit: losses, checkpoints, and runs resumed across them.

A change that is meant to change no result is checked in three commands, each with the Python whose
lmcore it runs:

    before/bin/python benchmarks/equal_results.py record BEFORE
    after/bin/python benchmarks/equal_results.py record AFTER
    after/bin/python benchmarks/equal_results.py resume BEFORE
    after/bin/python benchmarks/equal_results.py compare BEFORE AFTER

`record` trains each configuration of `CASES` on the CPU for twelve steps, with checkpoints after
six and twelve.  `resume` continues the run of BEFORE from its checkpoint after six steps with this
lmcore, and compares what it ends with to the uninterrupted run.  `compare` prints a line for each
configuration.  The exit status is 1 if anything differs.  Only the command line, `metrics.jsonl`
and the checkpoint's files are used, so any two versions can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS, SAVED = 12, 6
COMMON = (
    "--device cpu --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    f"--micro-batch-size 2 --global-batch-size 8 --save-interval {SAVED} "
    f"--eval-interval {SAVED} --eval-iters 1 --sample-tokens 0 --num-threads 1 --seed 4"
)
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
LLAMA = (
    "--normalization RMSNorm --swiglu --ffn-hidden-size 96 --position-embedding-type rope "
    "--group-query-attention --num-query-groups 2 --no-add-bias-linear "
    "--untie-embeddings-and-output-weights"
)
CASES = {
    "fp32": (1, DROPOUT),
    "bf16-recompute-full": (1, f"--precision bf16 --recompute full {DROPOUT}"),
    "fp16-overflow": (1, "--precision fp16 --initial-loss-scale 16777216"),
    "llama-bf16-selective": (1, f"--precision bf16 --recompute selective {LLAMA}"),
    "compiled": (1, "--compile"),
    "documents-rampup": (
        1,
        (
            "--reset-attention-mask --reset-position-ids --eod-mask-loss "
            "--rampup-batch-size 2 2 24 --train-samples 60 --optimizer muon"
        ),
    ),
    "data-parallel-dropout": (2, DROPOUT),
    "zero1-bf16": (2, "--use-distributed-optimizer --precision bf16 --async-save"),
    "zero3-llama": (2, f"--zero-stage 3 {LLAMA}"),
    "tensor-sequence-parallel": (
        2,
        f"--tensor-model-parallel-size 2 --sequence-parallel {DROPOUT}",
    ),
    "pipeline-zero-bubble": (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
    ),
    "context-parallel-llama": (2, f"--context-parallel-size 2 {LLAMA}"),
    "tensor-pipeline-fp16": (
        4,
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --precision fp16 "
            "--initial-loss-scale 16777216"
        ),
    ),
    "deepspeed-zero1-bf16": (2, "--engine deepspeed --zero-stage 1 --precision bf16"),
    "deepspeed-zero3": (2, "--engine deepspeed --zero-stage 3"),
}
"""Number of processes and flags of each configuration."""

COMPARED = (
    "step",
    "consumed_samples",
    "loss",
    "learning_rate",
    "grad_norm",
    "loss_scale",
    "skipped_iterations",
    "valid_loss",
    "valid_perplexity",
)
"""Values of `metrics.jsonl`; the others are times."""
VARYING = ("files", "lmcore_version", "manifest_sha256", "sequence")
"""Entries of a manifest that depend on who wrote it and how often, not on results."""


def main() -> int:
    """Run a command and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "resume", "compare"))
    parser.add_argument("folders", nargs="+", type=Path, help="folder of recorded runs")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    options = parser.parse_args()
    count = 2 if options.command == "compare" else 1
    if len(options.folders) != count:
        parser.error(f"`{options.command}` takes {count} folder{'s' * (count > 1)}")
    os.environ["PYTHONSAFEPATH"] = "1"
    failed = 0
    for name in options.only:
        if name.startswith("deepspeed") and not importlib.util.find_spec("deepspeed"):
            print(f"{name:26} not run: the package deepspeed is not installed", flush=True)
            continue
        if options.command == "record":
            problem = train(options.folders[0] / name, name)
        elif options.command == "resume":
            problem = resume(options.folders[0], name)
        else:
            problem = compare(options.folders[0], options.folders[1], name)
        failed += bool(problem)
        print(f"{name:26} {problem or 'ok'}", flush=True)
    return 1 if failed else 0


def train(folder: Path, name: str, *more: str) -> str:
    """Train a configuration into a run directory; return what went wrong, or an empty string."""
    processes, flags = CASES[name]
    length = "" if "--train-samples" in flags else f"--train-iters {STEPS}"
    words = shlex.split(f"{COMMON} {length} {flags}")
    command = [sys.executable, "-m", "lmcore.cli.main", "train", *words]
    command += ["--nproc-per-node", str(processes), "--save", str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"exit status {done.returncode}: {done.stderr[-600:]}"


def resume(folder: Path, name: str) -> str:
    """Continue a recorded run from its first checkpoint; return how it differs at its end."""
    again = folder / f"{name}.resumed"
    source = folder / name / "checkpoints" / f"iter_{SAVED:07}"
    problem = train(again, name, "--load", str(source))
    if problem:
        return problem
    expected = [row for row in rows(folder / name) if row["step"] > SAVED]
    if rows(again) != expected:
        return f"losses differ: {first_difference(expected, rows(again))}"
    return checkpoint_difference(digest(folder / name, STEPS), digest(again, STEPS))


def compare(before: Path, after: Path, name: str) -> str:
    """Return how two recorded runs differ; an empty string if they do not."""
    ours, theirs = rows(before / name), rows(after / name)
    if ours != theirs:
        return f"losses differ: {first_difference(ours, theirs)}"
    for step in (SAVED, STEPS):
        problem = checkpoint_difference(digest(before / name, step), digest(after / name, step))
        if problem:
            return f"checkpoint {step}: {problem}"
    return ""


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return what is compared of each step, floats as exact text."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = []
    for line in lines:
        row = json.loads(line)
        values = {key: row[key] for key in COMPARED if row.get(key) is not None}
        assert all(math.isfinite(value) for value in values.values()), row
        found.append({key: repr(value) for key, value in values.items()} | {"step": row["step"]})
    return found


def digest(folder: Path, step: int) -> dict[str, Any]:
    """Return hashes of a checkpoint's tensors, and the entries of its manifest."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    path = folder / "checkpoints" / f"iter_{step:07}"
    reader = FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    del manifest["meta"]["config"]  # has the paths of --load and --save
    return {
        "tensors": {
            name: hashlib.sha256(bytes(tensor.view(-1).view(torch.uint8).numpy())).hexdigest()
            for name, tensor in sorted(tensors.items())
        },
        "manifest": {key: value for key, value in manifest.items() if key not in VARYING},
    }


def checkpoint_difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Return how two checkpoints differ; an empty string if they do not.

    Entries of the manifest's `meta` that only one of the versions writes are not compared.
    """
    known = one["manifest"]["meta"].keys() & other["manifest"]["meta"].keys()
    for checkpoint in (one, other):
        meta = checkpoint["manifest"]["meta"]
        checkpoint["manifest"]["meta"] = {key: meta[key] for key in known}
    for part in ("tensors", "manifest"):
        if one[part] != other[part]:
            keys = sorted(one[part].keys() | other[part].keys())
            names = [key for key in keys if one[part].get(key) != other[part].get(key)]
            return f"{len(names)} {part} entries differ: {', '.join(names[:5])}"
    return ""


def first_difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    """Return the first step that differs, as it is in both."""
    if len(one) != len(other):
        return f"{len(one)} and {len(other)} steps"
    return next(f"{a} and {b}" for a, b in zip(one, other, strict=True) if a != b)


if __name__ == "__main__":
    sys.exit(main())
