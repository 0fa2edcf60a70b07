"""Flags of Megatron's generation scripts and of training runs, for `lmcore generate` and `serve`.

A script gives the flags of the training run to generation too.  Flags of the model's shape are
compared with the checkpoint, which defines the model.  Flags of training change nothing, and the
command says so.  Flags that training refuses are refused here.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.config.foreign.megatron import RENAMED
from lmcore.config.foreign.megatron_flags import train_flags
from lmcore.config.option import Option
from lmcore.config.options.command_line import (
    ForeignFlag,
    Translation,
    UnsupportedFlagError,
)
from lmcore.config.section import run_options
from lmcore.config.token_lengths import TOKEN_OPTIONS
from lmcore.model.family import named_family

__all__ = ["GivenModel", "generate_flags", "run_flags", "serve_flags", "without_effect"]

_COMPARED = "compared with the checkpoint, which defines the model"
_TRAINING = "used by training only"
_OTHER_AXES = "only tensor parallelism and pipelines divide a model that generates"
_RECOMPUTE = "--recompute"
_NO_POSITIONS = "--no-position-embedding"
_OF_REQUESTS = "each request has its own"
_CACHED = "the server always keeps keys and values"
_TOGETHER = "texts are generated together, and long prompts in chunks"
_POSITIONS = "the model's positions limit each text"

_TOGETHER_FLAGS = ("--inference-max-requests", "--inference-max-batch-size", "--max-batch-size")
"""Flags of Megatron's scripts for the number of prompts that are generated together."""
_SAMPLING = (
    *("--temperature", "--top-k", "--top-p", "--out-seq-length", "--seed"),
    *("--num-tokens-to-generate", "--top-n-logprobs"),
)

_FIELDS: Mapping[str, str] = {
    **{
        name: name
        for name in (
            *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"),
            *("max_position_embeddings", "position_embedding_type", "normalization", "swiglu"),
            *("rotary_base", "rotary_percent", "layernorm_epsilon", "add_bias_linear"),
            *("add_qkv_bias", "untie_embeddings_and_output_weights", "embed_layernorm"),
        )
    },
    "kv_channels": "head_dim",
}
"""Field of the model's shape for each option that it has unchanged."""
_DERIVED = (
    *("group_query_attention", "num_query_groups", "use_rope_scaling", "rope_scaling_factor"),
    "glu_activation",
)


@dataclass(frozen=True)
class GivenModel:
    """Flags of the model's shape on a command line.

    Attributes:
        values: Value of each option, by name.
        texts: The same options as typed.
    """

    values: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def require(self, shape: Mapping[str, Any]) -> None:
        """Raise an error for the flags that contradict a checkpoint.

        Args:
            shape: Shape of the checkpoint's model.

        Raises:
            ConfigError: Every contradiction.
        """
        problems: list[LmcoreError] = [
            ConfigError(
                f"`{self.texts[name]}` contradicts the checkpoint",
                why=f"its model has {shape[key]} as `{key}`",
                hint="leave it out: the checkpoint defines the model",
            )
            for name, key, expected in self._expected()
            if shape[key] != expected
        ]
        problems += self._another_family(shape)
        if problems:
            raise ConfigError.collect(problems)

    def _another_family(self, shape: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Yield an error if `--model-family` names another family than the checkpoint's."""
        name = self.values.get("model_family")
        if name is None:
            return
        family, saved = named_family(name), shape["model_family"]
        # Families that other settings tell apart have no name in a shape.
        expected = "" if family is not None and family.matches is not None else name.lower()
        if expected != saved:
            yield ConfigError(
                f"`{self.texts['model_family']}` contradicts the checkpoint",
                why=f"its model is {f'`{saved}`' if saved else 'a decoder, GPT or Llama'}",
                hint="leave it out: the checkpoint defines the model",
            )

    def _expected(self) -> Iterable[tuple[str, str, Any]]:
        """Yield options with the fields of the shape and the values that they imply."""
        values = self.values
        for name, key in _FIELDS.items():
            if values.get(name) is not None:
                yield name, key, values[name]
        if values.get("group_query_attention"):
            groups = values.get("num_query_groups")
            name = "group_query_attention" if groups is None else "num_query_groups"
            yield name, "num_query_groups", groups or 1
        if gate := values.get("glu_activation"):
            field = "swiglu" if gate == "swiglu" else "glu_activation"
            yield "glu_activation", field, True if field == gate else gate
        if values.get("use_rope_scaling"):
            default = run_options()["rope_scaling_factor"].default
            factor = values.get("rope_scaling_factor", default)
            yield "use_rope_scaling", "rope_scaling_factor", factor


def generate_flags(own: Collection[str], model: GivenModel) -> dict[str, ForeignFlag]:
    """Return the foreign flags of `lmcore generate` by name.

    Args:
        own: Flags of the command itself, which are not foreign.
        model: Place for the flags of the model's shape, which parsing fills.
    """
    flags = run_flags(model) | {
        "--recompute": ForeignFlag(
            "0", lambda _: Translation(flags=("--no-cache",)), replacement="--no-cache"
        ),
        "--genfile": ForeignFlag(
            "1",
            lambda values: Translation(flags=("--sample-output-file", *values)),
            replacement="--sample-output-file",
        ),
        **dict.fromkeys(_TOGETHER_FLAGS, _renamed("--micro-batch-size")),
        "--num-tokens-to-generate": _renamed("--tokens"),
        "--return-log-probs": ForeignFlag(
            "0", lambda _: Translation(flags=("--json", "--logprobs", "0")), "--logprobs"
        ),
        "--prompts": ForeignFlag("+", _prompts, "--prompt"),
        "--stream": without_effect("0", "a terminal shows the text as it is generated"),
    }
    return {name: flag for name, flag in flags.items() if name not in own}


def serve_flags(own: Collection[str], model: GivenModel) -> dict[str, ForeignFlag]:
    """Return the foreign flags of `lmcore serve` by name: of Megatron's server, and of a run.

    Args:
        own: Flags of the command itself, which are not foreign.
        model: Place for the flags of the model's shape, which parsing fills.
    """
    flags = run_flags(model)
    flags |= {
        **dict.fromkeys(_TOGETHER_FLAGS, _renamed("--max-requests")),
        **dict.fromkeys(("--return-log-probs", "--stream"), without_effect("0", _OF_REQUESTS)),
        "--prompts": without_effect("+", _OF_REQUESTS),
        "--inference-max-seq-length": without_effect("1", _POSITIONS),
        "--inference-batch-times-seqlen-threshold": without_effect("1", _TOGETHER),
        "--recompute": without_effect("0", _CACHED),
        "--greedy": without_effect("0", _OF_REQUESTS),
    }
    for name in _SAMPLING:
        flags[name] = without_effect("1", _OF_REQUESTS)
    return {name: flag for name, flag in flags.items() if name not in own}


def _renamed(flag: str) -> ForeignFlag:
    return ForeignFlag("1", lambda values: Translation(flags=(flag, *values)), replacement=flag)


def _prompts(values: tuple[str, ...]) -> Translation:
    """Translate the prompts of a command; several are in a file here."""
    if len(values) == 1:
        return Translation(flags=(f"--prompt={values[0]}",))
    what = "`--prompts` with several prompts is not supported"
    hint = "use `--sample-input-file FILE`, with one prompt on each line"
    return Translation(problem=UnsupportedFlagError(what, hint=hint))


def run_flags(model: GivenModel) -> dict[str, ForeignFlag]:
    """Return the flags of a training run, for a command that loads its model.

    Args:
        model: Place for the flags of the model's shape, which parsing fills.
    """
    without_positions = ForeignFlag("0", functools.partial(_note_no_positions, model))
    flags = {**train_flags(), **_recompute_flags(), **_run_flags(model)}
    return flags | {_NO_POSITIONS: without_positions}


def without_effect(arity: str, reason: str) -> ForeignFlag:
    """Return a flag that is accepted and changes nothing.

    Args:
        arity: Number of its values; see `ForeignFlag`.
        reason: Reason for which it changes nothing.
    """
    return ForeignFlag(arity, lambda _: Translation(no_effect=reason))


def _recompute_flags() -> dict[str, ForeignFlag]:
    """Return the flags of activation recomputation; `--recompute` is about the cache here."""
    train = train_flags()
    return {
        name: without_effect(train[name].values, _TRAINING)
        for name, renamed in RENAMED.items()
        if renamed.replacement.startswith(_RECOMPUTE)
    }


def _run_flags(model: GivenModel) -> dict[str, ForeignFlag]:
    """Return the flags of a training run."""
    flags = {"--ckpt-format": without_effect("1", "the format of a checkpoint is detected")}
    for option in (*run_options().values(), *TOKEN_OPTIONS):
        switch = option.type is bool
        arity = "0" if switch else "+" if option.repeated else "1"
        if option.name in {*_FIELDS, *_DERIVED, "model_family"}:
            flags[option.flag] = _of_model(arity, option, option.flag, model)
            if switch:
                negation = f"--no-{option.flag[2:]}"
                flags[negation] = _of_model(arity, option, negation, model)
            continue
        reason = _OTHER_AXES if option.section == "parallel" else _TRAINING
        flags[option.flag] = without_effect(arity, reason)
        if switch:
            flags[f"--no-{option.flag[2:]}"] = without_effect(arity, reason)
    return flags


def _of_model(arity: str, option: Option, flag: str, model: GivenModel) -> ForeignFlag:
    return ForeignFlag(arity, functools.partial(_note, option, flag, model))


def _note(option: Option, flag: str, model: GivenModel, values: tuple[str, ...]) -> Translation:
    """Note the value of a flag of the model's shape."""
    text = " ".join((flag, *values))
    word = values[0] if values else "true" if flag == option.flag else "false"
    try:
        value = option.convert(word, where=f"`{text}`")
    except ConfigError as problem:
        return Translation(problem=problem)
    earlier = model.texts.get(option.name)
    differs = earlier not in {None, _NO_POSITIONS} and model.values[option.name] != value
    model.values[option.name], model.texts[option.name] = value, text
    return Translation(no_effect=_COMPARED, replaces=earlier if differs else None)


def _note_no_positions(model: GivenModel, _values: tuple[str, ...]) -> Translation:
    """Note the flag that turns learned positions off, unless others are given."""
    given = model.texts.get("position_embedding_type")
    if given is not None:
        return Translation(no_effect=f"`{given}` is given")
    model.values["position_embedding_type"] = "none"
    model.texts["position_embedding_type"] = _NO_POSITIONS
    return Translation(no_effect=_COMPARED)
