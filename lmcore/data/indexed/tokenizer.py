"""The tokenizer that a data set was prepared with, built again from its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lmcore.config.tokenizer import TokenizerIdentity, TokenizerSettings
from lmcore.data.indexed.metadata import metadata_path
from lmcore.data.tokenizer import Tokenizer, TokenizerFactory, tokenizer_from
from lmcore.errors import ConfigError, LmcoreError

__all__ = ["dataset_tokenizer"]

_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})
_HINT = "name the tokenizer and where its files are now: `--tokenizer-type` and its options"


def dataset_tokenizer(
    identity: TokenizerIdentity, prefix: str, *, extra: Mapping[str, TokenizerFactory] = _NONE
) -> Tokenizer:
    """Build the tokenizer of a data set.

    Args:
        identity: Tokenizer that its `PREFIX.meta.json` records.
        prefix: Prefix of the data set, for messages.
        extra: Tokenizer types that plugins registered.

    Raises:
        ConfigError: Its files are gone or were altered since, or its type is not there.
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
            f"files as they are now give {found[:16]}",
            hint=f"restore the files, or {_HINT}",
        )
    return tokenizer
