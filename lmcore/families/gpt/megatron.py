"""Names of GPT and Llama in Megatron's checkpoints.  Torch-free."""

from __future__ import annotations

from lmcore.model.megatron_names import MegatronNames

__all__ = ["NAMES"]

NAMES = MegatronNames(
    core={
        "token_embedding": "embedding.word_embeddings",
        "position_embedding": "embedding.position_embeddings",
        "final_norm": "decoder.final_layernorm",
        "output_embedding": "output_layer",
    },
    legacy={
        "token_embedding": "language_model.embedding.word_embeddings",
        "position_embedding": "language_model.embedding.position_embeddings",
        "final_norm": "language_model.encoder.final_norm",
        "output_embedding": "language_model.output_layer",
    },
    older={
        f"{stack}.{norm}": "final_norm"
        for stack in ("encoder", "decoder", "transformer")
        for norm in ("final_layernorm", "final_norm")
    },
)
