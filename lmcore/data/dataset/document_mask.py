"""Document-boundary mask: position ids, attention and loss inside samples of several documents.

The end-of-document token belongs to the document that it ends.

Shapes: B micro-batch, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DocumentMasks"]


@dataclass(frozen=True)
class DocumentMasks:
    """Document-boundary masks of a run.

    Attributes:
        eod: Id of the end-of-document token.
        reset_position_ids: True if position ids start at 0 in each document.
        reset_attention_mask: True if tokens attend only to tokens of the same document.
        eod_mask_loss: True if the first token of the next document, which the end-of-document
            token predicts, is excluded from the loss.

    Source:
        Megatron-LM, `get_ltor_masks_and_position_ids` and the options of the same names.
    """

    eod: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def positions(self, tokens_BS: Tensor) -> Tensor | None:
        """Return int64 [B, S], the position of each token in its document; None if not reset."""
        if not self.reset_position_ids:
            return None
        import torch

        positions_S = torch.arange(tokens_BS.shape[1])
        after_end_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
        after_end_BS[:, 1:] = tokens_BS[:, :-1] == self.eod
        starts_BS = torch.where(after_end_BS, positions_S, 0).cummax(dim=1).values
        return positions_S - starts_BS

    def documents(self, tokens_BS: Tensor) -> Tensor | None:
        """Return int32 [B, S], the number of each token's document, from 0; None if not reset."""
        if not self.reset_attention_mask:
            return None
        import torch

        ends_BS = (tokens_BS == self.eod).to(torch.int32)
        return ends_BS.cumsum(dim=1, dtype=torch.int32) - ends_BS

    def loss_mask(self, tokens_BS: Tensor) -> Tensor:
        """Return float32 [B, S], the weight of each token's target in the loss: 0 or 1."""
        import torch

        if self.eod_mask_loss:
            return (tokens_BS != self.eod).to(torch.float32)
        return torch.ones(tokens_BS.shape, dtype=torch.float32)
