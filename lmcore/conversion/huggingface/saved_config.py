"""Reading of the `config.json` of Hugging Face as a shape of lmcore.

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
from lmcore.conversion.huggingface.directory import CONFIG_NAME
from lmcore.errors import CheckpointArgumentError, CheckpointError
from lmcore.model.saved_shape import read_shape
from lmcore.model.shape import ModelShape

__all__ = ["ROPE_SCALING", "TRAINED_LENGTH", "HFConfig", "read_config"]

_MAX_BYTES = 16 * 1024 * 1024
_COPY = "download or copy the file again"
_HINT = "convert it with the program that it belongs to, or use a supported model"

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the tanh approximation of GELU, which `bias_gelu` computes."""
_OTHER_TASK = re.compile(r"For(?!CausalLM)[A-Z]")
"""End of the name of a class of transformers with another head, as `ForSequenceClassification`."""
_GPT2_DROPOUT = 0.1
ROPE_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
TRAINED_LENGTH = 8192
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
    found = {name: settings.get(name, value) for name, value in ROPE_SCALING.items()}
    length = settings.get("original_max_position_embeddings", TRAINED_LENGTH)
    if kind != "llama3" or found != ROPE_SCALING or length != TRAINED_LENGTH:
        raise reader.unsupported(
            f"its rotary scaling is `{json.dumps(dict(settings))}`; lmcore computes `llama3` with "
            f"{json.dumps(ROPE_SCALING)} and `original_max_position_embeddings` {TRAINED_LENGTH}"
        )
    return int(base), float(settings.get("factor", 8.0))
