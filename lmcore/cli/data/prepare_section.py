"""Options of `lmcore data prepare`."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import REQUIRED, option
from lmcore.config.section.accelerator import MAX_THREADS, plugin_off_option
from lmcore.config.section.input import InputSection
from lmcore.config.section.tokenizer import TYPES, TokenizerSection

__all__ = ["PrepareSection"]


@dataclass(frozen=True)
class PrepareSection(TokenizerSection, InputSection):
    """Tokenize documents into an indexed dataset."""

    input: tuple[str, ...] = option(
        REQUIRED,
        "Files, directories or quoted patterns, compressed or not; - reads standard input.",
        metavar="FILE",
    )
    output_prefix: str = option(
        REQUIRED, "First part of the names of the output files.", metavar="PREFIX"
    )
    tokenizer_type: str = option(REQUIRED, f"{TYPES}.", metavar="TYPE")
    vocab_size: int | None = option(None, "Vocabulary size of a NullTokenizer.", minimum=1)
    json_keys: tuple[str, ...] = option(
        ("text",), "JSON keys to tokenize; each becomes its own dataset.", metavar="KEY"
    )
    split_sentences: bool = option(
        False, "Store each sentence as a sequence, in PREFIX_KEY_sentence: for BERT, T5 and ICT."
    )
    presplit_sentences: bool = option(
        False, "As --split-sentences, for texts with one sentence per line."
    )
    sentence_splitter: str | None = option(
        None,
        "Sentence splitter: punkt as in Megatron, with NLTK's tables; sentencex by rules, without "
        "data; default: punkt.",
        choices=("punkt", "sentencex"),
    )
    lang: str | None = option(
        None, "Language of the sentences, english or en; default: english.", metavar="NAME"
    )
    keep_newlines: bool = option(
        False, "Keep the white space after a sentence, including line ends."
    )
    punkt_model: str | None = option(
        None, "Directory of Punkt's tables; default: NLTK's data.", metavar="DIR"
    )
    append_eod: bool = option(False, "End each document with the end-of-document token.")
    shuffle: int | None = option(
        None,
        "Store the documents in a random order, which the seed determines; default: the order of "
        "the input.",
        metavar="SEED",
        minimum=0,
    )
    dataset_impl: str = option("mmap", "Format of the dataset.", choices=("mmap", "cached", "lazy"))
    workers: int | None = option(
        None,
        "Number of threads, or of processes for tokenizers that hold Python's lock; default: one "
        "thread per processor, or one process.",
        minimum=1,
        maximum=MAX_THREADS,
    )
    on_error: str = option(
        "stop", "Stop at a bad document, or skip and count it.", choices=("stop", "skip")
    )
    overwrite: bool = option(False, "Replace existing datasets of the same names and tokenizer.")
    resume: bool = option(False, "Continue an interrupted run after its last complete shard.")
    shard_mib: int = option(
        1024, "MiB of input between two points that --resume can continue from.", minimum=1
    )
    partitions: int = option(1, "Number of hosts that share the input, by files.", minimum=1)
    partition: int | None = option(
        None, "Partition that this host prepares, from 0; see --partitions.", minimum=0
    )
    join_partitions: bool = option(
        False, "Join the partitions of all hosts after each was prepared."
    )
    log_interval: int | None = option(
        None,
        "Documents between progress lines, if there is no live display; default: a line every ten "
        "seconds.",
        minimum=1,
    )
    json: bool = option(False, "Print the summary as JSON.")
    plugin_off: tuple[str, ...] = plugin_off_option()
