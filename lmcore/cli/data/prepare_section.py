"""Options of `lmcore data prepare`."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import REQUIRED, option
from lmcore.config.section.accelerator import plugin_off_option
from lmcore.config.section.input import InputSection
from lmcore.config.section.tokenizer import TYPES, TokenizerSection

__all__ = ["PrepareSection"]


@dataclass(frozen=True)
class PrepareSection(TokenizerSection, InputSection):
    """Tokenize documents into an indexed data set."""

    input: tuple[str, ...] = option(
        REQUIRED,
        "Files, directories or quoted patterns, compressed or not; - reads standard input.",
        metavar="FILE",
    )
    output_prefix: str = option(
        REQUIRED, "First part of the names of the files written.", metavar="PREFIX"
    )
    tokenizer_type: str = option(REQUIRED, f"{TYPES}.", metavar="TYPE")
    vocab_size: int | None = option(
        None, "Numbers that a NullTokenizer's text may hold.", minimum=1
    )
    json_keys: tuple[str, ...] = option(
        ("text",), "Keys whose text is taken; each gives a data set.", metavar="KEY"
    )
    split_sentences: bool = option(
        False, "Store each sentence as a sequence, in PREFIX_KEY_sentence: for BERT, T5 and ICT."
    )
    presplit_sentences: bool = option(False, "The same, for texts with a sentence on each line.")
    sentence_splitter: str | None = option(
        None,
        "What finds the sentences: punkt as in Megatron, with NLTK's tables; sentencex by rules, "
        "without data; default: punkt.",
        choices=("punkt", "sentencex"),
    )
    lang: str | None = option(
        None, "Language of the sentences, english or en; default: english.", metavar="NAME"
    )
    keep_newlines: bool = option(
        False, "Leave the white space after a sentence at its end, line ends included."
    )
    punkt_model: str | None = option(
        None, "Directory of Punkt's tables; default: NLTK's data.", metavar="DIR"
    )
    append_eod: bool = option(False, "End each document with the end-of-document token.")
    dataset_impl: str = option(
        "mmap", "Format of the data set.", choices=("mmap", "cached", "lazy")
    )
    workers: int | None = option(
        None,
        "Threads that tokenize, or processes for tokenizers that hold Python's lock; default: a "
        "thread for each processor, or one process.",
        minimum=1,
    )
    on_error: str = option(
        "stop", "What a bad line does; skipped ones are counted.", choices=("stop", "skip")
    )
    resume: bool = option(
        False, "Continue after the last complete shard of a run that ended early."
    )
    shard_mib: int = option(
        1024, "MiB of input between two points that --resume can continue from.", minimum=1
    )
    partitions: int = option(1, "Hosts that share the input, each by files of its own.", minimum=1)
    partition: int | None = option(
        None, "Which share this host prepares, from 0; see --partitions.", minimum=0
    )
    join_partitions: bool = option(
        False, "Put the shares of all hosts together, when each is prepared."
    )
    log_interval: int = option(
        1000, "Documents between progress lines, where they are not shown live.", minimum=1
    )
    json: bool = option(False, "Print the summary as JSON.")
    plugin_off: tuple[str, ...] = plugin_off_option()
