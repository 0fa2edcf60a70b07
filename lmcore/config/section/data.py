"""Where the text comes from."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option


@dataclass(frozen=True)
class DataSection:
    """Indexed data set, tokenizer and split."""

    data_path: tuple[str, ...] = option(
        (),
        "Prefix of an indexed data set (without .bin/.idx); default: the bundled text.",
        metavar="PREFIX",
    )
    corpus: str | None = option(
        None,
        "Text to train on by its name, as listed by `lmcore data corpora`; excludes data_path.",
        metavar="NAME",
    )
    split: str = option("969,30,1", "Shares of training, validation and test documents.")
    tokenizer_type: str | None = option(
        None,
        "GPT2BPETokenizer, ByteTokenizer, NullTokenizer, or a plugin's; default: "
        "GPT2BPETokenizer with its files, else what the data was prepared with.",
        metavar="TYPE",
    )
    vocab_file: str | None = option(None, "vocab.json of the tokenizer.", metavar="FILE")
    merge_file: str | None = option(None, "merges.txt of the tokenizer.", metavar="FILE")
    vocab_size: int | None = option(
        None, "Vocabulary size before padding; default: the tokenizer's.", minimum=1
    )
    data_cache_path: str | None = option(
        None, "Directory of the sample index caches; default: beside the data.", metavar="DIR"
    )
    num_prefetch: int = option(4, "Micro-batches prepared ahead of the step.", minimum=1)
