"""`Model`: the interface of a model family to training, parallelism, checkpoints and generation.

A family is a subclass, registered by name in `lmcore.model.registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from lmcore.errors import RunError
from lmcore.model.recompute import KEEP_ALL, Recompute
from lmcore.model.shape import ModelPart

if TYPE_CHECKING:
    from lmcore.accelerator.precision.products import ModelProducts
    from lmcore.model.cache import SlotCache
    from lmcore.model.layers import Embedding
    from lmcore.model.op_binding import OpBinding
    from lmcore.model.shape import ModelShape

__all__ = [
    "CAUSAL_LM",
    "Arguments",
    "CausalLM",
    "Model",
    "SampleKind",
    "Split",
    "TensorParallelPlan",
]

Arguments = tuple[tuple[Tensor, ...], dict[str, Tensor]]
"""Positional and keyword arguments of `Model.loss` for one micro-batch."""


@dataclass(frozen=True)
class SampleKind:
    """Kind of training sample that a model takes; all its tensors are [B, S].

    Attributes:
        name: Name of the kind.
        arguments: Names of the positional arguments of `Model.loss`.
        loss_weight: Name of the argument that weights the loss of each token.
        options: Names of the optional keyword arguments of `Model.loss`.
        targets: Name of the argument that `Model.loss` samples from the model's own predictions if
            it is None, as the optimizer Sophia needs it; empty: none.
    """

    name: str
    arguments: tuple[str, ...]
    loss_weight: str
    options: tuple[str, ...] = ()
    targets: str = ""


CAUSAL_LM = SampleKind(
    "causal-lm",
    arguments=("tokens_BS", "targets_BS", "loss_weight_BS"),
    loss_weight="loss_weight_BS",
    options=("positions_BS", "documents_BS"),
    targets="targets_BS",
)
"""Token ids, the next token of each, and the weight of its loss; see `Model.loss`."""


class BoundModule(Protocol):
    """Module that calls a bound op, which parallelism may wrap."""

    op: Callable[..., Tensor]


class AttentionModule(BoundModule, Protocol):
    """Module that calls a bound `attention` op.

    Attributes:
        dropout: Probability that an attention weight is dropped in training.
    """

    dropout: float


@dataclass(frozen=True)
class Split:
    """Split of a parameter over the ranks of tensor parallelism.

    Attributes:
        dim: Dim that is split.
        groups: Sizes, on one rank, of packed projections that are split one by one, such as
            queries, keys and values; empty: the dim is split as a whole.
    """

    dim: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class TensorParallelPlan:
    """Tensor parallelism of a narrow model (see `ModelShape.narrowed`).

    Attributes:
        splits: Split parameters by name; all other parameters are replicated.
        column: Projections with split outputs; their input is copied to the group.
        row: Projections with split inputs; their output is all-reduced.
        token_embedding: Embedding whose rows are split; None: not in this part of the model.
        position_embedding: Replicated embedding of positions; None: there is none.
        head_norm: Norm before the head, whose weight has split rows; None: no head in this part.
    """

    splits: Mapping[str, Split]
    column: Sequence[BoundModule]
    row: Sequence[BoundModule]
    token_embedding: Embedding | None = None
    position_embedding: nn.Embedding | None = None
    head_norm: BoundModule | None = None


class Model(nn.Module, ABC):
    """A model, or the part of one that a pipeline rank holds; its constructor binds all its ops.

    Attributes:
        sample_kind: Kind of training sample.
        causal: True if no token attends to later ones.
        shape: Sizes of this model; narrow ones under tensor parallelism.
        part: Layers, embedding and head that this object has.
        masked: True if attention can be limited to documents.
        recompute: Recompute policy of the layers.
        linear_cross_entropy: Bound op of the loss, if this part has the head.
        products: Products of its layers and head, as `build_model` counted them; None before.
    """

    sample_kind: ClassVar[SampleKind] = CAUSAL_LM
    causal: ClassVar[bool] = True
    linear_cross_entropy: Callable[..., Tensor]

    def __init__(
        self,
        shape: ModelShape,
        ops: OpBinding,  # noqa: ARG002 - for subclasses
        recompute: Recompute = KEEP_ALL,
        *,
        masked: bool = False,
        part: ModelPart | None = None,
    ) -> None:
        """Build the model; parameters are uninitialized until `initialize`.

        Args:
            shape: Sizes of the model.
            ops: Binding of ops to kernels.
            recompute: Recompute policy of the layers.
            masked: True if attention can be limited to documents.
            part: Part of the model to build; None: all of it.
        """
        super().__init__()
        self.shape, self.masked, self.recompute = shape, masked, recompute
        self.part = part or ModelPart.whole(shape)
        self.products: ModelProducts | None = None

    @property
    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """Layers of this part, in order: the units of compilation, ZeRO and pipeline stages."""

    @property
    def head_weight(self) -> Tensor | None:
        """Weight of the head, [V, H], if it is used outside the module that owns it."""
        return None

    @abstractmethod
    def initial_weight(self, name: str, size: torch.Size, seed: int) -> Tensor:
        """Return the initial value of a whole parameter in float32, on the CPU.

        It must depend on the arguments only, so that it is the same in every layout.

        Args:
            name: Name of the parameter.
            size: Size of the whole parameter.
            seed: Seed of the run.
        """

    @abstractmethod
    def loss(self, *arguments: Any, **options: Any) -> Tensor:
        """Return the sum over tokens of loss weight times loss, a float32 scalar.

        Args:
            arguments: Tensors named by `sample_kind.arguments`; its `targets` may be None.
            options: Tensors named by `sample_kind.options`.
        """

    @property
    def attentions(self) -> Sequence[AttentionModule]:
        """Attention modules, whose ops context parallelism wraps."""
        return ()

    @property
    def tied_parameters(self) -> frozenset[str]:
        """Names of the parameters that both the first and the last pipeline stage hold."""
        return frozenset()

    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Return the tensor parallelism of this narrow model.

        Raises:
            RunError: The family does not support tensor parallelism.
        """
        raise self._unsupported("--tensor-model-parallel-size")

    def stage_modules(self, *, first: bool, last: bool) -> dict[str, nn.Module]:  # noqa: ARG002
        """Return the modules of a pipeline stage beside its layers, by attribute name.

        Args:
            first: True for the first stage, which embeds.
            last: True for the last stage, which computes the loss.

        Raises:
            RunError: The family does not support pipelines.
        """
        raise self._unsupported("--pipeline-model-parallel-size")

    def run_stage(
        self,
        hidden_BSH: Tensor | None,
        arguments: Arguments,
        layers: Sequence[Callable[..., Tensor]],
        *,
        last: bool,
    ) -> Tensor:
        """Return the hidden states after a pipeline stage, [B, S, H]; the loss if it is the last.

        Args:
            hidden_BSH: Hidden states of the previous stage; None: this is the first stage.
            arguments: Arguments of `loss`.
            layers: Layers of the stage.
            last: True for the last stage.
        """
        raise NotImplementedError

    @staticmethod
    def document_mask(documents_BS: Tensor) -> Tensor:
        """Return the document-boundary mask, True if hidden, [B, 1, S, S].

        Args:
            documents_BS: Number of the document of each token.
        """
        return documents_BS[:, None, :, None] != documents_BS[:, None, None, :]

    def initialize(self, seed: int) -> None:
        """Set every parameter to its initial value.

        Args:
            seed: Seed of the run.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(self.initial_weight(name, parameter.shape, seed))

    def parameter_count(self) -> int:
        """Return the number of parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _unsupported(self, flag: str) -> RunError:
        return RunError(
            f"`{flag}` is not supported by {self.shape.family} models",
            hint="use data parallelism, with `--zero-stage` to save memory",
        )


class CausalLM(Model):
    """A causal language model that can generate; calling it returns hidden states [B, S, H].

    `forward` takes token ids [B, S], a view of the cache of the tokens before them, and as
    `hidden_BSH` the hidden states of the part before this one, if the model is a part.  It returns
    the hidden states after the layers of this part, and after the final norm if it has the head.

    Attributes:
        head_projection: Projection to logits by a constant weight; None: by `head_weight`.
    """

    head_projection: Callable[[Tensor], Tensor] | None = None

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """Weight of the head, [V, H]."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the weights of products."""
        return self.head_weight.dtype

    @abstractmethod
    def logits(self, hidden_BSH: Tensor) -> Tensor:
        """Return the logits of the padded vocabulary, [B, S, V].

        Args:
            hidden_BSH: Hidden states after the final norm.
        """

    @abstractmethod
    def new_cache(self, dtype: torch.dtype) -> SlotCache:
        """Return an empty cache on the model's device.

        Args:
            dtype: Dtype of keys and values.
        """
