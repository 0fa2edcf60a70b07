"""Search of an index for the blocks with the highest scores: exactly, or by Faiss.

Shapes: Q questions, N blocks, P channels of a vector, K results of a question.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lmcore.base.errors import MissingPackageError

if TYPE_CHECKING:
    import numpy.typing as npt

    from lmcore.retrieval.index import BlockIndex

__all__ = ["ENGINES", "Found", "search"]

ENGINES = ("exact", "faiss")
_ROWS = 1 << 16
"""Vectors whose scores are computed at once."""


class Found(NamedTuple):
    """Blocks of each question, the best first.

    Attributes:
        scores: float32 [Q, K].
        blocks: Number of each block, int64 [Q, K].
    """

    scores: npt.NDArray[np.float32]
    blocks: npt.NDArray[np.int64]


def search(
    index: BlockIndex,
    questions_QP: npt.NDArray[np.float32],
    *,
    top: int,
    engine: str = "exact",
) -> Found:
    """Return the *top* blocks by the inner product with each question; fewer if there are fewer.

    Args:
        index: The index.
        questions_QP: Vectors of the questions.
        top: K.
        engine: One of `ENGINES`.

    Raises:
        MissingPackageError: Faiss is not installed.
    """
    top = min(top, index.record.blocks)
    if engine == "faiss":
        return _by_faiss(index, questions_QP, top)
    return _exact(index, questions_QP, top)


def _exact(index: BlockIndex, questions_QP: npt.NDArray[np.float32], top: int) -> Found:
    query_QP = torch.from_numpy(questions_QP)
    best: tuple[torch.Tensor, torch.Tensor] | None = None
    for first, vectors in index.shards():
        for start in range(0, len(vectors), _ROWS):
            part_NP = torch.from_numpy(np.array(vectors[start : start + _ROWS]))
            scores_QN = query_QP @ part_NP.T
            scores_QK, at_QK = scores_QN.topk(min(top, len(part_NP)), dim=1)
            at_QK = at_QK + first + start
            if best is not None:
                scores_QK = torch.cat([best[0], scores_QK], dim=1)
                at_QK = torch.cat([best[1], at_QK], dim=1)
                scores_QK, chosen_QK = scores_QK.topk(min(top, scores_QK.shape[1]), dim=1)
                at_QK = at_QK.gather(1, chosen_QK)
            best = scores_QK, at_QK
    assert best is not None
    return Found(best[0].numpy(), best[1].numpy())


def _by_faiss(index: BlockIndex, questions_QP: npt.NDArray[np.float32], top: int) -> Found:
    try:
        import faiss
    except ImportError as error:
        raise MissingPackageError(
            "faiss-cpu", needed_for="`--engine faiss`", install="pip install faiss-cpu"
        ) from error
    flat = faiss.IndexFlatIP(index.record.size)
    for _, vectors in index.shards():
        flat.add(np.ascontiguousarray(vectors))
    scores, blocks = flat.search(np.ascontiguousarray(questions_QP), top)
    return Found(scores, blocks)
