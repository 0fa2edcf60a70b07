"""Refusals of data without sentences, which the samples of BERT, T5 and ICT are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, DataError, counted

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.blend.sources import OpenSource

__all__ = ["WORD_PIECES", "refuse_named_texts", "require_sentences"]

WORD_PIECES = (
    "`lmcore data prepare --split-sentences --tokenizer-type BertWordPieceLowerCase "
    "--vocab-file FILE`"
)
"""Command that prepares data with the special tokens of BERT."""


def refuse_named_texts(
    plan: RunPlan, family: str, *, prepare: str = WORD_PIECES, why: str = ""
) -> None:
    """Refuse a run whose data is a text that lmcore has by name.

    Args:
        plan: The run.
        family: Name of the model's family.
        prepare: Command that prepares data.
        why: Further reason, to follow a comma.

    Raises:
        ConfigError: A source is such a text.
    """
    for blend in plan.sources.blends():
        for source in blend.sources:
            if source.corpus:
                raise ConfigError(
                    f"{family} cannot be trained on the text `{source.name}`",
                    why="its samples are made of sentences, into which a named text is not split"
                    + (f", {why}" if why else ""),
                    hint=f"prepare a text by {prepare}, and give it by `--data-path`",
                )


def require_sentences(source: OpenSource, family: str, *, why: str = "", hint: str = "") -> None:
    """Refuse a dataset whose documents are one sequence each.

    Args:
        source: Source of samples.
        family: Name of the model's family.
        why: Consequence, to follow a comma.
        hint: Other remedy, to follow the first one.

    Raises:
        DataError: No document has several sequences.
    """
    indexed = source.indexed
    if len(indexed) != indexed.document_count:
        return
    raise DataError(
        f"`{source.name}` is not split into sentences, of which {family}'s samples are made",
        why=f"each of its {counted(indexed.document_count, 'document')} is stored as one sequence"
        + (f", {why}" if why else ""),
        hint=f"prepare it again with `--split-sentences`{hint}",
    )
