"""Shapes of a real configuration, for `--shapes-of`: one rank, one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmcore.base.errors import ConfigError, LmcoreError

__all__ = ["RunShapes", "read_shapes"]

_FILE = "config.yaml"


@dataclass(frozen=True)
class RunShapes:
    """Sizes of the ops of a configuration.

    Attributes:
        name: The preset or run directory, for labels.
        precision: Name of the precision; None: the device's default.
        micro_batch: Sequences of a micro-batch.
        length: Tokens of a sequence.
        hidden: Channels of the residual stream.
        heads: Query heads.
        groups: Heads of keys and values.
        head_dim: Channels of a head.
        ffn: Channels of the feed-forward layer.
        vocab: Rows of the vocabulary.
        rotary_dim: Channels of a head that are rotated; 0: none.
        ops: Ops that the model has.
        bias: True if its projections have biases.
        epsilon: Epsilon of its norms.
    """

    name: str
    precision: str | None
    micro_batch: int
    length: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    rotary_dim: int
    ops: tuple[str, ...]
    bias: bool
    epsilon: float

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunShapes:
        """Return what `to_dict` made."""
        return cls(**{**values, "ops": tuple(values["ops"])})

    @property
    def words(self) -> str:
        """The sizes in words, for the report."""
        groups = f" in {self.groups} groups" if self.groups != self.heads else ""
        return (
            f"{self.name}: {self.micro_batch} x {self.length:,} tokens, hidden size {self.hidden:,}"
            f", {self.heads} heads of {self.head_dim}{groups}, feed-forward {self.ffn:,}"
        )


def read_shapes(named: str) -> RunShapes:
    """Return the shapes of a preset, a run directory or a settings file.

    Args:
        named: Value of `--shapes-of`.

    Raises:
        ConfigError: There is no such preset, directory or file, or it cannot be read.
    """
    from lmcore.config.derived.model_math import model_shape
    from lmcore.config.load import load_config
    from lmcore.model.vocabulary import pad_vocab_size

    path = Path(named)
    if path.is_dir() and not (path / _FILE).is_file():
        raise ConfigError(
            f"`--shapes-of {named}`: no `{_FILE}` in this directory",
            why="a run writes its settings there at its start",
            hint="name a run directory, a settings file or a preset",
        )
    if path.is_dir():
        arguments = [str(path / _FILE)]
    else:
        arguments = [named] if path.is_file() else ["--preset", named]
    try:
        config = load_config(arguments, announce=False).config
    except LmcoreError as error:
        raise ConfigError(
            f"`--shapes-of {named}`: neither a preset nor a run directory of settings that can be "
            "read",
            why=error.what_and_why,
            hint=error.hint,
        ) from error
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    vocab = pad_vocab_size(
        config.data.vocab_size or _BYTES,
        divisible_by=model.make_vocab_size_divisible_by,
        tensor_parallel_size=tensor,
    )
    shape = model_shape(model, vocab).narrowed(tensor)
    length = model.seq_length // config.parallel.context_parallel_size
    ops = ["attention", "linear", "bias_dropout_add", "linear_cross_entropy"]
    ops.append("rms_norm" if shape.normalization == "RMSNorm" else "layer_norm")
    ops.append("swiglu" if shape.swiglu else "bias_gelu")
    ops += ["rotary_embedding"] if shape.rotary else []
    return RunShapes(
        name=path.name if path.exists() else named,
        precision=config.accelerator.precision,
        micro_batch=config.training.micro_batch_size,
        length=length,
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        groups=shape.num_query_groups,
        head_dim=shape.head_dim,
        ffn=shape.ffn_hidden_size,
        vocab=shape.padded_vocab_size,
        rotary_dim=shape.rotary_dim if shape.rotary else 0,
        ops=tuple(ops),
        bias=shape.add_bias_linear,
        epsilon=shape.layernorm_epsilon,
    )


_BYTES = 257  # the vocabulary of a run without arguments
