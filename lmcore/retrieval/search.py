"""Search of an index for the blocks with the highest scores: exactly, or by Faiss.

Shapes: Q questions, N blocks, P channels of a vector, K results of a question.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lmcore.base.errors import MissingPackageError

if TYPE_CHECKING:
    import numpy.typing as npt

    from lmcore.retrieval.index import BlockIndex

__all__ = ["ENGINES", "Found", "load_faiss", "nearest", "search"]

ENGINES = ("exact", "faiss")
_ROWS = 1 << 16
"""Vectors whose scores are computed at once."""
_QUERIES = 1 << 9
"""Queries whose scores are computed at once."""


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
    return nearest(index.shards(), questions_QP, top=top)


def nearest(
    vectors: Iterable[tuple[int, npt.NDArray[np.float32]]],
    queries_QP: npt.NDArray[np.float32],
    *,
    top: int,
    inner_product: bool = True,
) -> Found:
    """Return the *top* vectors with the largest inner products, or the least distances, exactly.

    Args:
        vectors: Number of the first vector, and the vectors, of each part.
        queries_QP: Vectors to compare with.
        top: K; at most the number of all vectors.
        inner_product: False to compare by the distance; scores are then its negative square.  Of
            equal scores the lower number comes first.
    """
    query_QP, center_P = torch.from_numpy(queries_QP), None
    best: list[tuple[torch.Tensor, torch.Tensor]] = []
    slices = [slice(at, at + _QUERIES) for at in range(0, len(query_QP), _QUERIES)]
    for first, part in vectors:
        for start in range(0, len(part), _ROWS):
            part_NP = torch.from_numpy(np.array(part[start : start + _ROWS]))
            half_N = None
            if not inner_product:
                # Distances do not depend on the origin, but products far from it are rounded.
                if center_P is None:
                    center_P = part_NP.double().mean(dim=0).float()
                    query_QP = query_QP - center_P
                part_NP = part_NP - center_P
                half_N = part_NP.square().sum(dim=1) / 2
            for number, chosen in enumerate(slices):
                scores_QN = query_QP[chosen] @ part_NP.T
                if half_N is not None:
                    scores_QN -= half_N
                scores_QK, at_QK = scores_QN.topk(min(top, len(part_NP)), dim=1)
                at_QK += first + start
                if number == len(best):
                    best.append((scores_QK, at_QK))
                    continue
                scores_QK = torch.cat([best[number][0], scores_QK], dim=1)
                at_QK = torch.cat([best[number][1], at_QK], dim=1)
                scores_QK, kept_QK = scores_QK.topk(min(top, scores_QK.shape[1]), dim=1)
                best[number] = scores_QK, at_QK.gather(1, kept_QK)
    assert best
    scores = torch.cat([one for one, _ in best]).numpy()
    found = torch.cat([one for _, one in best]).numpy()
    order = np.lexsort((found, -scores), axis=1)
    scores, found = (np.take_along_axis(one, order, axis=1) for one in (scores, found))
    if not inner_product:
        scores = 2 * scores - query_QP.square().sum(dim=1, keepdim=True).numpy()
    return Found(scores, found)


def _by_faiss(index: BlockIndex, questions_QP: npt.NDArray[np.float32], top: int) -> Found:
    faiss = load_faiss("`--engine faiss`")
    flat = faiss.IndexFlatIP(index.record.size)
    for _, vectors in index.shards():
        flat.add(np.ascontiguousarray(vectors))
    scores, blocks = flat.search(np.ascontiguousarray(questions_QP), top)
    return Found(scores, blocks)


def load_faiss(needed_for: str) -> Any:
    """Return the module of Faiss.

    Raises:
        MissingPackageError: It is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise MissingPackageError(
            "faiss-cpu", needed_for=needed_for, install="pip install faiss-cpu"
        ) from error
    return faiss
