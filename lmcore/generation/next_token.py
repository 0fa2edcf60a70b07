"""The next token of continuations from the model's logits, and what the text becomes with it.

Shapes: B continuations, V padded vocabulary, W true vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lmcore.base.errors import RunError
from lmcore.generation.request import Continuation, TokenProbability
from lmcore.generation.sampling.logits import apply_penalties, sample

__all__ = ["extend", "not_finite", "probabilities"]


def extend(continuations: Sequence[Continuation], logits_BV: Tensor, vocab_size: int) -> list[int]:
    """Choose the next token of each continuation, append it, and return all of them.

    A continuation ends here if the token ends it, or with an error if its logits are not finite or
    its constraint or `ends` raises one; the others continue.

    Args:
        continuations: Continuations without an end.
        logits_BV: Logits over the padded vocabulary after the last token of each.
        vocab_size: Size of the vocabulary without padding, W.
    """
    logits_BW = logits_BV[:, :vocab_size]
    adjusted_BW = _adjusted(logits_BW, continuations)
    highest_B1, likeliest_B1 = adjusted_BW.max(dim=-1, keepdim=True)
    token_B = sample(
        adjusted_BW,
        [one.request.options for one in continuations],
        [one.generator for one in continuations],
        [len(one.tokens) for one in continuations],
        (highest_B1, likeliest_B1),
    )
    highest = highest_B1.squeeze(-1).tolist()
    tokens: list[int] = token_B.tolist()
    _note_probabilities(logits_BW, tokens, continuations)
    for one, token, value in zip(continuations, tokens, highest, strict=True):
        if one.error is not None:
            continue
        if not math.isfinite(value):
            one.error = not_finite(value)
            continue
        try:
            _append(one, token)
        except Exception as error:  # noqa: BLE001
            one.error = error
    return tokens


def probabilities(logits_BW: Tensor, tokens: Sequence[int], most: int) -> list[TokenProbability]:
    """Return the log-probability of a token for each row, and of the *most* highest.

    Args:
        logits_BW: Logits over the true vocabulary.
        tokens: Token of each row.
        most: Number of most probable tokens to name; 0: none.
    """
    logprobs_BW = logits_BW.float().log_softmax(dim=-1)
    index_B1 = torch.tensor(tokens, device=logits_BW.device).unsqueeze(-1)
    own = logprobs_BW.gather(-1, index_B1).squeeze(-1).tolist()
    if not most:
        return [TokenProbability(token, value) for token, value in zip(tokens, own, strict=True)]
    values, ids = logprobs_BW.topk(min(most, logits_BW.shape[-1]), dim=-1)
    tops = [
        tuple(zip(row_ids, row_values, strict=True))
        for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    return [
        TokenProbability(token, value, top)
        for token, value, top in zip(tokens, own, tops, strict=True)
    ]


def _adjusted(logits_BW: Tensor, continuations: Sequence[Continuation]) -> Tensor:
    """Return the logits after penalties and constraints."""
    changed = [
        (row, one)
        for row, one in enumerate(continuations)
        if one.request.options.has_penalties or one.request.constraint is not None
    ]
    if not changed:
        return logits_BW
    logits_BW = logits_BW.to(torch.promote_types(logits_BW.dtype, torch.float32), copy=True)
    for row, one in changed:
        request = one.request
        if request.options.has_penalties:
            apply_penalties(logits_BW[row], request.options, request.prompt, one.tokens)
        if request.constraint is not None:
            try:
                allowed_W = request.constraint.allowed(logits_BW.shape[-1])
            except Exception as error:  # noqa: BLE001
                one.error = error
                continue
            logits_BW[row].masked_fill_(~allowed_W.to(logits_BW.device), -math.inf)
    return logits_BW


def _note_probabilities(
    logits_BW: Tensor, tokens: Sequence[int], continuations: Sequence[Continuation]
) -> None:
    wanted = [row for row, one in enumerate(continuations) if one.request.top_logprobs is not None]
    if not wanted:
        return
    counts = [continuations[row].request.top_logprobs or 0 for row in wanted]
    found = probabilities(logits_BW[wanted], [tokens[row] for row in wanted], max(counts))
    for row, count, one in zip(wanted, counts, found, strict=True):
        own = TokenProbability(one.token, one.logprob, one.top[:count])
        continuations[row].logprobs.append(own)


def _append(continuation: Continuation, token: int) -> None:
    """Append a token, or end before or after it."""
    request = continuation.request
    if request.max_tokens == 0:
        continuation.finish_reason = "length"
    elif token in request.stop_tokens:
        continuation.finish_reason = "stop"
        continuation.stop_token = token
        if len(continuation.logprobs) > len(continuation.tokens):
            continuation.stop_logprob = continuation.logprobs[-1]
    else:
        continuation.tokens.append(token)
        complete = request.constraint is not None and request.constraint.accept(token)
        if complete or (request.ends is not None and request.ends(continuation.tokens)):
            continuation.finish_reason = "stop"
        elif len(continuation.tokens) == request.max_tokens:
            continuation.finish_reason = "length"
    del continuation.logprobs[len(continuation.tokens) :]


def not_finite(value: float) -> RunError:
    """Return the error of logits that are not finite.

    Args:
        value: The highest of them.
    """
    return RunError(
        f"the model's logits for the next token are not finite (the highest is {value})",
        why="the weights are not finite, or the precision overflowed",
        hint="try `--precision fp32`, or an earlier checkpoint",
    )
