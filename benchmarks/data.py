r"""`lmcore data prepare` beside Megatron's preparing scripts and the libraries' raw speed.

    python benchmarks/data.py --vocab-file vocab.json --merge-file merges.txt \
        --corpus 'corpora/**/*.jsonl.gz' --peer-python peers/bin/python --bert-vocab-file vocab.txt

With `--bert-vocab-file` BERT's WordPiece is measured beside BPE, each with one worker, and on the
small input, with and without `--split-sentences`, beside the batch encoding of `tokenizers`.

Every contender is a separate process, started cold, on the same unique text (`unique_text.py`);
they take turns, and the output of all must be the same bytes.  Wall seconds say what a user waits
on this machine as it is; processor seconds say the same of a machine that nobody else uses, and
are what ratios should be read by where several people share one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, parse
from tokenizer_engines import WORDPIECE, corpus_texts
from unique_text import unique_documents

HERE = Path(__file__).parent
LIBRARIES = {
    "gigatoken": ("gigatoken", "tokenizers"),
    "tokie": ("tokie", "tokenizers"),
    "tokenizers": ("tokenizers",),
    "tiktoken": ("tiktoken", "lmcore"),
}
"""Libraries that encode in memory, and the packages that this takes."""
GPT2_IN_MEMORY = tuple(f"{name}, in memory" for name in LIBRARIES)
PEERS = {
    "Megatron fast path": ("megatron", "transformers", "gigatoken"),
    "Megatron default, small": ("megatron", "transformers"),
}
_MISSING = """
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
"""


@dataclass
class Row:
    """Times of one contender: megabytes, and for each turn the seconds."""

    megabytes: float
    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)

    def rate(self, seconds: list[float]) -> float:
        """Return the median MB/s."""
        return self.megabytes / statistics.median(seconds) if seconds else float("nan")


def write_text(path: Path, corpus: str, megabytes: int) -> float:
    """Write unique documents as JSON lines; return their 10**6 bytes."""
    documents = unique_documents(list(corpus_texts(corpus)), megabytes * 10**6)
    with path.open("w", encoding="utf-8") as file:
        for text in documents:
            file.write(json.dumps({"text": text}) + "\n")
    return path.stat().st_size / 1e6


def is_here(name: str, python: str, packages: tuple[str, ...]) -> bool:
    """Return whether a contender can run in a Python, and name it if it is left out."""
    command = [python, "-c", _MISSING, *packages]
    missing = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    if missing:
        print(f"{name}: left out, {python} has no {', '.join(missing)}", file=sys.stderr)
    return not missing


def timed(row: Row, command: list[str], **environment: str) -> str:
    """Run a process to its end, add its seconds and memory; return what it printed."""
    # Byte code is kept, as an installed package has it: the first turn alone compiles.
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    printed, _ = process.communicate()
    row.wall.append(time.perf_counter() - began)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: status {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    row.processor.append(after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime)
    return printed


def prepare_with_lmcore(row: Row, source: Path, prefix: Path, tokenizer: list[str]) -> None:
    """Run `lmcore data prepare` with the flags of a tokenizer."""
    flags = ["--input", str(source), "--output-prefix", str(prefix), "--append-eod", "--json"]
    flags.append("--overwrite")
    command = [sys.executable, "-m", "lmcore.cli.main", "data", "prepare"]
    report = json.loads(timed(row, [*command, *flags, *tokenizer]))
    row.own.append(report["seconds"])


def prepare_with_peer(
    row: Row, python: str, which: str, source: Path, prefix: Path, files: list[str]
) -> None:
    """Run one of Megatron's ways."""
    command = [python, str(HERE / "data_peers.py"), which, str(source), str(prefix), *files, "2"]
    row.own.append(float(timed(row, command).split()[-1]))


def raw_speed(row: Row, library: str, python: str, source: Path, files: list[str]) -> None:
    """Let a library encode the texts in memory, in a fresh process."""
    command = [python, str(HERE / "tokenizer_engines.py"), "--one", library, "--corpus", ""]
    command += ["--texts", str(source), "--vocab-file", files[0], "--merge-file", files[1]]
    row.own.append(row.megabytes / float(timed(row, command).split()[-1]))


def digest(prefix: Path) -> str:
    """Return a hash of both files of a dataset."""
    whole = hashlib.sha256()
    for ending in (".bin", ".idx"):
        whole.update(Path(f"{prefix}{ending}").read_bytes())
    return whole.hexdigest()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--merge-file", required=True)
    parser.add_argument("--bert-vocab-file", help="vocab.txt of an uncased BERT")
    parser.add_argument("--punkt-model", help="Punkt's tables; without it sentencex splits")
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--library-python", default=sys.executable)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--slow-megabytes", type=int, default=8, help="for Megatron's default way")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parse(parser, megabytes=1, slow_megabytes=1, turns=1)
    check(arguments)
    files = [str(Path(arguments.vocab_file).resolve()), str(Path(arguments.merge_file).resolve())]
    with tempfile.TemporaryDirectory() as folder:
        compare(arguments, files, Path(folder))


def compare(arguments: argparse.Namespace, files: list[str], folder: Path) -> None:
    """Take turns, and print what came out."""
    large, small = folder / "large.jsonl", folder / "small.jsonl"
    size = write_text(large, arguments.corpus, arguments.megabytes)
    small_size = write_text(small, arguments.corpus, arguments.slow_megabytes)
    bpe = ["--tokenizer-type", "GPT2BPETokenizer"]
    bpe += ["--vocab-file", files[0], "--merge-file", files[1]]
    contenders = {
        "lmcore data prepare": (large, bpe),
        "lmcore, the small input": (small, bpe),
    }
    if arguments.bert_vocab_file:
        contenders |= wordpiece_contenders(arguments, bpe, large, small)
    sizes = {large: size, small: small_size}
    rows = {name: Row(sizes[source]) for name, (source, _) in contenders.items()}
    peer = arguments.peer_python
    megabytes = {"Megatron fast path": size, "Megatron default, small": small_size}
    rows |= {n: Row(megabytes[n]) for n, needs in PEERS.items() if is_here(n, peer, needs)}
    python = arguments.library_python
    libraries = [name for name, needs in LIBRARIES.items() if is_here(name, python, needs)]
    rows |= {f"{name}, in memory": Row(arguments.megabytes) for name in libraries}
    if arguments.bert_vocab_file and is_here(WORDPIECE, python, ("tokenizers",)):
        rows[f"{WORDPIECE}, in memory"] = Row(arguments.slow_megabytes)
    for turn in range(arguments.turns):
        for name, (source, tokenizer) in contenders.items():
            ours = tokenizer == bpe  # compared with Megatron's
            prefix = folder / (f"ours{source.stem}" if ours else name)
            prepare_with_lmcore(rows[name], source, prefix, tokenizer)
        if fast := rows.get("Megatron fast path"):
            prepare_with_peer(fast, peer, "fast", large, folder / "fast", files)
        if turn < 3 and (slow := rows.get("Megatron default, small")):
            prepare_with_peer(slow, peer, "default", small, folder / "default", files)
        for library in libraries[:2] if turn else libraries:
            raw_speed(rows[f"{library}, in memory"], library, python, large, files)
        if bert := rows.get(f"{WORDPIECE}, in memory"):
            vocabulary = str(Path(arguments.bert_vocab_file).resolve())
            raw_speed(bert, WORDPIECE, python, small, [vocabulary, files[1]])
    compare_bytes(rows, folder)
    show(rows)


def compare_bytes(rows: dict[str, Row], folder: Path) -> None:
    """Stop if lmcore and Megatron wrote different datasets."""
    for name, ours, theirs in (
        ("Megatron fast path", "ourslarge", "fast"),
        ("Megatron default, small", "ourssmall", "default"),
    ):
        same = name not in rows or digest(folder / f"{ours}_text_document") == digest(
            folder / theirs
        )
        if not same:
            raise SystemExit(f"lmcore and {name} wrote different bytes")


def wordpiece_contenders(
    arguments: argparse.Namespace, bpe: list[str], large: Path, small: Path
) -> dict[str, tuple[Path, list[str]]]:
    """Return the input and the flags of WordPiece beside BPE, and beside the library."""
    bert = ["--tokenizer-type", "BertWordPieceLowerCase"]
    bert += ["--vocab-file", str(Path(arguments.bert_vocab_file).resolve())]
    splitter, sentences = "sentencex", ["--split-sentences", "--sentence-splitter", "sentencex"]
    if arguments.punkt_model:
        tables = str(Path(arguments.punkt_model).resolve())
        splitter, sentences = "nltk", ["--split-sentences", "--punkt-model", tables]
    made = {
        "lmcore, BPE, one worker": (large, [*bpe, "--workers", "1"]),
        "lmcore, WordPiece, one worker": (large, [*bert, "--workers", "1"]),
        "lmcore, WordPiece": (small, bert),
    }
    if is_here("lmcore, WordPiece, sentences", sys.executable, (splitter,)):
        made["lmcore, WordPiece, sentences"] = (small, [*bert, *sentences])
    return made


def show(rows: dict[str, Row]) -> None:
    """Print MB/s (10**6 bytes) of the whole process, by its timer, and per processor second."""
    print(f"{'':<30}{'MB':>6}{'whole':>9}{'own timer':>11}{'per cpu s':>11}")
    for name, row in rows.items():
        raw = name.endswith("in memory")
        whole = "" if raw else f"{row.rate(row.wall):.1f}"
        per_cpu = "" if raw else f"{row.rate(row.processor):.1f}"
        own = f"{row.rate(row.own):.1f}"
        print(f"{name:<30}{row.megabytes:>6.0f}{whole:>9}{own:>11}{per_cpu:>11}")
    ours, small = rows["lmcore data prepare"], rows["lmcore, the small input"]
    ratios: dict[str, float] = {}
    if slow := rows.get("Megatron default, small"):
        ratios |= {
            "whole / Megatron default, same small input": _ratio(slow.wall, small.wall),
            "processor seconds / Megatron default, small": _ratio(slow.processor, small.processor),
            "own timer / Megatron default, small": _ratio(slow.own, small.own),
            "whole (large) / Megatron default (small)": _rates(ours, slow),
        }
    if fast := rows.get("Megatron fast path"):
        ratios |= {
            "whole / fast path": _ratio(fast.wall, ours.wall),
            "own timer / fast path": _ratio(fast.own, ours.own),
            "processor seconds / fast path": _ratio(fast.processor, ours.processor),
        }
    ratios |= wordpiece_ratios(rows)
    if raw := [row for name, row in rows.items() if name in GPT2_IN_MEMORY]:
        ratios["whole / fastest library in memory"] = _rates(ours, max(raw, key=_own), own=True)
    if ratios:
        print("\nratios, medians of the turns")
    for name, ratio in ratios.items():
        print(f"{name:<50}{ratio:.2f}")


def wordpiece_ratios(rows: dict[str, Row]) -> dict[str, float]:
    """Return what WordPiece costs beside BPE, and its speed beside the library's, if measured."""
    ratios: dict[str, float] = {}
    if wordpiece := rows.get("lmcore, WordPiece, one worker"):
        bpe = rows["lmcore, BPE, one worker"]
        ratios["processor seconds, WordPiece / BPE"] = _ratio(wordpiece.processor, bpe.processor)
    if library := rows.get(f"{WORDPIECE}, in memory"):
        for name in ("WordPiece", "WordPiece, sentences"):
            if row := rows.get(f"lmcore, {name}"):
                ratios[f"whole, {name} / tokenizers in memory"] = _ratio(library.own, row.wall)
    return ratios


def _own(row: Row) -> float:
    return row.rate(row.own)


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=False))


def _rates(ours: Row, theirs: Row, *, own: bool = False) -> float:
    seconds = theirs.own if own else theirs.wall
    pairs = zip(ours.wall, seconds, strict=False)
    return statistics.median((ours.megabytes / a) / (theirs.megabytes / b) for a, b in pairs)


if __name__ == "__main__":
    main()
