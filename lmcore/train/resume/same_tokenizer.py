"""Comparison of a run's tokenizer with the one of the checkpoint that it loads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.checkpoint.layout import CHECKPOINTS_NAME
from lmcore.config.tokenizer import TokenizerIdentity, TokenizerSettings
from lmcore.conversion.native.manifest import recorded_type
from lmcore.data.tokenizer import tokenizer_from
from lmcore.data.tokenizer.comparison import may_be_same, same_tokens
from lmcore.data.tokenizer.saved import saved_tokenizer_settings
from lmcore.errors import ConfigError, LmcoreError
from lmcore.log import ALL_RANKS
from lmcore.train.resume.saved_meta import part_of

if TYPE_CHECKING:
    from lmcore.checkpoint import Manifest
    from lmcore.config.plan import RunPlan

__all__ = ["report_unknown_tokenizer", "tokenizer_problem"]

logger = logging.getLogger(__name__)


def report_unknown_tokenizer(plan: RunPlan, manifest: Manifest) -> None:
    """Log that the run's tokenizer is not compared with the checkpoint's, which lacks its files.

    Args:
        plan: The run.
        manifest: Manifest of the checkpoint.
    """
    recorded, now = recorded_type(manifest.meta), plan.tokenizer.type
    tokens = part_of(manifest.meta, "config", "derived").get("vocab_size")
    own = plan.tokenizer.vocab_size
    if isinstance(tokens, int) and own < tokens:
        logger.warning(
            "this run's tokenizer, `%s`, has %d tokens, and the checkpoint %d: is it the one that "
            "the model was trained with?",
            *(now, own, tokens),
            extra=ALL_RANKS,
        )
    if recorded is None:
        logger.warning(
            "the checkpoint does not record its tokenizer: it is not compared with this run's `%s`",
            now,
            extra=ALL_RANKS,
        )
        return
    logger.log(
        logging.INFO if recorded == now else logging.WARNING,
        "the checkpoint has only the name of its tokenizer, `%s`: its tokens are not compared with "
        "this run's `%s`",
        recorded,
        now,
        extra=ALL_RANKS,
    )


def tokenizer_problem(plan: RunPlan, checkpoint: Path, manifest: Manifest) -> ConfigError | None:
    """Return the difference of the tokenizers; None if they are equal or it is accepted.

    Args:
        plan: The run.
        checkpoint: Directory of the checkpoint.
        manifest: Manifest of the checkpoint.
    """
    saved = part_of(manifest.meta, "tokenizer")
    fingerprint, now = saved.get("fingerprint"), plan.tokenizer
    if plan.config.checkpoint.change_tokenizer or not now.fingerprint:
        return None
    if fingerprint is None:
        return _type_problem(plan, manifest)
    if fingerprint == now.fingerprint:
        return None
    if _same_tokens(saved, checkpoint, now):
        return None
    kind = part_of(saved, "describe").get("type", "unknown")
    return ConfigError(
        "the tokenizer is not the checkpoint's",
        why=f"checkpoint: `{kind}`; this run: `{now.type}`, "
        f"{'of other files' if kind == now.type else 'whose token ids have other meanings'}",
        hint=f"{_tokenizer_hint(saved, checkpoint)}; `--change-tokenizer` accepts the difference",
    )


def _type_problem(plan: RunPlan, manifest: Manifest) -> ConfigError | None:
    """Return the difference from a tokenizer if the checkpoint has only the name of its type."""
    recorded, now = recorded_type(manifest.meta), plan.tokenizer.type
    if recorded is None or may_be_same(recorded, now):
        return None
    return ConfigError(
        "the tokenizer is not the checkpoint's",
        why=f"checkpoint: `{recorded}`; this run: `{now}`, whose token ids have other meanings",
        hint=f"use the checkpoint's, `--tokenizer-type {recorded}` with its files, and data "
        "prepared with it; `--change-tokenizer` accepts the difference",
    )


def _same_tokens(saved: Mapping[str, Any], checkpoint: Path, now: TokenizerIdentity) -> bool:
    """Return True if the run's tokenizer has the same token for each id as the checkpoint's.

    Args:
        saved: Record of the tokenizer in the manifest.
        checkpoint: Directory of the checkpoint.
        now: Tokenizer of the run.
    """
    settings = _saved_tokenizer(saved, checkpoint)
    try:
        if settings is None:
            return False
        before = tokenizer_from(settings)
        is_saved = before.fingerprint() == saved.get("fingerprint")
        described = TokenizerSettings.described(now.description)
        return is_saved and same_tokens(before, tokenizer_from(described))
    except LmcoreError:  # files are gone, or the type is a plugin's
        return False


def _saved_tokenizer(saved: Mapping[str, Any], checkpoint: Path) -> TokenizerSettings | None:
    """Return settings that build a checkpoint's tokenizer; None without any.

    The copy in the run directory comes first, then the recorded settings: another program's
    checkpoint is in no run directory.
    """
    try:
        if checkpoint.parent.name == CHECKPOINTS_NAME:
            copy = saved_tokenizer_settings(checkpoint.parent.parent / "tokenizer")
            if copy is not None:
                return copy
        described = TokenizerSettings.described(part_of(saved, "describe"))
    except LmcoreError:
        return None
    return described if described.tokenizer_type is not None else None


def _tokenizer_hint(saved: Mapping[str, Any], checkpoint: Path) -> str:
    """Return how to use the tokenizer of a checkpoint, by the copy in its run's directory."""
    settings = _saved_tokenizer(saved, checkpoint)
    if settings is None:
        return "use data prepared with the checkpoint's tokenizer"
    given = " ".join([f"--tokenizer-type {settings.tokenizer_type}", *settings.given().values()])
    return f"use the checkpoint's, `{given}`, and data prepared with it"
