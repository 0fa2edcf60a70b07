"""Tokenizer of a dataset, rebuilt from its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.config.tokenizer import TokenizerIdentity, TokenizerSettings
from lmcore.data.indexed.metadata import metadata_path
from lmcore.data.tokenizer import Tokenizer, TokenizerFactory, tokenizer_from

__all__ = ["dataset_tokenizer"]

_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})
_HINT = "give the tokenizer and the paths of its files: `--tokenizer-type` and its options"


def dataset_tokenizer(
    identity: TokenizerIdentity, prefix: str, *, extra: Mapping[str, TokenizerFactory] = _NONE
) -> Tokenizer:
    """Build the tokenizer of a dataset.

    Args:
        identity: Tokenizer that its `PREFIX.meta.json` records.
        prefix: Prefix of the dataset, for messages.
        extra: Tokenizer types that plugins registered.

    Raises:
        ConfigError: Its files are missing or have changed, or its type is not registered.
    """
    try:
        tokenizer = tokenizer_from(TokenizerSettings.described(identity.description), extra=extra)
    except LmcoreError as error:
        raise ConfigError(
            f"the tokenizer that `{prefix}` was prepared with cannot be built: {error.what}",
            why=error.why,
            hint=_HINT,
        ) from error
    found = tokenizer.fingerprint()
    if found != identity.fingerprint:
        raise ConfigError(
            f"the tokenizer files that `{prefix}` was prepared with have changed",
            why=f"`{metadata_path(prefix)}` has the fingerprint {identity.fingerprint[:16]}, the "
            f"current files give {found[:16]}",
            hint=f"restore the files, or {_HINT}",
        )
    return tokenizer
