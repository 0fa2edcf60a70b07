"""`Family`: the record of a model family, and the registry of families.

Torch-free: what needs torch is named as `module:object` and loaded when it is used.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from lmcore.base.errors import ConfigError, PluginError, suggestion
from lmcore.model.parameters import Parameter, stored
from lmcore.model.shape import ModelShape

__all__ = [
    "Body",
    "Family",
    "FamilySettings",
    "ForwardFlops",
    "Loss",
    "Pretrained",
    "Stack",
    "answers_prompts",
    "block_flops",
    "families",
    "family_of",
    "fills_masks",
    "layers_in_words",
    "named_family",
    "parameter_shapes",
    "parameters_of",
    "stacks_of",
    "vocabulary_parameters",
]


class FamilySettings(Protocol):
    """Settings that choose a family: of the `model` section, or of a model's shape."""

    @property
    def model_family(self) -> str | None:
        """Name of the family in small letters; empty or None: the other settings choose."""

    @property
    def normalization(self) -> str:
        """Name of the normalization."""

    @property
    def swiglu(self) -> bool:
        """True if the feed-forward layer is SwiGLU."""

    @property
    def position_embedding_type(self) -> str:
        """Positional encoding."""


class ForwardFlops(NamedTuple):
    """Floating-point operations of a forward pass.

    Attributes:
        layers: Operations in the layers, which recomputation repeats.
        rest: Operations in everything else, such as the head.
    """

    layers: int
    rest: int

    def of_training(self, *, recompute: bool = False) -> int:
        """Return the operations of forward and backward, which counts as two forward passes.

        Args:
            recompute: True to count the forward pass of the layers twice: hardware FLOPs instead
                of model FLOPs.
        """
        return (4 if recompute else 3) * self.layers + 3 * self.rest


@dataclass(frozen=True)
class Loss:
    """Term of the loss of a family, a weighted mean over the global batch.

    Attributes:
        name: Name in Megatron's log line: "lm loss".
        weight: Tensor of the micro-batch with the weight of each of its targets; 0: masked.
        accuracy: True if evaluation counts the targets that the model predicts.
        top: Numbers of places: a target counts as predicted if it is among so many best ones.  Each
            number is an accuracy.
    """

    name: str
    weight: str
    accuracy: bool = False
    top: tuple[int, ...] = (1,)

    @property
    def key(self) -> str:
        """Name in metrics and summaries: "lm_loss"."""
        return self.name.replace(" ", "_")

    @property
    def accuracy_key(self) -> str:
        """Name of the accuracy in metrics and summaries: "lm_accuracy", "lm_top5_accuracy"."""
        places = "" if self.top[0] == 1 else f"_top{self.top[0]}"
        return f"{self.name.removesuffix(' loss').replace(' ', '_')}{places}_accuracy"


@dataclass(frozen=True)
class Body:
    """Layers of a family as seen by a head for a task.

    The model has `build_heads`, `head_modules` and `losses_of`, which such a head replaces.

    Attributes:
        inputs: Tensors of a micro-batch that the layers take, the tokens first.
        heads: Modules of the heads of pretraining, by attribute name.
        bidirectional: True: the state of the first token is pooled, after a projection, and the
            tokens are `[CLS] a [SEP] b [SEP]`; False: the state of the last token is pooled.
    """

    inputs: tuple[str, ...]
    heads: frozenset[str]
    bidirectional: bool = False


@dataclass(frozen=True)
class Stack:
    """Layers of a model that run one after another on the same tokens.

    Attributes:
        name: Name in messages: "encoder"; empty if a model has one stack.
        num_layers: Number of layers.
        tokens: Tensor of the micro-batch with the tokens.
        reads: Tokens of the stack whose last states its layers attend to, too; empty: of none.
        gated: True if its feed-forward layers have a gate.
    """

    name: str
    num_layers: int
    tokens: str
    reads: str = ""
    gated: bool = False


@dataclass(frozen=True)
class Pretrained:
    """Weights of another family's model that a model may begin with.

    Attributes:
        family: Name of that family.
        option: Option with the directory of its run or checkpoint: "bert_load".
        name: Returns the name there of a parameter of this family; empty: it is not there.
    """

    family: str
    option: str
    name: Callable[[str], str]


@dataclass(frozen=True, eq=False)  # two records of one name are not the same family
class Family:
    """Model family.

    Attributes:
        name: Name of the family, for messages; in small letters the value of `--model-family`.
        matches: Returns True if the settings choose this family where none is named; None: it is
            chosen by its name alone.
        parameters: Table of the parameters of a shape, in the order of checkpoints.
        forward_flops: Operations of the forward pass of a sample, from shape and sequence length.
        batch: Tensors of a micro-batch by the names of the arguments of `Model.loss`, each with a
            letter for each dim: B samples, S tokens of a sequence, any other for what has another
            size.  The first, [B, S], has the size of the hidden states.
        losses: Terms of the loss, whose sum is trained.  `Model.loss` returns them in this order.
        model: Class of the models, a subclass of `lmcore.families.protocol.Model`.
        samples: Function of the run and its tokenizer that returns the `SampleFormat` of its data.
        optional: Tensors of `batch` that a micro-batch may lack.
        targets: Tensor of `batch` that `Model.loss` draws from the model's own predictions if the
            micro-batch lacks it, as the optimizer Sophia needs it; empty: none.
        rules: Function of the settings, a `LoadedConfig`: yields an error for each one that the
            family does not have.
        variant: Returns the record of a shape, whose losses depend on the settings; None: this one.
        settings: Options of another section that belong to the sizes of a model, with their
            defaults; see `ModelShape.further`.
        names: Objects with the names and settings of other programs' models of this family, by the
            name of the format, as `module:object`: `huggingface` has `Architecture`s, `megatron`
            a `MegatronNames`.
        body: Layers as seen by a head for a task (`--task`); None: there is no such head.
        every_position_is_a_target: True if no position of a sample is left out of the loss, unless
            an option masks it; False: the samples bring loss weights.
        positions: Positional encodings (`--position-embedding-type`) that its models may have.
        forward_flops_of: `forward_flops` by the shape and all settings, a `Config`, for samples
            that have a second length; None: `forward_flops` of the sequence length.
        pretrained: Weights of another family's model to begin with; None: there are none.
        stacks: Returns the stacks of a shape's layers, in the order of `Model.layers`; None: all
            layers are one stack.
        lengths: Returns the sizes of dims of `batch` beside B and S by their letters, from all
            settings, a `Config`; None: there are none, or samples tell.
        pipelines: True if the stacks can be divided over a pipeline: each reads the one before.
        not_in_the_weights: Names of `settings` that a resumed run may change, as dropout.
        vocabulary: Tokenizer type of a `--vocab-file` that is given without merges and without a
            type, as Megatron's script of the family takes it; empty: such a file needs its type.
    """

    name: str
    matches: Callable[[FamilySettings], bool] | None
    parameters: Callable[[ModelShape], Sequence[Parameter]]
    forward_flops: Callable[[ModelShape, int], ForwardFlops]
    batch: Mapping[str, str]
    losses: Sequence[Loss]
    model: str
    samples: str
    optional: frozenset[str] = frozenset()
    targets: str = ""
    settings: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    rules: Callable[[Any], Iterable[ConfigError]] = lambda _: ()
    variant: Callable[[ModelShape], Family] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    body: Body | None = None
    every_position_is_a_target: bool = False
    positions: tuple[str, ...] = ("learned_absolute", "rope", "none")
    forward_flops_of: Callable[[ModelShape, Any], ForwardFlops] | None = None
    pretrained: Pretrained | None = None
    stacks: Callable[[ModelShape], Sequence[Stack]] | None = None
    lengths: Callable[[Any], Mapping[str, int]] | None = None
    pipelines: bool = True
    not_in_the_weights: frozenset[str] = frozenset()
    vocabulary: str = ""

    @property
    def key(self) -> str:
        """Value of `--model-family`."""
        return self.name.lower()

    @property
    def accuracies(self) -> tuple[Loss, ...]:
        """Losses whose predicted targets are counted, one for each number in `Loss.top`."""
        counted = [loss for loss in self.losses if loss.accuracy]
        return tuple(replace(loss, top=(places,)) for loss in counted for places in loss.top)

    @property
    def tokens(self) -> str:
        """Tensor of a micro-batch with the tokens, [B, S]."""
        return next(iter(self.batch))

    def load_model(self) -> Any:
        """Return the class of the models."""
        return _load(self.model, self.name)

    def load_names(self, name: str) -> Any:
        """Return the object of `names` for a format; None if the family has none."""
        return _load(self.names[name], self.name) if name in self.names else None

    def load_samples(self) -> Any:
        """Return the function that makes the format of samples."""
        return _load(self.samples, self.name)


_OWN = (
    "lmcore.families.bert.family:BERT",
    "lmcore.families.ict.family:ICT",
    "lmcore.families.retro.family:RETRO",
    "lmcore.families.t5.family:T5",
    "lmcore.families.gpt.family:LLAMA",
    "lmcore.families.gpt.family:GPT",
)
"""The core's families, in the order in which they are tried: GPT is any other model."""
_HEADED = "lmcore.families.heads.family:with_head"
_families: dict[str, Family] = {}


def block_flops(shape: ModelShape, seq_length: int) -> int:
    """Return the floating-point operations of a transformer block's forward pass on a sample.

    A multiply-add counts as two; causal attention is not counted as half.

    Args:
        shape: Sizes of the model.
        seq_length: Number of tokens of the sample.

    Source: Narayanan et al. 2021.
    """
    h, queries = shape.hidden_size, shape.attention_size
    matrices = 3 if shape.gated else 2
    products = 2 * queries + 2 * shape.key_size + matrices * shape.ffn_hidden_size
    return seq_length * (2 * h * products + 4 * seq_length * queries)


def families() -> dict[str, Family]:
    """Return the registry: every family by its name, in the order in which they are tried."""
    if not _families:
        _families.update({one.name: one for one in (_load(name, name) for name in _OWN)})
    return _families


def named_family(name: str) -> Family | None:
    """Return the family of a name, in any letters; None if there is none."""
    return next((one for one in families().values() if one.key == name.lower()), None)


def family_of(settings: FamilySettings) -> Family:
    """Return the family that the settings name or, if they name none, choose.

    Families with `matches` differ by settings only: each of their names means all of them.  For a
    shape, it is the record of the shape's settings and task.

    Raises:
        ConfigError: No family has the name, or it has no head for tasks.
    """
    family = _chosen(settings)
    if not isinstance(settings, ModelShape):
        return family
    if family.variant is not None:
        family = family.variant(settings)
    if settings.task:
        headed: Family = _load(_HEADED, family.name)(family, settings.task)
        return headed
    return family


def _chosen(settings: FamilySettings) -> Family:
    if name := settings.model_family:
        family = named_family(name)
        if family is None:
            raise ConfigError(
                f"unknown model family `{name}`",
                hint=f"{suggestion(name, (one.key for one in families().values()))}; a plugin that "
                "brings others must be installed, see `lmcore plugins`",
            )
        if family.matches is None:
            return family
    return next(one for one in families().values() if one.matches and one.matches(settings))


def stacks_of(shape: ModelShape) -> tuple[Stack, ...]:
    """Return the stacks of a model's layers."""
    family = family_of(shape)
    if family.stacks is None:
        return (Stack("", shape.num_layers, family.tokens, gated=shape.gated),)
    return tuple(family.stacks(shape))


def layers_in_words(shape: ModelShape) -> str:
    """Return the number of layers as text: "2 layers", "2 encoder and 3 decoder layers"."""
    stacks = stacks_of(shape)
    numbers = [f"{one.num_layers} {one.name}".rstrip() for one in stacks]
    return f"{' and '.join(numbers)} layer{'' if stacks[-1].num_layers == 1 else 's'}"


def parameters_of(shape: ModelShape) -> tuple[Parameter, ...]:
    """Return the table of parameters of a model."""
    return _table(family_of(shape), shape)


@functools.lru_cache(maxsize=8)  # asked again for each tensor of a conversion
def _table(family: Family, shape: ModelShape) -> tuple[Parameter, ...]:
    return tuple(family.parameters(shape))


def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter that a model stores, by name, in order."""
    return {row.name: row.shape for row in stored(parameters_of(shape))}


def fills_masks(shape: ModelShape) -> bool:
    """Return True if a model predicts the tokens in the place of masks, from both sides."""
    body = family_of(shape).body
    return body is not None and body.bidirectional and not shape.task


def answers_prompts(shape: ModelShape) -> bool:
    """Return True if a prompt is the input of an encoder, and the text a decoder's answer."""
    tokens = family_of(shape).tokens
    return any(stack.reads == tokens for stack in stacks_of(shape))


def vocabulary_parameters(shape: ModelShape) -> frozenset[str]:
    """Return the names of the parameters with a row for each token."""
    return _vocabulary_parameters(family_of(shape), shape)


@functools.lru_cache(maxsize=8)
def _vocabulary_parameters(family: Family, shape: ModelShape) -> frozenset[str]:
    return frozenset(row.name for row in _table(family, shape) if row.rows_are_tokens)


def _load(name: str, family: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as cause:
        raise PluginError(
            f"the model family `{family}` cannot be loaded",
            why=f"`{name}`: {cause}",
            hint="install the package that brings the family, in a version that fits",
        ) from cause
