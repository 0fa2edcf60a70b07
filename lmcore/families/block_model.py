"""`BlockModel`: what models made of one stack of transformer blocks share.

Shapes: B batch, S sequence, H hidden.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import Tensor, nn

from lmcore.families.layers.projection import Linear
from lmcore.families.layers.transformer import Attention, Block
from lmcore.families.protocol import Model

if TYPE_CHECKING:
    from lmcore.families.op_binding import OpBinding

__all__ = ["BlockModel"]


class BlockModel(Model):
    """Model with a stack of blocks, or with a part of the stack.

    Attributes:
        blocks: The blocks, by their numbers.
        embeddings: Names of the modules that the first pipeline stage has beside the blocks.
    """

    blocks: nn.ModuleDict
    embeddings: ClassVar[tuple[str, ...]] = (
        "token_embedding",
        "embedding_norm",
        "position_embedding",
    )

    def build_blocks(self, ops: OpBinding, *, masked: bool, **options: Any) -> nn.ModuleDict:
        """Return the blocks of this part, by their numbers.

        Args:
            ops: Binding of ops to kernels.
            masked: True for attention that takes a mask.
            **options: Further arguments of `Block`.
        """
        bound = (self.shape, ops, self.recompute.attention)
        return nn.ModuleDict(
            {
                str(number): Block(*bound, masked=masked, causal=self.causal, **options)
                for number in self.part.layers
            }
        )

    @property
    def layers(self) -> list[Block]:
        """Blocks of this part, in order."""
        return [cast("Block", block) for block in self.blocks.values()]

    @property
    def attentions(self) -> list[Attention]:
        """Attention module of each block."""
        return [block.attention for block in self.layers]

    def run_layers(
        self, x_BSH: Tensor, layers: Sequence[Callable[..., Tensor]] | None = None, **given: Any
    ) -> Tensor:
        """Return the hidden states after some layers, [B, S, H]; recompute as the policy says.

        Args:
            x_BSH: Hidden states before the layers.
            layers: Layers to run; None: all.
            **given: Arguments of every layer; None is left out.
        """
        blocks: list[Callable[..., Tensor]] = list(self.layers if layers is None else layers)
        given = {name: value for name, value in given.items() if value is not None}
        if given:
            blocks = [functools.partial(block, **given) for block in blocks]
        if self.training:
            return self.recompute.run_blocks(blocks, x_BSH)
        for block in blocks:
            x_BSH = block(x_BSH)
        return x_BSH

    @property
    @abstractmethod
    def head_modules(self) -> dict[str, nn.Module]:
        """Modules of the heads by attribute name, without the token embedding."""

    def stage_modules(self, *, first: bool, last: bool) -> dict[str, nn.Module]:
        """Return embeddings, last norm and heads, as far as the stage has them."""
        modules = self.present(*self.embeddings) if first else {}
        if last:
            tied = ("token_embedding",) if self.tied_parameters else ()
            modules |= self.present(*tied, "final_norm") | self.head_modules
        return modules

    def column_linears(self) -> list[Linear]:
        """Return the projections whose outputs are divided in tensor parallelism."""
        return [
            one for block in self.layers for one in (block.attention.qkv, block.feed_forward.up)
        ]

    def row_linears(self) -> list[Linear]:
        """Return the projections whose inputs are divided in tensor parallelism."""
        outputs = [(block.attention.output, block.feed_forward.down) for block in self.layers]
        return [one for pair in outputs for one in pair]
