"""The text of a run: which tokenizer, which indexed data set, which samples.

Without `--data-path` a run trains on a text that has a name, by default the one that comes with
lmcore, so that every command has data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.data.corpora import BUNDLED, NamedText, bundled_text, find_text, prepare_named_text
from lmcore.data.gpt_dataset import GPTDataset
from lmcore.data.indexed import IndexedDataset
from lmcore.data.metadata import metadata_path, read_metadata
from lmcore.data.split import split_ranges
from lmcore.data.tokenizer import build_tokenizer
from lmcore.errors import ConfigError

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.config.section import DataSection
    from lmcore.data.metadata import DatasetMetadata
    from lmcore.data.split import Part
    from lmcore.data.tokenizer import Tokenizer, TokenizerFactory

__all__ = ["Corpus", "choose_text", "choose_tokenizer", "open_corpus"]


@dataclass(frozen=True)
class Corpus:
    """Samples of a run.

    Attributes:
        indexed: The data set.
        train: Training samples.
        valid: Validation samples, or None when the run does not validate.
        documents: First and end document of each part.
    """

    indexed: IndexedDataset
    train: GPTDataset
    valid: GPTDataset | None
    documents: Mapping[Part, tuple[int, int]]


def choose_text(settings: DataSection, texts: Mapping[str, NamedText]) -> NamedText | None:
    """Return the named text of a run; None where it trains on a data set.

    Args:
        settings: The `data` section.
        texts: Those that there are.

    Raises:
        ConfigError: There is none of this name, or a data set is named as well.
        DataError: Its file is missing.
    """
    if settings.corpus is not None and settings.data_path:
        raise ConfigError(
            f"`--corpus {settings.corpus}` and `--data-path {settings.data_path[0]}` exclude each "
            "other",
            hint="keep one of them",
        )
    if settings.data_path:
        return None
    return find_text(settings.corpus or BUNDLED, texts)


def choose_tokenizer(settings: DataSection, extra: Mapping[str, TokenizerFactory]) -> Tokenizer:
    """Return the tokenizer of a run.

    In order: the one that flags name; the one that the data set was prepared with; bytes, for a
    text that has a name.

    Args:
        settings: The `data` section.
        extra: Types that plugins brought.

    Raises:
        ConfigError: Nothing says which, or flags and data set disagree.
        DataError: The tokenizer's files cannot be used.
    """
    made_with = read_metadata(settings.data_path[0]) if settings.data_path else None
    if settings.tokenizer_type is not None:
        named = build_tokenizer(
            settings.tokenizer_type,
            vocab_file=settings.vocab_file,
            merge_file=settings.merge_file,
            vocab_size=settings.vocab_size,
            extra=extra,
        )
        if made_with is not None and made_with.fingerprint != named.fingerprint():
            kind = made_with.tokenizer["type"]
            maker = f"another `{kind}`" if kind == settings.tokenizer_type else f"`{kind}`"
            raise ConfigError(
                f"`{settings.data_path[0]}` was not prepared with this tokenizer",
                why=f"its ids are those of {maker}",
                hint="leave `--tokenizer-type` out, or prepare the data set again",
            )
        return named
    if made_with is not None:
        return _rebuild(made_with, settings.data_path[0], extra)
    if settings.data_path:
        raise ConfigError(
            f"nothing says which tokenizer `{settings.data_path[0]}` was prepared with",
            why="there is no metadata file beside it, as `lmcore data prepare` writes one",
            hint="add `--tokenizer-type`, with its `--vocab-file` and `--merge-file`",
        )
    return build_tokenizer("ByteTokenizer", vocab_file=None, merge_file=None, vocab_size=None)


def open_corpus(
    plan: RunPlan, tokenizer: Tokenizer, data_directory: Path, text: NamedText | None = None
) -> Corpus:
    """Open the data set and build (or find) the indices of its samples.

    Args:
        plan: The run.
        tokenizer: For a named text.
        data_directory: Where a named text is prepared, if the run uses one.
        text: The named text, as `choose_text` returned it; None: the bundled one, if the run
            names no data set.

    Raises:
        DataError: The data set is damaged, or a split that is needed is empty.
    """
    settings, training = plan.config.data, plan.config.training
    if settings.data_path:
        prefix = settings.data_path[0]
    else:
        prefix = prepare_named_text(text or bundled_text(), tokenizer, data_directory)
    indexed = IndexedDataset(prefix)
    validates = plan.valid_samples > 0
    needed: set[Part] = {"train", "valid"} if validates else {"train"}
    ranges = split_ranges(indexed.document_count, settings.split, needed=needed)
    sizes: dict[Part, int] = {"train": plan.train_samples, "valid": plan.valid_samples}
    datasets = {
        part: GPTDataset(
            indexed,
            document_range=ranges[part],
            num_samples=sizes[part],
            sequence_length=plan.config.model.seq_length,
            seed=training.seed,
            cache_dir=settings.data_cache_path,
            name=part,
        )
        for part in ("train", "valid")
        if part in needed
    }
    return Corpus(indexed, datasets["train"], datasets.get("valid"), ranges)


def _rebuild(
    made_with: DatasetMetadata, prefix: str, extra: Mapping[str, TokenizerFactory]
) -> Tokenizer:
    described = dict(made_with.tokenizer)
    vocab_size = described.get("vocab_size")
    tokenizer = build_tokenizer(
        str(described["type"]),
        vocab_file=_text_or_none(described.get("vocab_file")),
        merge_file=_text_or_none(described.get("merge_file")),
        vocab_size=None if vocab_size is None else int(vocab_size),
        extra=extra,
    )
    if tokenizer.fingerprint() != made_with.fingerprint:
        raise ConfigError(
            f"the tokenizer files that `{prefix}` was prepared with have changed",
            why=f"`{metadata_path(prefix)}` has another fingerprint",
            hint="give the right files with `--tokenizer-type --vocab-file --merge-file`",
        )
    return tokenizer


def _text_or_none(value: str | int | None) -> str | None:
    return None if value is None else str(value)
