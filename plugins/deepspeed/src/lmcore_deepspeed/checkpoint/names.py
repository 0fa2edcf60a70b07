"""Names of Megatron-DeepSpeed's parameters, as names of Megatron's models before megatron-core.

Without a pipeline they are the same.  A pipeline numbers everything that the model does, functions
too, so that a name begins with the number of a layer: in Microsoft's and Argonne's repositories 1
is the embedding and 2 the first block, in BigScience's 3; the final norm follows the last block.
An embedding that the output shares is `tied_modules.embed`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from lmcore.conversion.megatron.parameters.names import foreign_name

__all__ = [
    "EMBEDDING_LAYER",
    "deepspeed_name",
    "legacy_names",
    "numbered_layers",
    "pipeline_place",
    "tied_name",
    "universal_name",
    "universal_names",
]

EMBEDDING_LAYER = 1
"""Number of the embedding's layer."""
_FIRST_BLOCK = 2
"""Number of the first block if no function is between it and the embedding."""
_FUNCTIONS = (0, 1)
"""Number of functions of a pipeline between embedding and blocks, and again after the blocks."""
_NUMBERED = re.compile(r"^(\d+)\.(.+)$")
_TIED = "tied_modules.embed."
_BLOCK = ("attention.", "self_attention.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
_EMBEDDING = ("word_embeddings.", "position_embeddings.")
_NORM = ("weight", "bias")
_OLDER = {
    ".input_norm.": ".input_layernorm.",
    ".post_attention_norm.": ".post_attention_layernorm.",
    ".final_norm.": ".final_layernorm.",
}
"""Names of norms in Megatron-DeepSpeed, by their names in later versions of Megatron."""


def legacy_names(names: Iterable[str]) -> dict[str, str]:
    """Return Megatron's name of each parameter, with blocks numbered from 0.

    A name that no model has stays as it is.

    Args:
        names: Names in a module, with or without a pipeline.
    """
    known = list(names)
    numbered = {name: match for name in known if (match := _NUMBERED.match(name))}
    blocks = sorted({int(match[1]) for match in numbered.values() if match[2].startswith(_BLOCK)})
    index = {number: block for block, number in enumerate(blocks)}
    found = {}
    for name in known:
        match = numbered.get(name)
        number, inside = (int(match[1]), match[2]) if match else (None, name.removeprefix(_TIED))
        if number in index:
            found[name] = f"language_model.encoder.layers.{index[number]}.{inside}"
        elif (match or name.startswith(_TIED)) and inside.startswith(_EMBEDDING):
            found[name] = f"language_model.embedding.{inside}"
        elif match and inside == "lm_head.weight":
            found[name] = "language_model.output_layer.weight"
        elif match and inside in _NORM and (not blocks or int(match[1]) > blocks[-1]):
            found[name] = f"language_model.encoder.final_layernorm.{inside}"
        else:
            found[name] = name
    return found


def deepspeed_name(name: str) -> str:
    """Return the name of a parameter of lmcore in a module without a pipeline.

    Args:
        name: Name in lmcore.
    """
    found = foreign_name(name, "legacy")
    for newer, older in _OLDER.items():
        found = found.replace(newer, older)
    return found


def pipeline_place(name: str, num_layers: int, functions: int = 0) -> tuple[int, str]:
    """Return the number of the layer of a parameter of lmcore, and its name in the layer's file.

    Args:
        name: Name in lmcore.
        num_layers: Number of blocks.
        functions: Number of functions before the blocks, and again after them: 0 in Microsoft's
            and Argonne's repositories, 1 in BigScience's.
    """
    number, inside = _place(name, num_layers)
    return _shifted(number, num_layers, functions), inside


def _place(name: str, num_layers: int) -> tuple[int, str]:
    legacy = deepspeed_name(name).removeprefix("language_model.")
    owner, _, inside = legacy.partition(".")
    if owner == "embedding":
        return EMBEDDING_LAYER, inside
    if owner == "output_layer":
        return _FIRST_BLOCK + num_layers + 1, f"lm_head.{inside}"
    if inside.startswith("layers."):
        _, block, parameter = inside.split(".", 2)
        return _FIRST_BLOCK + int(block), parameter
    return _FIRST_BLOCK + num_layers, inside.rpartition(".")[2]


def tied_name(name: str) -> str:
    """Return the name that the optimizer of a pipeline has for a parameter of a tied embedding.

    Args:
        name: Number of the embedding's layer, and the name inside of it.
    """
    return f"{_TIED}{name.partition('.')[2]}"


def universal_name(
    name: str, num_layers: int, *, style: str, tied: bool, functions: int = 0
) -> str:
    """Return the name of a parameter of lmcore in a universal checkpoint.

    Args:
        name: Name in lmcore.
        num_layers: Number of blocks.
        style: Set of names, one of `directory.STYLES`.
        tied: True if the output has the token embedding's weights.
        functions: See `pipeline_place`.
    """
    if style == "legacy":
        return deepspeed_name(name)
    layer, inside = pipeline_place(name, num_layers, functions)
    return f"{_TIED}{inside}" if tied and layer == EMBEDDING_LAYER else f"{layer}.{inside}"


def numbered_layers(num_layers: int, *, tied: bool) -> list[dict[int, str]]:
    """Return the layers of a pipeline that have weights, in each way of numbering.

    Args:
        num_layers: Number of blocks.
        tied: True if the output has the token embedding's weights.

    Returns:
        Beginning of the names in lmcore of a layer's parameters, by the number of the layer.
    """
    owners = ["token_embedding", *["blocks"] * num_layers, "final_norm"]
    owners += [] if tied else ["output_embedding"]
    return [
        {
            _shifted(number, num_layers, functions): owner
            for number, owner in enumerate(owners, EMBEDDING_LAYER)
        }
        for functions in _FUNCTIONS
    ]


def universal_names(names: Iterable[str], num_layers: int, *, tied: bool) -> list[list[str]]:
    """Return the names of parameters in universal checkpoints of each kind.

    Args:
        names: Names in lmcore.
        num_layers: Number of blocks.
        tied: True if the output has the token embedding's weights.
    """
    known = list(names)
    found = [[universal_name(name, num_layers, style="legacy", tied=tied) for name in known]]
    for functions in _FUNCTIONS:
        named = functools.partial(
            universal_name,
            num_layers=num_layers,
            style="pipeline",
            tied=tied,
            functions=functions,
        )
        found.append([named(name) for name in known])
    return found


def _shifted(number: int, num_layers: int, functions: int) -> int:
    """Return the number of a layer of a pipeline with further functions before and after blocks."""
    passed = (number >= _FIRST_BLOCK) + (number >= _FIRST_BLOCK + num_layers)
    return number + functions * passed
