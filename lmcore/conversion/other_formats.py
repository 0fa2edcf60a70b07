"""Formats that have a model which another format lacks, for hints of errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.model.architecture import architectures_for
from lmcore.model.checkpoint_format import formats
from lmcore.model.megatron_names import names_for

if TYPE_CHECKING:
    from lmcore.model.shape import ModelShape

__all__ = ["other_formats"]


def other_formats(shape: ModelShape) -> str:
    """Return the hint for a model that a format lacks: the formats of the core that have it.

    Args:
        shape: Shape of the model.
    """
    found, names = [], names_for(shape)
    styles = formats()["megatron"].styles
    fitting = [one for one in styles if names is not None and not names.differences(shape, one)]
    if fitting:
        style = "" if fitting[0] == styles[0] else f" --megatron-names {fitting[0]}"
        found.append(f"`--to megatron{style}`")
    if any(
        one.differences is not None and not one.differences(shape)
        for one in architectures_for(shape)
    ):
        found.append("`--to huggingface`")
    if found:
        return f"{' and '.join(found)} {'has' if len(found) == 1 else 'have'} this model"
    return (
        "lmcore's own format has every model: `--to lmcore` writes it, and `lmcore train --load`, "
        "`evaluate` and `generate` take it"
    )
