"""Arguments in a checkpoint of Megatron, read as a model shape and settings of lmcore.

A checkpoint has the `argparse.Namespace` of the run that wrote it.  Arguments have been renamed
over the years, and forks use other names; an argument that an older version lacks has its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.base.errors import CheckpointError
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.conversion.foreign_pickle.records import Record
from lmcore.conversion.state import TRAINING_OPTIONS, TokenizerNote, known_settings
from lmcore.families.gpt.megatron import NAMES as GPT_NAMES
from lmcore.families.saved_shape import is_number, read_shape
from lmcore.model.megatron_names import MegatronNames
from lmcore.model.shape import ModelShape

__all__ = [
    "MegatronModel",
    "has_gates",
    "read_model",
    "require_known",
    "saved_layout",
    "saved_precision",
]

_HINT = "convert it with the program that wrote it, or use a supported model"

# Arguments that change the model into one that lmcore does not have, with the values that do not.
_OFF = (None, False, 0, "", ())
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "multi_latent_attention",
            "qk_layernorm",
            "qk_l2_norm",
            "softmax_scale",
            "attention_output_gate",
            "experimental_attention_variant",
            "linear_attention_freq",
            "window_size",
            "apply_layernorm_1p",
            "layernorm_zero_centered_gamma",
            "apply_residual_connection_post_layernorm",
            "squared_relu",
            "quick_geglu",
            "glu_linear_offset",
            "activation_func_clamp_value",
            "rotary_interleaved",
            "no_rope_freq",
            "mtp_num_layers",
            "heterogeneous_layers_config_path",
            "heterogeneous_layers_config_encoded_json",
            "hybrid_override_pattern",
            "hybrid_layer_pattern",
            "use_mup",
            "enable_mhc_connections",
            "enable_hyper_connections",
            "is_hybrid_model",
            "retro_add_retriever",
            "fp8_param_gather",
            "fp4_param",
            "fp4_param_gather",
        ),
        _OFF,
    ),
    "num_experts": (*_OFF, 1, (1,)),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "softmax_type": (None, "vanilla"),
    "mlp_type": (None, "standard"),
}
_CONSTANT = (None, "constant")
"""Values of `weight_decay_incr_style` with which the weight decay stays the same."""
_PLAIN = (bool, int, float, str, tuple, type(None))
_POSITIONS = {
    "learned_absolute": "learned_absolute",
    "absolute": "learned_absolute",
    "rope": "rope",
    "rotary": "rope",
    "relative": "relative",
    "none": "none",
    "alibi": "alibi",
    # Values of BigScience's enum, which a file stores instead of its names.
    "1": "rope",
    "2": "learned_absolute",
    "3": "alibi",
}
_GATES = {"geglu": "geglu", "liglu": "liglu", "reglu": "reglu", "swiglu": ""}
"""Value of `ModelShape.glu_activation` for each of `--glu-activation`; of SwiGLU empty."""
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_ALWAYS = ("tensor", "pipeline", "data")
"""Axes that are named with a size of 1, too."""
_NAMES = {
    "tensor": ("tensor_model_parallel_size", "model_parallel_size"),
    "pipeline": ("pipeline_model_parallel_size",),
    "data": ("data_parallel_size",),
    "context": ("context_parallel_size",),
    "stages_per_process": ("virtual_pipeline_model_parallel_size",),
}
"""Arguments that have the size of each axis of a `ParallelLayout`, over the years."""
_HALF = ("bf16", "fp16")
_NO_SIZES: Mapping[str, tuple[int, ...]] = {}


@dataclass(frozen=True)
class MegatronModel:
    """Model described by saved arguments.

    Attributes:
        shape: Shape of the model.
        vocab_size: Number of tokens without padding rows; None if it is not known.
        notes: Differences between the model and lmcore's, for the user.
        settings: Settings of the run by the names of lmcore's options.
        training_notes: Differences in training that a run that continues has.
        tokenizer: Settings that build the tokenizer, if it needs no files; None otherwise.
        tokenizer_type: Type of the tokenizer; None if it is not recorded.
    """

    shape: ModelShape
    vocab_size: int | None
    notes: tuple[str, ...]
    settings: Mapping[str, Any]
    training_notes: tuple[str, ...] = ()
    tokenizer: TokenizerSettings | None = None
    tokenizer_type: str | None = None


def require_known(args: Mapping[str, Any], checkpoint: Path) -> None:
    """Raise a `CheckpointError` for an argument of a model that lmcore does not have.

    Args:
        args: Arguments by their names in Megatron.
        checkpoint: Directory of the checkpoint, for messages.
    """
    reader = _Reader(args, checkpoint)
    for name, allowed in _REFUSED.items():
        reader.refuse(name, allowed)


def read_model(
    args: Mapping[str, Any],
    checkpoint: Path,
    rows: int,
    sizes: Mapping[str, tuple[int, ...]] = _NO_SIZES,
    names: MegatronNames = GPT_NAMES,
) -> MegatronModel:
    """Return the model that saved arguments describe.

    Args:
        args: Arguments by their names in Megatron.
        checkpoint: Directory of the checkpoint, for messages.
        rows: Number of rows of the token embedding, over all ranks.
        sizes: Shape of each tensor by its name in lmcore.
        names: Record of the model's family.

    Raises:
        CheckpointError: An argument is missing, or lmcore does not have the model.
    """
    require_known(args, checkpoint)
    reader = _Reader(args, checkpoint)
    if names is not GPT_NAMES:
        for name in ("glu_activation", "embed_layernorm"):
            reader.refuse(name, _OFF)
    values = reader.shape_values(rows) | names.values(args, sizes)
    shape = read_shape(values, checkpoint)
    known = reader.get("true_vocab_size", None)
    usable = type(known) is int and 0 < known <= rows
    tokenizer = _tokenizer(args, rows)
    named = args.get("tokenizer_type")
    return MegatronModel(
        shape,
        known if usable else None,
        tuple(reader.notes(shape, has_tokenizer=tokenizer is not None)),
        _settings(args),
        tuple(reader.training_notes()),
        tokenizer,
        named if isinstance(named, str) else None,
    )


def has_gates(args: Mapping[str, Any]) -> bool:
    """Return True if the feed-forward layers of a run are gated.

    Args:
        args: Arguments of the run.
    """
    return bool(args.get("swiglu") or args.get("glu_activation"))


def saved_layout(args: Mapping[str, Any], **known: object) -> dict[str, int]:
    """Return the sizes of a run's parallel axes, by the names of `ParallelLayout`.

    Sizes that are not recorded are left out, and so are sizes of 1 of axes that few runs have.

    Args:
        args: Arguments of the run.
        **known: Sizes that are recorded elsewhere, by axis; they are taken first.
    """
    found = {}
    for axis, names in _NAMES.items():
        values = [known.get(axis), *(args.get(name) for name in names)]
        size = next((one for one in values if type(one) is int and one > 0), None)
        if size is not None and (size > 1 or axis in _ALWAYS):
            found[axis] = size
    world = args.get("world_size")
    if "data" not in found and type(world) is int and {"tensor", "pipeline"} <= found.keys():
        each = found["tensor"] * found["pipeline"] * found.get("context", 1)
        if world > 0 and world % each == 0:
            found["data"] = world // each
    return {axis: found[axis] for axis in _NAMES if axis in found}


def saved_precision(args: Mapping[str, Any]) -> str | None:
    """Return the precision of a run by lmcore's name; None if it is not recorded.

    Args:
        args: Arguments of the run.
    """
    flags = {name: args[name] for name in _HALF if type(args.get(name)) is bool}
    if not flags:
        return None
    return next((name for name, value in flags.items() if value), "fp32")


def _tokenizer(args: Mapping[str, Any], rows: int) -> TokenizerSettings | None:
    """Return the settings of a tokenizer without files; None if it has files or does not fit."""
    kind, size = args.get("tokenizer_type"), args.get("vocab_size")
    if kind == "ByteTokenizer":
        return TokenizerSettings(kind)
    if kind == "NullTokenizer" and type(size) is int and 0 < size < rows:
        return TokenizerSettings(kind, vocab_size=size)
    return None


def _settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of training that lmcore has as options with the same meaning."""
    found = known_settings(args, TRAINING_OPTIONS)
    half = next((name for name in ("bf16", "fp16") if args.get(name) is True), None)
    if half is not None:
        found["precision"] = half
    if args.get("weight_decay_incr_style") not in _CONSTANT:
        found.pop("weight_decay", None)  # the default of a run that gives two other values
    # The run's length is counted in steps or in samples, and its schedule alike.
    other = "iters" if "train_samples" in found else "samples"
    left_out = {f"train_{other}", f"lr_decay_{other}", f"lr_warmup_{other}"}
    if other == "samples":
        left_out |= {"rampup_batch_size", "step_batch_size_schedule"}  # they count samples
    return {name: value for name, value in found.items() if name not in left_out}


class _Reader:
    """Saved arguments, with the defaults of arguments that older versions lack."""

    def __init__(self, args: Mapping[str, Any], checkpoint: Path) -> None:
        self._args, self._checkpoint = args, checkpoint

    def get(self, name: str, default: Any) -> Any:
        value = self._args.get(name)
        return default if value is None else value

    def first(self, *names: str, default: Any) -> Any:
        """Return the value of the first name that has one."""
        return next(
            (value for name in names if (value := self.get(name, None)) is not None), default
        )

    def needed(self, name: str) -> Any:
        value = self.get(name, None)
        if value is None:
            raise self._unsupported(f"its arguments lack `{name}`")
        return value

    def refuse(self, name: str, allowed: tuple[Any, ...]) -> None:
        value = self._args.get(name)
        plain = tuple(value) if isinstance(value, list) else value
        known = isinstance(plain, _PLAIN) and plain is not True and plain in allowed
        if not known:
            raise self._unsupported(f"`{name}` is `{value}`")

    def _unsupported(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"lmcore does not have the model of `{self._checkpoint}`", why=why, hint=_HINT
        )

    def shape_values(self, rows: int) -> dict[str, Any]:
        hidden, heads = self.needed("hidden_size"), self.needed("num_attention_heads")
        if type(hidden) is not int or type(heads) is not int or heads < 1:
            raise self._unsupported(f"`hidden_size` is `{hidden}`, the number of heads `{heads}`")
        positions = self._positions()
        gate = self.get("glu_activation", "")
        if gate and not (isinstance(gate, str) and gate in _GATES):
            raise self._unsupported(f"`glu_activation` is `{gate!s:.80}`")
        normalization = str(self.get("normalization", "LayerNorm"))
        values = {
            "num_layers": self.first("num_layers", "encoder_num_layers", default=0),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "ffn_hidden_size": self.get("ffn_hidden_size", 4 * hidden),
            "max_position_embeddings": self.first(
                "max_position_embeddings", "seq_length", default=0
            ),
            "padded_vocab_size": rows,
            "layernorm_epsilon": self.first("norm_epsilon", "layernorm_epsilon", default=1e-5),
            "init_method_std": self.get("init_method_std", 0.02),
            "attention_dropout": self.get("attention_dropout", 0.1),
            "hidden_dropout": self.get("hidden_dropout", 0.1),
            "num_query_groups": self._groups(heads),
            "normalization": _NORMS.get(normalization.lower(), normalization),
            "swiglu": self._flag("swiglu", default=False) or gate == "swiglu",
            "embed_layernorm": self._flag("embed_layernorm", default=False),
            "position_embedding_type": positions,
            "untie_embeddings_and_output_weights": self._flag(
                "untie_embeddings_and_output_weights", default=False
            ),
            "add_bias_linear": self._flag(
                "add_bias_linear", default=not self._flag("disable_bias_linear", default=False)
            ),
            "add_qkv_bias": self._flag("add_qkv_bias", default=False),
        }
        if self.get("kv_channels", None) is not None:
            values["head_dim"] = self.get("kv_channels", None)
        if gate and _GATES[gate]:
            values["glu_activation"] = _GATES[gate]
        if positions == "rope":
            values["rotary_base"] = self._whole(
                self.first("rotary_base", "rope_theta", default=10000)
            )
            values["rotary_percent"] = self.get("rotary_percent", 1.0)
            if self._flag("use_rope_scaling", default=False):
                values["rope_scaling_factor"] = self.get("rope_scaling_factor", 8.0)
        return values

    def _flag(self, name: str, *, default: bool) -> bool:
        return bool(self.get(name, default))

    def _whole(self, value: Any) -> Any:
        return int(value) if is_number(value) and value == int(value) else value

    def _groups(self, heads: int) -> Any:
        if self._flag("group_query_attention", default=False):
            return self.needed("num_query_groups")
        return self.get("num_key_value_heads", heads)

    def _positions(self) -> str:
        rotary = self._flag("use_rotary_position_embeddings", default=False)
        named = self.get("position_embedding_type", None)
        if named is None:
            learned = self._flag("add_position_embedding", default=True)
            return "rope" if rotary else "learned_absolute" if learned else "none"
        if isinstance(named, Record):
            named = named.__dict__.get("args", ("",))[-1]
        found = _POSITIONS.get(str(named))
        if found is None:
            raise self._unsupported(f"`position_embedding_type` is `{named}`")
        learned = self._flag("add_position_embedding", default=True)
        return (
            "rope" if rotary else "none" if found == "learned_absolute" and not learned else found
        )

    def notes(self, shape: ModelShape, *, has_tokenizer: bool) -> list[str]:
        found = []
        exact = self.get("bias_gelu_fusion", True) is False
        plain = not shape.gated and not shape.model_family
        if exact and plain and not self._flag("openai_gelu", default=False):
            found.append(
                "the run computed GELU exactly (`--no-bias-gelu-fusion`), lmcore computes its tanh "
                "approximation"
            )
        spec = self.get("spec", None)
        if isinstance(spec, str | list | tuple) and spec:
            listed = spec if isinstance(spec, str) else " ".join(map(str, spec))
            found.append(
                f"the run built its layers by `--spec {listed}`, which is not part of the "
                "checkpoint; lmcore computes the layers of the other arguments"
            )
        tokenizer = self.get("tokenizer_type", None)
        if isinstance(tokenizer, str) and not has_tokenizer:
            text = f"its tokenizer, `{tokenizer}`, is not part of the checkpoint"
            found.append(TokenizerNote(text))
        return found

    def training_notes(self) -> list[str]:
        """Return a note for each argument of training that lmcore does not have."""
        found = []
        style = self.get("weight_decay_incr_style", None)
        if style not in _CONSTANT:
            first, last = (self.get(f"{one}_weight_decay", "?") for one in ("start", "end"))
            found.append(
                f"the run changed its weight decay from {first} to {last} "
                f"(`--weight-decay-incr-style {style}`); lmcore's stays the same: give "
                "`--weight-decay`"
            )
        if (rate := self.get("decoupled_lr", None)) is not None:
            found.append(
                f"the run had another learning rate, {rate}, for embeddings and output "
                "(`--decoupled-lr`); lmcore has one for all parameters"
            )
        if self.get("decoupled_weight_decay", True) is False:
            found.append(
                "the run added its weight decay to the gradients (`decoupled_weight_decay` is "
                "False); lmcore's is decoupled"
            )
        return found
