"""Names and arguments of BERT in Megatron's checkpoints.  Torch-free.

Megatron's BERT has its norms before the branches, and segments only beside the head for their
order.  Its GELU is the tanh approximation in the layers' fused kernel and exact in the head;
`--no-bias-gelu-fusion` makes the layers exact, `--openai-gelu` of the models before megatron-core
approximates both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcore.model.megatron_names import MegatronNames, Stack
from lmcore.model.shape import ModelShape

__all__ = ["NAMES", "gelu_of"]


def gelu_of(args: Mapping[str, Any]) -> str:
    """Return the value of `bert_gelu` of a run.

    Args:
        args: Arguments of the run.
    """
    legacy = not args.get("use_mcore_models") and args.get("use_legacy_models", True)
    if legacy and args.get("openai_gelu"):
        return "tanh-all"
    return "erf" if args.get("bias_gelu_fusion", True) is False else "tanh"


def _values(args: Mapping[str, Any], sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {
        "model_family": "bert",
        "bert_binary_head": "order_head.weight" in sizes,
        "bert_post_norm": False,
        "bert_gelu": gelu_of(args),
        "bert_token_types": sizes.get("type_embedding.weight", (0,))[0],
    }


def _arguments(shape: ModelShape) -> dict[str, Any]:
    own = shape.own
    return {
        "bert_binary_head": own["bert_binary_head"],
        "bias_gelu_fusion": own["bert_gelu"] == "tanh",
        "openai_gelu": own["bert_gelu"] == "tanh-all",
    }


def _flags(shape: ModelShape) -> list[str]:
    own = shape.own
    flags = {
        "--bert-no-binary-head": not own["bert_binary_head"],
        "--no-bias-gelu-fusion": own["bert_gelu"] != "tanh",
        "--openai-gelu": own["bert_gelu"] == "tanh-all",
    }
    return [flag for flag, needed in flags.items() if needed]


def _differences(shape: ModelShape, style: str) -> list[str]:
    own = shape.own
    types, usual = own["bert_token_types"], 2 if own["bert_binary_head"] else 0
    found = {
        "norms after its branches instead of before them (post-norm)": own["bert_post_norm"],
        "GELU by tanh in its head, which only `--megatron-names legacy` has": (
            own["bert_gelu"] == "tanh-all" and style != "legacy"
        ),
        f"{types} embeddings of segments instead of {usual} (`--bert-token-types {usual}`)": types
        != usual,
    }
    return [what for what, there in found.items() if there]


NAMES = MegatronNames(
    core={
        "token_embedding": "embedding.word_embeddings",
        "position_embedding": "embedding.position_embeddings",
        "type_embedding": "embedding.tokentype_embeddings",
        "final_norm": "encoder.final_layernorm",
        "masked_head.dense": "lm_head.dense",
        "masked_head.norm": "lm_head.layer_norm",
        "output_embedding": "output_layer",
        "masked_head.bias": "output_layer.bias",
        "order_head": "binary_head",
        "pooler": "pooler.dense",
    },
    legacy={
        "token_embedding": "language_model.embedding.word_embeddings",
        "position_embedding": "language_model.embedding.position_embeddings",
        "type_embedding": "language_model.embedding.tokentype_embeddings",
        "final_norm": "language_model.encoder.final_norm",
        "pooler": "language_model.pooler.dense",
        "output_embedding": "language_model.output_layer",
        "masked_head.bias": "lm_head.bias",
        "masked_head.dense": "lm_head.dense",
        "masked_head.norm": "lm_head.norm",
        "order_head": "binary_head",
    },
    older={"lm_head.layernorm": "masked_head.norm"},
    stacks={"blocks": Stack("encoder")},
    states=("output_layer",),
    matches=lambda names: any(name.endswith("lm_head.dense.weight") for name in names),
    values=_values,
    arguments=_arguments,
    flags=_flags,
    differences=_differences,
)
