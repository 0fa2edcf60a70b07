"""Where the text comes from."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.option import option
from lmcore.config.section.tokenizer import TYPES, TokenizerSection

_WEIGHTED = "weight and prefix in turn, or prefixes alone, which then go by their sizes"
_RANGES = 'as "NAME: WEIGHT START:END PREFIX, ...", START and END being shares of its documents'


@dataclass(frozen=True)
class DataSection(TokenizerSection):
    """Indexed data sets, their weights, tokenizer and split."""

    data_path: tuple[str, ...] = option(
        (),
        "Prefixes of indexed data sets (without .bin/.idx), divided by split; several: "
        f"{_WEIGHTED}. Default: the bundled text.",
        metavar="PREFIX",
    )
    train_data_path: tuple[str, ...] = option(
        (), f"Data sets of training alone: {_WEIGHTED}.", metavar="PREFIX"
    )
    valid_data_path: tuple[str, ...] = option(
        (), "Data sets of validation alone, as train_data_path.", metavar="PREFIX"
    )
    test_data_path: tuple[str, ...] = option(
        (), "Data sets of the test alone, as train_data_path.", metavar="PREFIX"
    )
    train_weighted_split_paths: tuple[str, ...] = option(
        (), f"Ranges of data sets for training, {_RANGES}.", metavar="TEXT"
    )
    valid_weighted_split_paths: tuple[str, ...] = option(
        (), "Ranges of data sets for validation, as train_weighted_split_paths.", metavar="TEXT"
    )
    test_weighted_split_paths: tuple[str, ...] = option(
        (), "Ranges of data sets for the test, as train_weighted_split_paths.", metavar="TEXT"
    )
    data_file_list: str | None = option(
        None,
        "File with a line for each data set: weight, prefix and corpus; divided by split.",
        metavar="FILE",
    )
    corpus: str | None = option(
        None,
        "Text to train on by its name, as listed by `lmcore data corpora`; excludes data_path.",
        metavar="NAME",
    )
    train_data: tuple[str, ...] = option(
        (),
        "Texts to train on by their names, one after the other; without valid_data and test_data "
        "divided by split.",
        metavar="NAME",
    )
    valid_data: tuple[str, ...] = option((), "Texts to validate on by their names.", metavar="NAME")
    test_data: tuple[str, ...] = option((), "Texts to test on by their names.", metavar="NAME")
    lazy_loader: bool = option(
        False,
        "Keep texts that have a name as text as well, read document by document; later starts do "
        "without their source.",
    )
    split: str = option("969,30,1", "Shares of training, validation and test documents.")
    data_cache_path: str | None = option(
        None, "Directory of the sample index caches; default: beside the data.", metavar="DIR"
    )
    dataloader_type: str = option(
        "single",
        "Order of the samples: one pass over as many as the run needs, or passes over all of "
        "them (cyclic), each shuffled anew.",
        choices=("single", "cyclic"),
    )
    final_epoch_threshold: float = option(
        0.80,
        "The last epoch is shuffled apart from those before where less than this part of its "
        "samples is needed: 0.80 as Megatron, 0.95 as BigScience's fork of it.",
        minimum=0,
        maximum=1,
    )
    reset_position_ids: bool = option(
        False, "Count positions from the start of each document of a sample."
    )
    reset_attention_mask: bool = option(
        False, "Let tokens attend to their own document of a sample only."
    )
    eod_mask_loss: bool = option(
        False, "Leave what follows an end-of-document token out of the loss."
    )
    num_prefetch: int = option(4, "Micro-batches prepared ahead of the step.", minimum=1)
    vocab_size: int | None = option(
        None, "Vocabulary size before padding; default: the tokenizer's.", minimum=1
    )
    tokenizer_type: str | None = option(
        None,
        f"{TYPES}; default: GPT2BPETokenizer with its files, else what the data was prepared with.",
        metavar="TYPE",
    )
