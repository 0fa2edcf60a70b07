"""Names of Megatron-DeepSpeed's parameters, as Megatron's own of the models before megatron-core.

Without a pipeline they are the same.  A pipeline numbers everything that the model does, functions
too, so that a name begins with the number of a layer: in Microsoft's and Argonne's repositories 1
is the embedding and 2 the first block, in BigScience's 3; the final norm follows the last block.
An embedding that is also the output's is `tied_modules.embed`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["PIPELINE_EMBEDDING", "legacy_names", "pipeline_name"]

PIPELINE_EMBEDDING = 1
"""Number of the embedding's layer."""
_FIRST_BLOCK = 2
"""Number of the first block if no function is between it and the embedding."""
_NUMBERED = re.compile(r"^(\d+)\.(.+)$")
_TIED = "tied_modules.embed."
_BLOCK = ("attention.", "self_attention.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
_EMBEDDING = ("word_embeddings.", "position_embeddings.")
_NORM = ("weight", "bias")


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


def pipeline_name(name: str, num_layers: int, *, tied: bool) -> tuple[int, str]:
    """Return the number of a parameter's layer in a pipeline, and its name in the layer.

    The numbers are Microsoft's and Argonne's.

    Args:
        name: Name in Megatron, of the models before megatron-core.
        num_layers: Number of blocks.
        tied: True if the output has the token embedding's weights.
    """
    name = name.removeprefix("language_model.")
    if name.startswith("embedding."):
        return PIPELINE_EMBEDDING, name.removeprefix("embedding.")
    if name.startswith("output_layer."):
        assert not tied, "a tied model has no output layer"
        return _FIRST_BLOCK + num_layers + 1, name.replace("output_layer.", "lm_head.")
    _, _, inside = name.partition("encoder.")
    if inside.startswith("layers."):
        _, block, parameter = inside.split(".", 2)
        return _FIRST_BLOCK + int(block), parameter
    return _FIRST_BLOCK + num_layers, inside.rpartition(".")[2]
