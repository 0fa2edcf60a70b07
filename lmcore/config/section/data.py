"""Section `data`: data sources, their weights, the split and the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcore.config.corpus import is_corpus_name, named_path
from lmcore.config.need import Need
from lmcore.config.option import (
    CHECKED,
    CORPORA,
    FREE,
    INPUT_PATH,
    OUTPUT_PATH,
    PREFIXES,
    RANGES,
    SETS,
    option,
)
from lmcore.config.section.tokenizer import TYPES, TokenizerSection

SPLIT_RULES = ("megatron-core", "legacy")
"""Values of `--split-rule`, the default first; see `split_documents`."""

BLEND_RULES = ("megatron-core", "lmcore-2026.11")
"""Values of `--blend-rule`, the default first; see `BlendWeights`."""

OLDER_RULES = {"split_rule": "legacy", "blend_rule": "lmcore-2026.11"}
"""Rules of runs whose checkpoint records none, by option name: lmcore 2026.11 had no others."""

_WEIGHTED = "alternate weight and prefix, or prefixes alone, weighted by size"
_RANGES = 'as "NAME: WEIGHT START:END PREFIX, ...", START and END as fractions of the documents'

_VALIDATION = Need(
    "`--eval-interval` and `--eval-iters` above 0",
    lambda run: run.config.training.eval_interval > 0 and run.config.training.eval_iters > 0,
)
_TEST = Need("`--eval-iters` above 0", lambda run: run.config.training.eval_iters > 0)
_POSITIONS = Need(
    "positional encodings", lambda run: run.config.model.position_embedding_type != "none"
)


def text_names(words: Sequence[str]) -> tuple[str, ...]:
    """Return names and paths of texts among the values of `--valid-data`, not NAME=PREFIX."""
    return tuple(word for word in words if named_path(word) is None)


def _valid_names(words: Sequence[str]) -> tuple[str, ...]:
    """Return the values of `--valid-data` that are, or may have, a name of a corpus."""
    return tuple(
        word for word in words if (one := named_path(word)) is None or is_corpus_name(one[1])
    )


_PREFIXES = ("data_path", "data_file_list", "train_data_path", "train_weighted_split_paths")
_NAMED_TEXT = Need(
    "a named text, such as `--corpus`",
    lambda run: (
        not any(run.value(name) for name in _PREFIXES)
        or bool(_valid_names(run.config.data.valid_data) or run.config.data.test_data)
    ),
)
_DIVIDED = Need(
    "data that it divides",
    lambda run: (
        not (
            any(run.value(name) for name in ("train_data_path", "train_weighted_split_paths"))
            or text_names(run.config.data.valid_data)
            or run.config.data.test_data
        )
    ),
)


@dataclass(frozen=True)
class DataSection(TokenizerSection):
    """Data sources, their weights, the split and the tokenizer."""

    data_path: tuple[str, ...] = option(
        (),
        "Prefixes of indexed datasets (without .bin/.idx), divided by split; for several "
        f"{_WEIGHTED}. Default: the bundled text.",
        metavar="PREFIX",
        on_resume=CHECKED,
        paths=PREFIXES,
    )
    train_data_path: tuple[str, ...] = option(
        (),
        f"Datasets for training only: {_WEIGHTED}.",
        metavar="PREFIX",
        on_resume=CHECKED,
        paths=PREFIXES,
    )
    valid_data_path: tuple[str, ...] = option(
        (),
        "Datasets for validation only, like train_data_path.",
        metavar="PREFIX",
        needs=_VALIDATION,
        paths=PREFIXES,
    )
    test_data_path: tuple[str, ...] = option(
        (),
        "Datasets for the test only, like train_data_path.",
        metavar="PREFIX",
        needs=_TEST,
        paths=PREFIXES,
    )
    train_weighted_split_paths: tuple[str, ...] = option(
        (),
        f"Ranges of datasets for training, {_RANGES}.",
        metavar="TEXT",
        on_resume=CHECKED,
        paths=RANGES,
    )
    valid_weighted_split_paths: tuple[str, ...] = option(
        (),
        "Ranges of datasets for validation, like train_weighted_split_paths; of several names each "
        "is a validation set with a loss of its own.",
        metavar="TEXT",
        needs=_VALIDATION,
        paths=RANGES,
    )
    test_weighted_split_paths: tuple[str, ...] = option(
        (),
        "Ranges of datasets for the test, like train_weighted_split_paths.",
        metavar="TEXT",
        needs=_TEST,
        paths=RANGES,
    )
    data_file_list: str | None = option(
        None,
        "Data file list, a line for each dataset: weight, prefix and corpus; divided by split.",
        metavar="FILE",
        on_resume=CHECKED,
        paths=INPUT_PATH,
    )
    corpus: str | None = option(
        None,
        "Name of a text to train on, from `lmcore data corpora`; excludes data_path.",
        metavar="NAME",
        on_resume=CHECKED,
    )
    mock_data: bool = option(
        False,
        "Train on documents of random tokens, to try the speed without data; without "
        "--tokenizer-type, --vocab-size or --pad-vocab-size-to choose NullTokenizer.",
        on_resume=CHECKED,
    )
    train_data: tuple[str, ...] = option(
        (),
        "Texts to train on, weighted by size: names of corpora and of `lmcore data corpora`, "
        "files, directories as ./DIR, patterns; divided by split if neither valid_data nor "
        "test_data is given.",
        metavar="NAME",
        on_resume=CHECKED,
        paths=SETS,
    )
    valid_data: tuple[str, ...] = option(
        (),
        "Texts to validate on, like train_data; or validation sets beside the other validation "
        "data as NAME=PREFIX of an indexed dataset, NAME=FILE or NAME=CORPUS, each with a loss of "
        "its own.",
        metavar="NAME",
        needs=_VALIDATION,
        paths=SETS,
    )
    test_data: tuple[str, ...] = option(
        (), "Texts to test on, like train_data.", metavar="NAME", needs=_TEST, paths=SETS
    )
    corpora: tuple[str, ...] = option(
        (),
        "Names for the files of texts: corpora files, which end with .yaml, and NAME=PATH; "
        "default: corpora.yaml beside the file of settings, or in the working directory.",
        metavar="FILE",
        on_resume=FREE,
        needs=_NAMED_TEXT,
        paths=CORPORA,
    )
    lazy_loader: bool = option(
        False,
        "Train on what was prepared if the files of a text are gone, of which a copy is kept; "
        "a corpus needs none.",
        on_resume=FREE,
        needs=_NAMED_TEXT,
    )
    split: str = option(
        "969,30,1",
        "Fractions of the documents for training, validation and test, in any unit.",
        on_resume=CHECKED,
        needs=_DIVIDED,
    )
    split_rule: str = option(
        SPLIT_RULES[0],
        "Rounding of split to documents: at each bound, as in megatron-core, or of each fraction, "
        "as in Megatron's legacy code. A resumed run keeps the checkpoint's.",
        choices=SPLIT_RULES,
        on_resume=CHECKED,
    )
    blend_rule: str = option(
        BLEND_RULES[0],
        "Order of weighted data sets: megatron-core's, or that of lmcore 2026.11, to repeat its "
        "runs. A resumed run keeps the checkpoint's.",
        choices=BLEND_RULES,
        on_resume=CHECKED,
    )
    data_cache_path: str | None = option(
        None,
        "Directory of prepared texts and of sample index caches; default: the run directory, and "
        "next to the data.",
        metavar="DIR",
        on_resume=FREE,
        paths=OUTPUT_PATH,
    )
    verify_data: bool = option(
        False,
        "Compare all of the datasets and their cached indices with their checksums at the start, "
        "not only the .idx files and a few blocks of the other files.",
        on_resume=FREE,
    )
    dataloader_type: str = option(
        "single",
        "Order of the samples: one sequence of as many as the run needs (single), or epochs over "
        "all samples, each shuffled differently (cyclic).",
        choices=("single", "cyclic"),
        on_resume=CHECKED,
    )
    final_epoch_threshold: float = option(
        0.80,
        "Shuffle the last epoch separately if less than this fraction of its samples is needed; "
        "0.80 in Megatron, 0.95 in BigScience's fork.",
        minimum=0,
        maximum=1,
        on_resume=CHECKED,
    )
    reset_position_ids: bool = option(
        False, "Restart position ids at each document within a sample.", needs=_POSITIONS
    )
    reset_attention_mask: bool = option(
        False, "Mask attention at document boundaries within a sample."
    )
    eod_mask_loss: bool = option(
        False, "Mask the loss of the tokens that follow an end-of-document token."
    )
    num_prefetch: int = option(4, "Number of micro-batches to prefetch.", minimum=1, on_resume=FREE)
    vocab_size: int | None = option(
        None, "Vocabulary size before padding, in tokens; default: the tokenizer's.", minimum=1
    )
    tokenizer_type: str | None = option(
        None,
        f"{TYPES}; default: GPT2BPETokenizer if its files are given, else the tokenizer that the "
        "data was prepared with.",
        metavar="TYPE",
        on_resume=CHECKED,
    )
