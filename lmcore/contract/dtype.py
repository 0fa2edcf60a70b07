"""Names of dtypes: torch's, such as "bfloat16", and others that users write.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, suggestion

if TYPE_CHECKING:
    import torch

__all__ = ["dtype_name", "parse_dtype"]

_DTYPES = {
    "float64": ("fp64", "double"),
    "float32": ("fp32", "float"),
    "bfloat16": ("bf16",),
    "float16": ("fp16", "half"),
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(text: str, further: Iterable[str] = ()) -> str:
    """Return torch's name of a dtype: "bfloat16" for "bf16" or "torch.bfloat16".

    Args:
        text: value on the command line.
        further: Names that are known beside the four of every op's tolerances.

    Raises:
        ConfigError: The text names no known dtype.
    """
    plain = text.strip().lower().removeprefix("torch.")
    for name, spellings in _DTYPES.items():
        if plain == name or plain in spellings:
            return name
    known = dict.fromkeys([*_DTYPES, *further])
    if plain in known:
        return plain
    shorter = [other for spellings in _DTYPES.values() for other in spellings]
    raise ConfigError(
        f"`--dtype {text}`: unknown dtype", hint=suggestion(plain, [*known, *shorter])
    )
