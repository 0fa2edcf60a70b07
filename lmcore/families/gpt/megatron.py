"""Names of GPT and Llama in Megatron's checkpoints.  Torch-free."""

from __future__ import annotations

from lmcore.model.megatron_names import MegatronNames
from lmcore.model.shape import ModelShape

__all__ = ["NAMES"]


def _differences(shape: ModelShape, style: str) -> list[str]:
    """Return what only BigScience's fork has, whose names are older ones."""
    if style == "legacy":
        return []
    found = {
        "ALiBi": shape.alibi,
        "normalized embeddings": shape.embed_layernorm,
        f"the activation {shape.glu_activation}": bool(shape.glu_activation),
    }
    return [what for what, there in found.items() if there]


NAMES = MegatronNames(
    core={
        "token_embedding": "embedding.word_embeddings",
        "position_embedding": "embedding.position_embeddings",
        "final_norm": "decoder.final_layernorm",
        "output_embedding": "output_layer",
    },
    legacy={
        "token_embedding": "language_model.embedding.word_embeddings",
        "embedding_norm": "language_model.embedding.word_embeddings.norm",
        "position_embedding": "language_model.embedding.position_embeddings",
        "final_norm": "language_model.encoder.final_norm",
        "output_embedding": "language_model.output_layer",
    },
    older={
        f"{stack}.{norm}": "final_norm"
        for stack in ("encoder", "decoder", "transformer")
        for norm in ("final_layernorm", "final_norm")
    },
    differences=_differences,
)
