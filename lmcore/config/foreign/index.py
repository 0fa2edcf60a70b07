"""Flags of Megatron's `create_doc_index.py`, for `lmcore index build`.

The script gives the flags of the training run too.  Flags of the encoder's shape are compared with
the checkpoint, which defines the model; flags of training change nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from lmcore.config.foreign.generate import GivenModel, run_flags, without_effect
from lmcore.config.options.command_line import ForeignFlag, Translation

__all__ = ["index_flags"]

_SIZES = "`--micro-batch-size` is the number of blocks that are computed together"
_VECTORS = "the checkpoint defines the vectors"


def index_flags(own: Collection[str], model: GivenModel) -> dict[str, ForeignFlag]:
    """Return the foreign flags of `lmcore index build` by name.

    Args:
        own: Flags of the command itself, which are not foreign.
        model: Place for the flags of the model's shape, which parsing fills.
    """
    flags = run_flags(model) | {
        "--block-data-path": _renamed("--output"),
        "--indexer-batch-size": _renamed("--micro-batch-size"),
        "--indexer-log-interval": without_effect("1", "a line is logged for each shard"),
    }
    for name in ("--batch-size", "--global-batch-size"):
        flags[name] = without_effect("1", _SIZES)
    for name in ("--ict-head-size", "--biencoder-projection-dim"):
        flags[name] = without_effect("1", _VECTORS)
    return {name: flag for name, flag in flags.items() if name not in own}


def _renamed(flag: str) -> ForeignFlag:
    """Return a flag that is another name of this one, with one value."""
    return ForeignFlag("1", lambda values: Translation(flags=(flag, *values)), replacement=flag)
