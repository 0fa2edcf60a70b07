"""Writing of the `config.json` of Hugging Face, for an architecture that computes the same."""

from __future__ import annotations

from typing import Any

from lmcore.base.errors import CheckpointError
from lmcore.model.architecture import Architecture, architectures_for
from lmcore.model.family import family_of
from lmcore.model.shape import ModelShape

__all__ = ["architecture_of", "config_of", "model_type_of"]


def architecture_of(shape: ModelShape) -> Architecture:
    """Return the architecture of transformers that computes the same as a model of lmcore.

    Raises:
        CheckpointError: There is none.
    """
    different = {}
    for kind in architectures_for(shape):
        found = kind.differences(shape) if kind.differences is not None else []
        if not found:
            return kind
        different[kind.model_type] = (", ".join(found), kind.hint)
    what = "no supported architecture of transformers computes the same as this model"
    if not different:
        why = f"lmcore knows none for the family {family_of(shape).name}"
        raise CheckpointError(what, why=why)
    raise CheckpointError(
        what,
        why="\n".join(f"not `{name}`: it has {listed}" for name, (listed, _) in different.items()),
        hint=next(hint for _, hint in different.values()),
    )


def model_type_of(shape: ModelShape) -> str:
    """Return the `model_type` of `architecture_of`."""
    return architecture_of(shape).model_type


def config_of(shape: ModelShape, *, dtype: str, eos: int | None, bos: int | None) -> dict[str, Any]:
    """Return the `config.json` of a model.

    Args:
        shape: Shape of the model, with as many rows of the embedding as are written.
        dtype: Dtype of the weights.
        eos: Token that ends a text; None: the tokenizer has none.
        bos: Token that begins a text; None: the tokenizer has none.
    """
    kind = architecture_of(shape)
    common = {
        "architectures": [kind.class_name(shape)],
        "model_type": kind.model_type,
        "torch_dtype": dtype,
        "vocab_size": shape.padded_vocab_size,
        "initializer_range": shape.init_method_std,
        "tie_word_embeddings": shape.tied,
    }
    if kind.generates:
        common |= {"bos_token_id": bos, "eos_token_id": eos, "use_cache": True}
    return common | kind.write(shape)
