"""Architecture of transformers for BERT: `BertForPreTraining` and `BertForMaskedLM`.  Torch-free.

Values come from `BertConfig`; values that a file leaves out have its defaults.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from lmcore.base.errors import counted
from lmcore.families.layers.parameters import module_of
from lmcore.model.architecture import Architecture, ConfigReader, ForeignTensors
from lmcore.model.shape import ModelShape

__all__ = ["ARCHITECTURES"]

_GELU = {"gelu": "erf", "gelu_python": "erf"} | dict.fromkeys(
    ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "tanh-all"
)
"""`bert_gelu` by `hidden_act`, which transformers applies in the head too."""
_WRITTEN_GELU = {"erf": "gelu", "tanh-all": "gelu_new"}
_ORDER_HEAD = "cls.seq_relationship.weight"
_MODULES = {
    "token_embedding": "bert.embeddings.word_embeddings",
    "position_embedding": "bert.embeddings.position_embeddings",
    "type_embedding": "bert.embeddings.token_type_embeddings",
    "embedding_norm": "bert.embeddings.LayerNorm",
    "masked_head.dense": "cls.predictions.transform.dense",
    "masked_head.norm": "cls.predictions.transform.LayerNorm",
    "masked_head": "cls.predictions",
    "pooler": "bert.pooler.dense",
    "order_head": "cls.seq_relationship",
    "output_embedding": "cls.predictions.decoder",
}
_IN_LAYER = {
    "attention.qkv": tuple(f"attention.self.{one}" for one in ("query", "key", "value")),
    "attention.output": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "feed_forward.up": ("intermediate.dense",),
    "feed_forward.down": ("output.dense",),
    "feed_forward_norm": ("output.LayerNorm",),
}


def _tensors(name: str, shape: ModelShape) -> ForeignTensors:
    layer, module, parameter = module_of(name)
    if not layer:
        return ForeignTensors((f"{_MODULES[module]}.{parameter}",))
    prefix = f"bert.encoder.layer.{layer}."
    names = tuple(f"{prefix}{other}.{parameter}" for other in _IN_LAYER[module])
    return ForeignTensors(names, (shape.hidden_size,) * 3 if len(names) > 1 else ())


def _spellings(name: str) -> tuple[str, ...]:
    """Return the names of a tensor: in the files of the first versions, norms have others."""
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    return (name, old.replace("LayerNorm.bias", "LayerNorm.beta"))


def _read(reader: ConfigReader) -> dict[str, Any]:
    gelu = reader.require("hidden_act", tuple(_GELU))
    reader.require("position_embedding_type", ["absolute", None])
    reader.require("is_decoder", [False])
    reader.require("add_cross_attention", [False])
    hidden = reader.get("hidden_size", 768)
    return {
        "model_family": "bert",
        "num_layers": reader.get("num_hidden_layers", 12),
        "hidden_size": hidden,
        "num_attention_heads": reader.get("num_attention_heads", 12),
        "ffn_hidden_size": reader.get("intermediate_size", 3072),
        "max_position_embeddings": reader.get("max_position_embeddings", 512),
        "padded_vocab_size": reader.get("vocab_size", 30522),
        "layernorm_epsilon": reader.get("layer_norm_eps", 1e-12),
        "init_method_std": reader.get("initializer_range", 0.02),
        "attention_dropout": reader.get("attention_probs_dropout_prob", 0.1),
        "hidden_dropout": reader.get("hidden_dropout_prob", 0.1),
        "bert_binary_head": True,  # the names of the tensors tell, see `_with_tensors`
        "bert_post_norm": True,
        "bert_gelu": _GELU[gelu],
        "bert_token_types": reader.get("type_vocab_size", 2),
    }


def _with_tensors(shape: ModelShape, names: Collection[str]) -> ModelShape:
    own = shape.own | {"bert_binary_head": _ORDER_HEAD in names}
    return replace(shape, further=tuple(sorted(own.items())))


def _differences(shape: ModelShape) -> list[str]:
    own = shape.own
    keys = counted(shape.num_query_groups, "key head")
    found = {
        "norms before its branches instead of after them (pre-norm)": not own["bert_post_norm"],
        "GELU by tanh in its layers and by erf in its head": own["bert_gelu"] not in _WRITTEN_GELU,
        "no embedding of segments": not own["bert_token_types"],
        f"{shape.normalization} instead of LayerNorm": shape.normalization != "LayerNorm",
        "SwiGLU instead of GELU": shape.swiglu,
        "no biases": not shape.add_bias_linear,
        f"{keys} for {shape.num_attention_heads} query heads": (
            shape.num_query_groups != shape.num_attention_heads
        ),
        f"{shape.attention_size} channels in all heads instead of {shape.hidden_size}": (
            shape.attention_size != shape.hidden_size
        ),
    }
    return [what for what, there in found.items() if there]


def _write(shape: ModelShape) -> dict[str, Any]:
    own = shape.own
    return {
        "attention_probs_dropout_prob": shape.attention_dropout,
        "hidden_act": _WRITTEN_GELU[own["bert_gelu"]],
        "hidden_dropout_prob": shape.hidden_dropout,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "layer_norm_eps": shape.layernorm_epsilon,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_layers,
        "position_embedding_type": "absolute",
        "type_vocab_size": own["bert_token_types"],
    }


def _class_name(shape: ModelShape) -> str:
    return "BertForPreTraining" if shape.own["bert_binary_head"] else "BertForMaskedLM"


ARCHITECTURES = (
    Architecture(
        "bert",
        read=_read,
        tensors=_tensors,
        write=_write,
        differences=_differences,
        class_name=_class_name,
        other_classes=re.compile(r"(?!BertFor(?:PreTraining|MaskedLM)$).*"),
        purpose="a BERT with the head that predicts masked tokens",
        copies={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        spellings=_spellings,
        buffers=re.compile(r"bert\.embeddings\.position_ids"),
        ignored=re.compile(r"bert\.pooler\.dense\.(?:weight|bias)"),
        generates=False,
        with_tensors=_with_tensors,
        hint="train with `--bert-post-norm --bert-gelu erf` to share the model there",
    ),
)
