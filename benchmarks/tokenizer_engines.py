r"""Tokenizer libraries on GPT-2's vocabulary: are the ids exact, and how many MB/s of unique text.

    python benchmarks/tokenizer_engines.py --vocab-file vocab.json --merge-file merges.txt \
        --corpus 'corpora/**/*.jsonl.gz'

The oracle is the definition, written down in `python_bpe` and `split_words` of `gpt2.py`.
A library that is not installed is left out and named.  Speed is measured in fresh processes that
take turns: a cache of words filled by an earlier pass would flatter.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import importlib.metadata
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, parse
from unique_text import unique_documents

Encode = Callable[[list[str]], list[list[int]]]

ENGINES = ("lmcore", "gigatoken", "tokie", "tokenizers", "tiktoken")
WORDPIECE = "tokenizers, WordPiece"
"""The library's WordPiece, for `data.py`: its vocabulary is BERT's."""
_PATTERN = r"'(?:[sdmt]|ll|re|ve)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_END = "<|endoftext|>"


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's files."""
    from lmcore.data.tokenizer.bpe_files import byte_alphabet as alphabet

    return {character: byte for byte, character in enumerate(alphabet())}


def library_file(vocab_file: str, merge_file: str, folder: Path, *, special: bool) -> Path:
    """Write the `tokenizer.json` of the two files; *special* declares the end of a document."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE.from_file(vocab_file, merge_file))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if special:
        tokenizer.add_special_tokens([AddedToken(_END, normalized=False)])
    path = folder / ("special.json" if special else "ordinary.json")
    tokenizer.save(str(path))
    return path


def engine(name: str, vocab_file: str, merge_file: str, folder: Path) -> tuple[Encode, Any]:
    """Return the function from texts to ids, and the call that speed is measured with."""
    if name == "lmcore":
        from lmcore.data.tokenizer import GPT2BPETokenizer

        ours = GPT2BPETokenizer(vocab_file, merge_file, engine="native")
        return (lambda texts: [ids.tolist() for ids in ours.encode_batch(texts)]), (
            lambda texts: ours.encode_flat(texts, threads=2)
        )
    if name == "tiktoken":
        import tiktoken

        byte_of = byte_alphabet()
        vocabulary = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
        ranks = {
            bytes([byte_of[c] for c in token]): i
            for token, i in vocabulary.items()
            if token != _END
        }
        coder = tiktoken.Encoding(
            "gpt2", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={_END: 50256}
        )
        return (lambda texts: coder.encode_ordinary_batch(texts, num_threads=2)), (
            lambda texts: coder.encode_ordinary_batch(texts, num_threads=2)
        )
    if name == WORDPIECE:
        from tokenizers import BertWordPieceTokenizer

        bert = BertWordPieceTokenizer(vocab_file, lowercase=True)
        return (lambda texts: [e.ids for e in bert.encode_batch(texts)]), bert.encode_batch
    path = library_file(vocab_file, merge_file, folder, special=False)
    if name == "tokenizers":
        from tokenizers import Tokenizer

        library = Tokenizer.from_file(str(path))
        return (lambda texts: [e.ids for e in library.encode_batch_fast(texts)]), (
            library.encode_batch_fast
        )
    if name == "tokie":
        import tokie

        quick = tokie.Tokenizer.from_json(str(path))
        return (
            lambda texts: [e.ids for e in quick.encode_batch(texts, add_special_tokens=False)]
        ), quick.encode_batch_flat
    import gigatoken

    giga = gigatoken.Tokenizer(str(path))
    return giga.encode_batch_list, giga.encode_batch


def cases(corpus: str) -> Iterator[tuple[str, list[str]]]:
    """Yield a name and texts that a tokenizer may get wrong."""
    scalars = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    yield "every character alone", scalars
    yield "every character between words", [f"a{c}b {c}1 {c} {c}{c}'s" for c in scalars]
    blanks = [chr(i) for i in (*range(0x9, 0xE), *range(0x1C, 0x21), 0x85, 0xA0, 0x1680)]
    blanks += [chr(i) for i in (*range(0x2000, 0x2010), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)]
    dice = random.Random(1234)
    yield (
        "white space",
        [
            "".join(
                dice.choice([*blanks, " ", "  ", "\n", "\r\n", "a", "1", "."]) for _ in range(n)
            )
            for n in range(1, 60)
            for _ in range(60)
        ],
    )
    yield (
        "random characters",
        ["".join(dice.choices(scalars, k=dice.randrange(1, 80))) for _ in range(20_000)],
    )
    pieces = [
        "'s",
        "'S",
        "'ll",
        "'re",
        "'",
        "''",
        " '",
        "\u2019s",
        _END,
        "<|",
        "|>",
        "\0",
        "\x7f",
        "�",
    ]
    pieces += [
        "é",
        "e\u0301",
        "ß",
        "日本",
        "한국",
        "٣",
        "Ⅷ",
        "½",
        "🙂",
        "👩‍👩‍👧",
        "\u200b",
        "\ufeff",
        "a",
        "B",
    ]
    pieces += [
        " ",
        "  ",
        "\n",
        "\t",
        "0",
        "12",
        ",",
        "...",
        "!?",
        "Hello",
        " world",
        "\U0001d4b3",
        "\u0345",
    ]
    yield (
        "mixed pieces, special tokens, controls",
        ["".join(dice.choices(pieces, k=dice.randrange(1, 40))) for _ in range(20_000)],
    )
    yield (
        "long words",
        ["a" * 5000, "ab" * 3000, "é" * 3000, " " * 5000, "=" * 5000, "\n" * 3000, "1" * 4000]
        + ["".join(dice.choices("abcdefgh", k=3000)) for _ in range(3)],
    )
    yield "corpora", list(corpus_texts(corpus))


def corpus_texts(pattern: str) -> Iterator[str]:
    """Yield the longest text of each line of JSON."""
    for name in sorted(glob.glob(pattern, recursive=True)):  # noqa: PTH207  # absolute ones, too
        opener = gzip.open if name.endswith(".gz") else open
        with opener(name, "rb") as file:
            for line in file:
                record = json.loads(line)
                yield max((v for v in record.values() if isinstance(v, str)), key=len)


def exactness(names: list[str], arguments: argparse.Namespace, folder: Path) -> None:
    """Print for each engine how many texts of each case have other ids than the oracle's."""
    from lmcore.data.tokenizer import GPT2BPETokenizer

    oracle = GPT2BPETokenizer(arguments.vocab_file, arguments.merge_file, engine="python")
    engines = {
        name: engine(name, arguments.vocab_file, arguments.merge_file, folder)[0] for name in names
    }
    for case, every in cases(arguments.corpus):
        texts = every[:: arguments.every]
        want = [oracle.encode(text) for text in texts]
        for name, encode in engines.items():
            try:
                got = encode(texts)
            except BaseException as error:  # noqa: BLE001  # a panic of Rust is no Exception
                print(f"{case:<40}{name:<12}raised {type(error).__name__}: {error}"[:160])
                continue
            wrong = [i for i, (a, b) in enumerate(zip(want, got, strict=True)) if list(b) != a]
            first = f", first {texts[wrong[0]][:40]!a}" if wrong else ""
            print(
                f"{case:<40}{name:<12}{len(wrong):>9,} of {len(texts):,} differ{first}", flush=True
            )
    for name, encode in engines.items():
        for text in ("\ud800", "a\udfff b"):
            try:
                told = f"{encode([text])}"
            except BaseException as error:  # noqa: BLE001  # the same
                told = f"raises {type(error).__name__}"
            print(f"{f'lone surrogate {text!a}':<40}{name:<12}{told}")


def speed(names: list[str], arguments: argparse.Namespace) -> None:
    """Print MB/s of unique text in memory, each time in a fresh process."""
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.turns):
        for name in names:
            command = [sys.executable, __file__, "--one", name]
            for flag in ("vocab_file", "merge_file", "corpus", "megabytes", "texts"):
                if getattr(arguments, flag) is not None:
                    command += [f"--{flag.replace('_', '-')}", str(getattr(arguments, flag))]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rates[name].append(float(done.stdout.split()[-1]))
    best = max(statistics.median(values) for values in rates.values())
    for name, values in rates.items():
        middle = statistics.median(values)
        print(f"{name:<12}{middle:>9.1f} MB/s{middle / best:>8.2f} of the fastest")


def texts_of(arguments: argparse.Namespace) -> list[str]:
    """Return the texts of a file of JSON lines, or unique ones made of the corpus."""
    if arguments.texts:
        with Path(arguments.texts).open("rb") as lines:
            return [json.loads(line)["text"] for line in lines]
    return unique_documents(list(corpus_texts(arguments.corpus)), arguments.megabytes * 10**6)


def one(name: str, arguments: argparse.Namespace) -> None:
    """Print one engine's MB/s, the first pass of this process."""
    texts = texts_of(arguments)
    size = sum(len(text.encode()) for text in texts)
    with tempfile.TemporaryDirectory() as folder:
        _, measured = engine(name, arguments.vocab_file, arguments.merge_file, Path(folder))
        began = time.perf_counter()
        kept = measured(texts)
        seconds = time.perf_counter() - began
        del kept
    print(size / seconds / 1e6)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--merge-file", required=True)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES))
    parser.add_argument("--only", choices=("exactness", "speed"))
    parser.add_argument("--texts", help="JSON lines to measure with")
    parser.add_argument("--every", type=int, default=1, help="compare one text in so many")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parse(parser, megabytes=1, turns=1, every=2000)
    if arguments.one:
        one(arguments.one, arguments)
        return
    check(arguments)
    names = []
    for name in arguments.engines:
        try:
            print(f"{name} {importlib.metadata.version(name)}")
            names.append(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: left out, not installed")
            if name == "lmcore":
                names.append(name)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only != "speed":
            exactness(names, arguments, Path(folder))
    if arguments.only != "exactness":
        speed(names, arguments)


if __name__ == "__main__":
    main()
