"""`Model`: the interface of a family's models to training, parallelism, checkpoints and generation.

The record of a family, `lmcore.model.family.Family`, names its class.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from lmcore.base.errors import RunError
from lmcore.families.recompute import KEEP_ALL, Recompute
from lmcore.model.family import family_of, parameters_of
from lmcore.model.parameters import stored, tied
from lmcore.model.shape import ModelPart

if TYPE_CHECKING:
    from lmcore.contract.precision.products import ModelProducts
    from lmcore.families.layers.cache import SlotCache
    from lmcore.families.layers.head import HeadLoss
    from lmcore.families.layers.projection import Embedding
    from lmcore.families.op_binding import OpBinding
    from lmcore.model.family import Family
    from lmcore.model.shape import ModelShape

__all__ = ["CausalLM", "MaskedLM", "Model", "SourceLM", "TensorParallelPlan"]


_MORE_ROWS = 16
"""Rows that are drawn beyond a vocabulary, and not used."""


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
class TensorParallelPlan:
    """Tensor parallelism of a narrow model (see `ModelShape.narrowed`).

    Attributes:
        column: Projections with split outputs; their input is copied to the group.
        row: Projections with split inputs; their output is all-reduced.
        token_embedding: Embedding whose rows are split; None: not in this part of the model.
        replicated_embeddings: Embeddings that every rank has, as of positions.
        head_norm: Norm before the heads, one with split rows; None: no head in this part.
        whole_heads: Last projections of heads that every rank computes whole.
        parts: Plans of parts of the model with embeddings and heads, such as two encoders.
    """

    column: Sequence[BoundModule]
    row: Sequence[BoundModule]
    token_embedding: Embedding | None = None
    replicated_embeddings: Sequence[nn.Embedding] = ()
    head_norm: BoundModule | None = None
    whole_heads: Sequence[BoundModule] = ()
    parts: Sequence[TensorParallelPlan] = ()


class Model(nn.Module, ABC):
    """A model, or the part of one that a pipeline rank holds; its constructor binds all its ops.

    Attributes:
        causal: True if no token attends to later ones.
        shape: Sizes of this model; narrow ones under tensor parallelism.
        part: Layers, embedding and head that this object has.
        masked: True if attention can be limited to documents.
        recompute: Recompute policy of the layers.
        head_loss: Loss of the head with a row for each token, if this part has it.
        products: Products of its layers and head, as `build_model` counted them; None before.
        table: Parameters of the whole model by name, from its family's record; of a narrow model,
            the parts of one rank.
    """

    causal: ClassVar[bool] = True
    head_loss: HeadLoss

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
        self.table = {row.name: row for row in stored(parameters_of(shape))}

    @property
    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """Layers of this part, in order: the units of compilation, ZeRO and pipeline stages."""

    @property
    def head_weight(self) -> Tensor | None:
        """Weight of the head, [V, H], if it is used outside the module that owns it."""
        return None

    def initial_weight(self, name: str, size: torch.Size, seed: int) -> Tensor:
        """Return the initial value of a whole parameter in float32, on the CPU.

        It depends on the arguments and the family's table only: it is the same in every layout.

        Args:
            name: Name of the parameter.
            size: Size of the whole parameter.
            seed: Seed of the run.
        """
        row = self.table[name]
        if not row.init.std:
            return torch.full(size, row.init.mean)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        own = self.shape.vocab_size if row.rows_are_tokens else 0
        # A draw's last numbers depend on how many there are: of more rows, the first are the same
        # for any padding.
        drawn = torch.empty((own + _MORE_ROWS, *size[1:]) if own else size, dtype=torch.float32)
        drawn.normal_(row.init.mean, row.init.std, generator=generator)
        if not own:
            return drawn
        whole = torch.zeros(size)
        whole[:own] = drawn[:own]
        return whole

    @property
    def family(self) -> Family:
        """Record of the model's family."""
        return family_of(self.shape)

    @abstractmethod
    def loss(self, *args: Any, **batch: Any) -> Tensor:
        """Return each loss of the family, the sum of its weights times its terms, in float32.

        A family with one loss returns a scalar, with several a vector [L].  In evaluation, the
        weights of the targets that the model predicts follow, one sum for each loss with
        `Loss.accuracy`.

        Args:
            args: For callers that give tensors by position.
            batch: Tensors by the names of `Family.batch`; without the one that `Family.targets`
                names, targets are drawn from the model's own predictions.
        """

    def outputs(self, tokens_BS: Tensor, positions_BS: Tensor) -> Sequence[Tensor]:
        """Return the logits of every head of some tokens, the vocabulary's first, [..., V].

        A model without logits returns the vectors that it computes of the tokens.

        Two models are compared by them after a conversion, so that each parameter must count.

        Args:
            tokens_BS: Token ids.
            positions_BS: Position of each.
        """
        raise NotImplementedError

    def gather_samples(self, x: Tensor) -> tuple[Tensor, int]:
        """Return a tensor of the samples of all data-parallel ranks, and this rank's first one.

        Gradients return to the rank that a sample came from.  With several ranks, it is replaced.

        Args:
            x: Tensor with a row for each sample of this rank, the same size on all.
        """
        return x, 0

    @property
    def attentions(self) -> Sequence[AttentionModule]:
        """Attention modules, whose ops context parallelism wraps."""
        return ()

    def present(self, *names: str) -> dict[str, nn.Module]:
        """Return the modules among *names* that this part has, by attribute name."""
        found = {name: self._modules.get(name) for name in names}
        return {name: module for name, module in found.items() if module is not None}

    @property
    def tied_parameters(self) -> frozenset[str]:
        """Names of the parameters that both the first and the last pipeline stage hold."""
        return tied(parameters_of(self.shape))

    def holders(self, parts: Sequence[ModelPart]) -> dict[str, tuple[int, ...]]:
        """Return the parts that hold each parameter that several parts hold, by its name.

        Their gradients are summed.

        Args:
            parts: Parts of the ranks of a pipeline.
        """
        ends = tuple(number for number, part in enumerate(parts) if part.embedding or part.head)
        return dict.fromkeys(self.tied_parameters, ends) if len(ends) > 1 else {}

    def tensor_parallel_plan(self) -> TensorParallelPlan:
        """Return the tensor parallelism of this narrow model.

        Raises:
            RunError: The family does not support tensor parallelism.
        """
        raise self.unsupported("--tensor-model-parallel-size")

    def divide_heads(self, rank: int, size: int) -> None:
        """Take part *rank* of *size* of the heads, in tensor parallelism of this narrow model.

        Only what depends on the number of a head among all changes.
        """

    def stage_modules(self, *, first: bool, last: bool) -> dict[str, nn.Module]:  # noqa: ARG002
        """Return the modules of a pipeline stage beside its layers, by attribute name.

        Args:
            first: True for the first stage, which embeds.
            last: True for the last stage, which computes the loss.

        Raises:
            RunError: The family does not support pipelines.
        """
        raise self.unsupported("--pipeline-model-parallel-size")

    def run_stage(
        self,
        hidden_BSH: Any,
        batch: Mapping[str, Tensor],
        layers: Sequence[Callable[..., Tensor]],
        *,
        last: bool,
    ) -> Tensor:
        """Return the hidden states after a pipeline stage, [B, S, H]; the loss if it is the last.

        A model with two stacks gets and returns, from the second stage of the second stack on, the
        states of both: a tuple of the first stack's last states, and the second's.

        Args:
            hidden_BSH: Hidden states of the previous stage; None: this is the first stage.
            batch: Arguments of `loss`.
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

    def unsupported(self, flag: str) -> RunError:
        """Return the error for a setting that needs what the model lacks."""
        return RunError(
            f"`{flag}` is not supported by {self.family.name} models",
            hint="use data parallelism, with `--zero-stage` to save memory",
        )


class MaskedLM(Model):
    """A model that predicts masked tokens from the tokens on both sides of them."""

    @abstractmethod
    def hidden(
        self, tokens_BS: Tensor, types_BS: Tensor | None = None, padding_BS: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states of all tokens, [B, S, H].

        Args:
            tokens_BS: Token ids.
            types_BS: Segment of each token; None: the first.
            padding_BS: True at padding, which no token attends to; None: there is none.
        """

    @abstractmethod
    def masked_logits(self, hidden_BSH: Tensor, chosen_BM: Tensor) -> Tensor:
        """Return the logits of some tokens, [B, M, V].

        Args:
            hidden_BSH: Result of `hidden`.
            chosen_BM: Positions of the tokens.
        """


class CausalLM(Model):
    """A causal language model that can generate; calling it returns hidden states [B, S, H].

    `forward` takes token ids [B, S], a view of the cache of the tokens before them, and as
    `hidden_BSH` the hidden states of the part before this one, if the model is a part.  It returns
    the hidden states after the layers of this part, and after the final norm if it has the head.

    Attributes:
        head_projection: Projection to logits by a constant weight; None: by `head_weight`.
        answers: See `SourceLM`; None: the model has no encoder.
    """

    head_projection: Callable[[Tensor], Tensor] | None = None
    answers: ClassVar[bool | None] = None

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

    def outputs(self, tokens_BS: Tensor, positions_BS: Tensor) -> Sequence[Tensor]:
        """Return the logits of some tokens; see `Model`."""
        return [self.logits(self(tokens_BS, positions_BS=positions_BS))]

    @abstractmethod
    def new_cache(self, dtype: torch.dtype) -> SlotCache:
        """Return an empty cache on the model's device.

        Args:
            dtype: Dtype of keys and values.
        """


class SourceLM(CausalLM):
    """A decoder with an encoder: it generates with a source, which the encoder reads.

    The cache of `new_cache` has `set_source`, which encodes the source of a sequence, and calling
    the model needs a view of it.

    Attributes:
        answers: True if a prompt is the source and the text an answer; False: the text continues
            the prompt, and the source is what is read beside it.
    """

    answers: ClassVar[bool | None] = True
