"""Names and arguments of ICT in Megatron's checkpoints, of its biencoder.  Torch-free.

Megatron has it in the models before megatron-core alone: a BERT without heads for questions, one
for blocks, or one for both, and a projection after each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lmcore.families.bert.megatron import gelu_of
from lmcore.families.ict.family import towers
from lmcore.model.megatron_names import MegatronNames, Stack
from lmcore.model.shape import ModelShape

__all__ = ["NAMES"]

_TOWERS = {"query": "query_model", "block": "context_model", "shared": "shared_model"}
_MODULES = {
    "token_embedding": "language_model.embedding.word_embeddings",
    "position_embedding": "language_model.embedding.position_embeddings",
    "type_embedding": "language_model.embedding.tokentype_embeddings",
    "final_norm": "language_model.encoder.final_norm",
    "projection": "projection_enc",
}


def _matches(names: Collection[str]) -> bool:
    parts = tuple(f"{theirs}." for theirs in _TOWERS.values())
    return any(name.removeprefix("module.").startswith(parts) for name in names)


def _values(args: Mapping[str, Any], sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    shared = any(name.startswith("shared.") for name in sizes)
    tower = "shared" if shared else "query"
    return {
        "model_family": "ict",
        "bert_post_norm": False,
        "bert_gelu": gelu_of(args),
        "bert_token_types": sizes.get(f"{tower}.type_embedding.weight", (0,))[0],
        "biencoder_projection_dim": sizes.get(f"{tower}.projection.weight", (0,))[0],
        "biencoder_shared_query_context_model": shared,
        "retriever_score_scaling": bool(args.get("retriever_score_scaling")),
    }


def _arguments(shape: ModelShape) -> dict[str, Any]:
    own = shape.own
    names = (
        "biencoder_projection_dim",
        "biencoder_shared_query_context_model",
        "retriever_score_scaling",
    )
    return {name: own[name] for name in names} | {
        "bias_gelu_fusion": own["bert_gelu"] == "tanh",
        "openai_gelu": own["bert_gelu"] == "tanh-all",
    }


def _flags(shape: ModelShape) -> list[str]:
    own = shape.own
    flags = {
        f"--biencoder-projection-dim {own['biencoder_projection_dim']}": True,
        "--biencoder-shared-query-context-model": len(towers(shape)) == 1,
        "--retriever-score-scaling": own["retriever_score_scaling"],
        "--no-bias-gelu-fusion": own["bert_gelu"] != "tanh",
        "--openai-gelu": own["bert_gelu"] == "tanh-all",
    }
    return [flag for flag, needed in flags.items() if needed]


def _differences(shape: ModelShape, style: str) -> list[str]:
    own = shape.own
    types = own["bert_token_types"]
    found = {
        "two encoders, which only `--to megatron --megatron-names legacy` has": style != "legacy",
        "norms after its branches instead of before them (post-norm)": own["bert_post_norm"],
        f"{types} embeddings of segments instead of 2 (`--bert-token-types 2`)": types != 2,
    }
    return [what for what, there in found.items() if there]


NAMES = MegatronNames(
    core={},
    legacy={
        f"{ours}.{module}": f"{theirs}.{name}"
        for ours, theirs in _TOWERS.items()
        for module, name in _MODULES.items()
    },
    older={
        f"{theirs}.language_model.encoder.final_layernorm": f"{ours}.final_norm"
        for ours, theirs in _TOWERS.items()
    },
    stacks={
        f"{ours}.blocks": Stack("", f"{theirs}.language_model.encoder", norm=f"{ours}.final_norm")
        for ours, theirs in _TOWERS.items()
    },
    matches=_matches,
    values=_values,
    arguments=_arguments,
    flags=_flags,
    differences=_differences,
)
