"""Command that trains on documents as they were prepared, shown as the next one."""

from __future__ import annotations

from itertools import pairwise

from lmcore.base.errors import counted
from lmcore.config.derived.split import parse_split
from lmcore.config.section.data import DataSection

__all__ = ["training_command"]


def training_command(data: str, num_documents: int) -> str:
    """Return the command that trains on documents, and what it leaves out if they are few.

    Args:
        data: Option and value that name the documents, quoted for a shell.
        num_documents: Number of documents.
    """
    from lmcore.data.blend.train_split import more_documents, split_documents

    default = DataSection()
    bounds = split_documents(num_documents, parse_split(default.split), default.split_rule)
    train, valid = [end - start for start, end in pairwise(bounds)][:2]
    command = f"lmcore train {data}"
    if not train or valid:
        return command
    few = f"{counted(num_documents, 'document')} {'is' if num_documents == 1 else 'are'} too few"
    # Training and validation need some each.
    return (
        f"{command} --eval-iters 0\n"
        f"{few} for `--split {default.split}`, so it trains without validation; for validation "
        f"{more_documents(num_documents, 2)}"
    )
