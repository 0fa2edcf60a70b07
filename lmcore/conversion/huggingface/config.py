"""Conversion between the `config.json` of Hugging Face and lmcore's model shape.

Values come from the configuration classes of transformers (`GPT2Config`, `LlamaConfig`,
`MistralConfig`, `Qwen2Config`); values that a file leaves out have their defaults.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.bounded_file import read_bounded_file
from lmcore.errors import CheckpointArgumentError, CheckpointError, counted
from lmcore.model.saved_shape import read_shape
from lmcore.model.shape import ModelShape

__all__ = [
    "CONFIG_NAME",
    "INDEX_NAME",
    "SINGLE_NAME",
    "WEIGHT_FILES",
    "HFConfig",
    "config_of",
    "is_huggingface",
    "model_type_of",
    "read_config",
    "unread_notes",
]

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
WEIGHT_FILES = (
    (SINGLE_NAME, INDEX_NAME),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Names of the weight files in the order of transformers: a single file, the index of several."""
_OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")
"""Names of the optimizer's state in a directory of transformers' `Trainer` or of accelerate."""
_DEEPSPEED_FILES = "global_step*/*_states.pt"
_MAX_BYTES = 16 * 1024 * 1024
_COPY = "download or copy the file again"
_HINT = "convert it with the program that it belongs to, or use a supported model"

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the tanh approximation of GELU, which `bias_gelu` computes."""
_OTHER_TASK = re.compile(r"For(?!CausalLM)[A-Z]")
"""End of the name of a class of transformers with another head, as `ForSequenceClassification`."""
_GPT2_DROPOUT = 0.1
_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_TRAINED_LENGTH = 8192
"""Settings of Llama 3.1's rotary scaling, the only ones that `--use-rope-scaling` computes."""


@dataclass(frozen=True)
class HFConfig:
    """Model described by a `config.json`.

    Attributes:
        model_type: Name of the architecture, such as `llama`.
        shape: Shape of the model.
        notes: Differences between the model and lmcore's, for the user.
        attention_bias_only: True if the attention has biases, the feed-forward layers none.
    """

    model_type: str
    shape: ModelShape
    notes: tuple[str, ...] = ()
    attention_bias_only: bool = False


def is_huggingface(directory: Path) -> bool:
    """Return True if *directory* has the files of a Hugging Face model."""
    weights = any((directory / name).is_file() for names in WEIGHT_FILES for name in names)
    return weights and (directory / CONFIG_NAME).is_file()


def unread_notes(directory: Path) -> tuple[str, ...]:
    """Return notes that name files of *directory* which a user may expect to be read.

    Trainers save the optimizer's state beside the model; weights in two formats may belong to two
    models.
    """
    notes = []
    for single, index in WEIGHT_FILES:
        if (directory / single).is_file() and (directory / index).is_file():
            notes.append(
                f"`{single}` is read, as by transformers; the files that `{index}` names are not"
            )
        if (directory / single).is_file() or (directory / index).is_file():
            break
    if any(directory.glob(_DEEPSPEED_FILES)):
        notes.append(
            "the state of its optimizer, in DeepSpeed's files, is not read; `lmcore checkpoint "
            "convert` reads it with `--source-format megatron-deepspeed`"
        )
    elif any((directory / name).is_file() for name in _OPTIMIZER_FILES):
        notes.append("the state of its optimizer is not read")
    return tuple(notes)


def read_config(directory: Path) -> HFConfig:
    """Read the `config.json` of *directory*.

    Raises:
        CheckpointError: It is missing or damaged, or lmcore does not have the architecture.
    """
    path = directory / CONFIG_NAME
    try:
        config = json.loads(read_bounded_file(path, _MAX_BYTES))
    except OSError as error:
        raise CheckpointArgumentError(
            f"cannot read `{path}`",
            why=error.strerror or str(error),
            hint=f"give the directory that has the model's `{CONFIG_NAME}`",
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"`{path}` is not JSON", why=str(error), hint=_COPY) from None
    if not isinstance(config, dict):
        why = "it is no object"
        raise CheckpointError(f"`{path}` is not a model configuration", why=why, hint=_COPY)
    kind = config.get("model_type")
    if kind not in _READERS:
        raise CheckpointError(
            f"lmcore has no model of type `{kind}`",
            why=f"`{path}` names it; supported are {', '.join(f'`{name}`' for name in _READERS)}",
            hint=_HINT,
        )
    reader = _Reader(path, config)
    reader.require_plain()
    return _READERS[kind](reader)


class _Reader:
    """Typed values of one `config.json`."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path, self.config = path, config
        self.notes: list[str] = []

    def get(self, name: str, default: Any) -> Any:
        value = self.config.get(name)
        return default if value is None else value

    def require(self, name: str, allowed: Sequence[Any]) -> None:
        """Refuse a value that is not in *allowed*, whose first item is the default."""
        value = self.config.get(name, allowed[0])
        if value not in allowed:
            listed = " or ".join(f"`{json.dumps(one)}`" for one in allowed)
            raise self.unsupported(f"`{name}` is `{json.dumps(value)}`; lmcore computes {listed}")

    def require_plain(self) -> None:
        """Refuse quantized weights, and a model for another task."""
        settings = self.config.get("quantization_config")
        if settings is not None:
            method = settings.get("quant_method") if isinstance(settings, Mapping) else None
            raise CheckpointError(
                f"the weights of `{self.path.parent}` are quantized",
                why=f"`{self.path.name}` has `quantization_config` (`{method}`)",
                hint="load the model that was quantized",
            )
        named = self.config.get("architectures")
        for name in named if isinstance(named, list) else ():
            if isinstance(name, str) and _OTHER_TASK.search(name):
                raise self.unsupported(
                    f"it is a `{name}`, not a model for causal language modelling"
                )

    def unsupported(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"lmcore does not have the model of `{self.path}`", why=why, hint=_HINT
        )

    def shape(self, values: Mapping[str, Any]) -> ModelShape:
        try:
            return read_shape(values, self.path.parent)
        except CheckpointError as error:
            error.what, error.hint = f"`{self.path}` describes no model", _COPY
            raise


def _gpt2(reader: _Reader) -> HFConfig:
    reader.require("activation_function", _TANH_GELU)
    reader.require("scale_attn_weights", [True])
    reader.require("scale_attn_by_inverse_layer_idx", [False])
    reader.require("add_cross_attention", [False])
    hidden = reader.get("n_embd", 768)
    if not isinstance(hidden, int):
        raise reader.unsupported(f"`n_embd` is `{hidden}`, not an integer")
    hidden_dropout = reader.get("resid_pdrop", _GPT2_DROPOUT)
    embedding_dropout = reader.get("embd_pdrop", _GPT2_DROPOUT)
    if embedding_dropout != hidden_dropout:
        reader.notes.append(
            f"the embeddings get the dropout of the layers (`resid_pdrop`, {hidden_dropout}) "
            f"instead of their own (`embd_pdrop`, {embedding_dropout}): lmcore has one for both"
        )
    values = {
        "num_layers": reader.get("n_layer", 12),
        "hidden_size": hidden,
        "num_attention_heads": reader.get("n_head", 12),
        "ffn_hidden_size": reader.get("n_inner", 4 * hidden),
        "max_position_embeddings": reader.get("n_positions", 1024),
        "padded_vocab_size": reader.get("vocab_size", 50257),
        "layernorm_epsilon": reader.get("layer_norm_epsilon", 1e-5),
        "init_method_std": reader.get("initializer_range", 0.02),
        "untie_embeddings_and_output_weights": not reader.get("tie_word_embeddings", True),
        "attention_dropout": reader.get("attn_pdrop", _GPT2_DROPOUT),
        "hidden_dropout": hidden_dropout,
    }
    return HFConfig("gpt2", reader.shape(values), tuple(reader.notes))


def _llama(reader: _Reader) -> HFConfig:
    attention, feed_forward = reader.get("attention_bias", False), reader.get("mlp_bias", False)
    if feed_forward and not attention:
        raise reader.unsupported("its feed-forward layers have biases, its attention has none")
    if attention and not feed_forward:
        reader.notes.append(
            "the feed-forward layers get biases of 0: lmcore has biases in attention and "
            "feed-forward layers, or in neither"
        )
    values = _rotary_values(reader, base=10000.0, epsilon=1e-6)
    values["add_bias_linear"] = bool(attention)
    shape = reader.shape(values)
    only = bool(attention) and not feed_forward
    return HFConfig("llama", shape, tuple(reader.notes), attention_bias_only=only)


def _mistral(reader: _Reader) -> HFConfig:
    window = reader.config.get("sliding_window", 4096)
    length = reader.get("max_position_embeddings", 131072)
    if window is not None and isinstance(length, int) and window < length:
        reader.notes.append(
            f"attention beyond {window} tokens (`sliding_window`) is not limited in lmcore: use "
            f"sequences of at most {window} tokens"
        )
    values = _rotary_values(reader, base=10000.0, epsilon=1e-6, groups=8)
    values["add_bias_linear"] = False
    return HFConfig("mistral", reader.shape(values), tuple(reader.notes))


def _qwen2(reader: _Reader) -> HFConfig:
    reader.require("use_sliding_window", [False])
    values = _rotary_values(reader, base=10000.0, epsilon=1e-6)
    values |= {"add_bias_linear": False, "add_qkv_bias": True}
    return HFConfig("qwen2", reader.shape(values), tuple(reader.notes))


_READERS = {"gpt2": _gpt2, "llama": _llama, "mistral": _mistral, "qwen2": _qwen2}


def _rotary_values(
    reader: _Reader, *, base: float, epsilon: float, groups: int | None = None
) -> dict[str, Any]:
    """Return the values of the shape that models with rotary positions name alike."""
    reader.require("hidden_act", ["silu", "swish"])
    required = {
        name: reader.config.get(name)
        for name in (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
        )
    }
    for name, value in required.items():
        if value is None:
            raise reader.unsupported(f"`{name}` is missing")
    heads = required["num_attention_heads"]
    rotary_base, factor = _rope(reader, base)
    values = {
        "num_layers": required["num_hidden_layers"],
        "hidden_size": required["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": reader.get("num_key_value_heads", groups or heads),
        "ffn_hidden_size": required["intermediate_size"],
        "max_position_embeddings": reader.get("max_position_embeddings", 2048),
        "padded_vocab_size": required["vocab_size"],
        "layernorm_epsilon": reader.get("rms_norm_eps", epsilon),
        "init_method_std": reader.get("initializer_range", 0.02),
        "normalization": "RMSNorm",
        "swiglu": True,
        "position_embedding_type": "rope",
        "rotary_base": rotary_base,
        "rope_scaling_factor": factor,
        "untie_embeddings_and_output_weights": not reader.get("tie_word_embeddings", False),
        "attention_dropout": reader.get("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
    }
    if reader.config.get("head_dim") is not None:
        values["head_dim"] = reader.config["head_dim"]
    return values


def _rope(reader: _Reader, default_base: float) -> tuple[int, float]:
    """Return base and scaling factor of the rotary frequencies, in either form of the file.

    transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`.
    """
    old = reader.get("rope_scaling", {})
    settings = reader.get("rope_parameters", old)
    if not isinstance(settings, Mapping):
        raise reader.unsupported("its rotary settings are no object")
    base = settings.get("rope_theta", reader.get("rope_theta", default_base))
    if not isinstance(base, int | float) or isinstance(base, bool) or base != int(base):
        raise reader.unsupported(f"`rope_theta` is `{base}`; lmcore takes whole numbers")
    if settings.get("partial_rotary_factor", reader.get("partial_rotary_factor", 1.0)) != 1.0:
        raise reader.unsupported("it rotates a part of each head's channels")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return int(base), 1.0
    found = {name: settings.get(name, value) for name, value in _SCALING.items()}
    length = settings.get("original_max_position_embeddings", _TRAINED_LENGTH)
    if kind != "llama3" or found != _SCALING or length != _TRAINED_LENGTH:
        raise reader.unsupported(
            f"its rotary scaling is `{json.dumps(dict(settings))}`; lmcore computes `llama3` with "
            f"{json.dumps(_SCALING)} and `original_max_position_embeddings` {_TRAINED_LENGTH}"
        )
    return int(base), float(settings.get("factor", 8.0))


def model_type_of(shape: ModelShape) -> str:
    """Return the architecture of transformers that computes the same as a model of lmcore.

    Raises:
        CheckpointError: There is none.
    """
    differences = _differences(shape)
    if not differences["llama"]:
        return "qwen2" if shape.add_qkv_bias and not shape.add_bias_linear else "llama"
    if not differences["gpt2"]:
        return "gpt2"
    raise CheckpointError(
        "no supported architecture of transformers computes the same as this model",
        why="\n".join(
            f"not `{kind}`: it has {', '.join(found)}" for kind, found in differences.items()
        ),
        hint="train a model of one of these families to share it there",
    )


def _differences(shape: ModelShape) -> dict[str, list[str]]:
    """Return the features of a model that each architecture of transformers lacks."""
    positions = {"learned_absolute": "learned", "rope": "rotary", "none": "no"}
    encoding = f"{positions[shape.position_embedding_type]} positions"
    keys = counted(shape.num_query_groups, "key head")
    found = {
        "llama": {
            f"{shape.normalization} instead of RMSNorm": shape.normalization != "RMSNorm",
            "GELU instead of SwiGLU": not shape.swiglu,
            f"{encoding} instead of rotary ones": not shape.rotary,
            f"rotary positions in {shape.rotary_percent:g} of a head's channels instead of all": (
                shape.rotary and shape.rotary_percent != 1.0
            ),
        },
        "gpt2": {
            f"{shape.normalization} instead of LayerNorm": shape.normalization != "LayerNorm",
            "SwiGLU instead of GELU": shape.swiglu,
            f"{encoding} instead of learned ones": not shape.learned_positions,
            "no biases": not shape.add_bias_linear,
            f"{keys} for {shape.num_attention_heads} query heads": (
                shape.num_query_groups != shape.num_attention_heads
            ),
            f"{shape.attention_size} channels in all heads instead of {shape.hidden_size}": (
                shape.attention_size != shape.hidden_size
            ),
        },
    }
    return {kind: [what for what, there in one.items() if there] for kind, one in found.items()}


def config_of(shape: ModelShape, *, dtype: str, eos: int | None, bos: int | None) -> dict[str, Any]:
    """Return the `config.json` of a model.

    Args:
        shape: Shape of the model, with as many rows of the embedding as are written.
        dtype: Dtype of the weights.
        eos: Token that ends a text; None: the tokenizer has none.
        bos: Token that begins a text; None: the tokenizer has none.
    """
    kind = model_type_of(shape)
    common = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "torch_dtype": dtype,
        "vocab_size": shape.padded_vocab_size,
        "initializer_range": shape.init_method_std,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "use_cache": True,
    }
    if kind == "gpt2":
        return common | {
            "activation_function": "gelu_new",
            "attn_pdrop": shape.attention_dropout,
            "embd_pdrop": shape.hidden_dropout,
            "layer_norm_epsilon": shape.layernorm_epsilon,
            "n_embd": shape.hidden_size,
            "n_head": shape.num_attention_heads,
            "n_inner": shape.ffn_hidden_size,
            "n_layer": shape.num_layers,
            "n_positions": shape.max_position_embeddings,
            "resid_pdrop": shape.hidden_dropout,
        }
    scaling = None
    if shape.rope_scaling_factor != 1.0:
        scaling = {
            "rope_type": "llama3",
            "factor": shape.rope_scaling_factor,
            "original_max_position_embeddings": _TRAINED_LENGTH,
            **_SCALING,
        }
    config = common | {
        "attention_dropout": shape.attention_dropout,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_query_groups,
        "rms_norm_eps": shape.layernorm_epsilon,
        "rope_scaling": scaling,
        "rope_theta": float(shape.rotary_base),
    }
    if kind == "llama":
        config |= {"attention_bias": shape.add_bias_linear, "mlp_bias": shape.add_bias_linear}
    return config


_CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
