"""What ends with a document inside a sample: positions, attention, and the loss after its end.

The rules are Megatron's.  The end-of-document token belongs to the document that it ends.

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
    """Which of the three a run asks for.

    Attributes:
        eod: The end-of-document token.
        reset_position_ids: Whether positions count from the start of each document.
        reset_attention_mask: Whether tokens attend to their own document only.
        eod_mask_loss: Whether the token after an end is left out of the loss.
    """

    eod: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def positions(self, tokens_BS: Tensor) -> Tensor | None:
        """Return int64 [B, S], each token's place in its document; None if not asked for."""
        if not self.reset_position_ids:
            return None
        import torch

        places_S = torch.arange(tokens_BS.shape[1])
        after_end_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
        after_end_BS[:, 1:] = tokens_BS[:, :-1] == self.eod
        starts_BS = torch.where(after_end_BS, places_S, 0).cummax(dim=1).values
        return places_S - starts_BS

    def documents(self, tokens_BS: Tensor) -> Tensor | None:
        """Return int32 [B, S], which document of the sample a token is in; None as above."""
        if not self.reset_attention_mask:
            return None
        import torch

        ends_BS = (tokens_BS == self.eod).to(torch.int32)
        return ends_BS.cumsum(dim=1, dtype=torch.int32) - ends_BS

    def loss_mask(self, tokens_BS: Tensor) -> Tensor:
        """Return float32 [B, S], how much the target of each token counts: 0 or 1."""
        import torch

        if self.eod_mask_loss:
            return (tokens_BS != self.eod).to(torch.float32)
        return torch.ones(tokens_BS.shape, dtype=torch.float32)
