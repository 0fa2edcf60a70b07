"""`PREFIX.meta.json`: which tokenizer made a dataset, and what it counted.

Megatron's two files do not say what their numbers mean.  This one beside them does; datasets of
other tools do without.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lmcore import __version__
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.data.indexed.files import disk_errors, replacing
from lmcore.data.tokenizer import Tokenizer
from lmcore.errors import DataError

__all__ = [
    "DatasetMetadata",
    "metadata_path",
    "read_metadata",
    "remove_metadata",
    "write_metadata",
]


@dataclass(frozen=True)
class DatasetMetadata:
    """What `PREFIX.meta.json` says.

    Attributes:
        tokenizer: `Tokenizer.describe()`: the type, and what rebuilds it.
        vocab_size: Number of real ids.
        eod: The end-of-document id, or None.
        fingerprint: `Tokenizer.fingerprint()`; equal for equal tokenizers, wherever files lie.
        append_eod: Whether each document ends with the end-of-document id.
        documents: Of the dataset.
        sequences: Likewise.
        tokens: Likewise.
        dtype: Type of a stored token.
        lmcore_version: What wrote it.
    """

    tokenizer: dict[str, str | int | None]
    vocab_size: int
    eod: int | None
    fingerprint: str
    append_eod: bool
    documents: int
    sequences: int
    tokens: int
    dtype: str
    lmcore_version: str

    @property
    def identity(self) -> TokenizerIdentity:
        """The tokenizer that made the data set."""
        return TokenizerIdentity(self.vocab_size, self.eod, self.fingerprint, self.tokenizer)

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        *,
        append_eod: bool,
        documents: int,
        sequences: int,
        tokens: int,
        dtype: str,
    ) -> DatasetMetadata:
        """Describe a dataset that *tokenizer* made."""
        return cls(
            tokenizer=tokenizer.describe(),
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            fingerprint=tokenizer.fingerprint(),
            append_eod=append_eod,
            documents=documents,
            sequences=sequences,
            tokens=tokens,
            dtype=dtype,
            lmcore_version=__version__,
        )


def metadata_path(prefix: str | Path) -> Path:
    """Return where the metadata of a dataset lies."""
    return Path(f"{prefix}.meta.json")


def read_metadata(prefix: str | Path) -> DatasetMetadata | None:
    """Return the metadata of a dataset, or None where there is none.

    Raises:
        DataError: The file is there and not what it should be.
    """
    path = metadata_path(prefix)
    try:
        with path.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise DataError(
                f"`{path}` is no metadata of a dataset",
                why=f"it has more than {_MAX_BYTES:,} bytes, as none has",
                hint=_HINT,
            )
        values = json.loads(content)
        found = {field.name: values[field.name] for field in fields(DatasetMetadata)}
    except FileNotFoundError:
        return None
    except KeyError as error:
        raise DataError(f"`{path}` has no `{error.args[0]}`", hint=_HINT) from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"cannot read `{path}`", why=str(error), hint=_HINT) from None
    for name, value in found.items():
        if type(value) not in _KINDS.get(name, (int,)):
            raise DataError(
                f"`{path}`: `{name}` is {json.dumps(value)[:60]}",
                why="no dataset has that",
                hint=_HINT,
            )
    return DatasetMetadata(**found)


_HINT = "prepare the data anew, or remove the file: the dataset can be read without it"
_MAX_BYTES = 1 << 20
_KINDS: dict[str, tuple[type, ...]] = {
    "tokenizer": (dict,),
    "eod": (int, type(None)),
    "fingerprint": (str,),
    "append_eod": (bool,),
    "dtype": (str,),
    "lmcore_version": (str,),
}
"""Types of the fields that are not whole numbers."""


def write_metadata(prefix: str | Path, metadata: DatasetMetadata) -> None:
    """Write the metadata of a dataset; the file appears whole."""
    text = json.dumps(asdict(metadata), indent=1, ensure_ascii=False)
    with replacing(metadata_path(prefix)) as file:
        file.write(f"{text}\n".encode())


def remove_metadata(prefix: str | Path) -> None:
    """Remove the metadata of an older dataset of that name."""
    path = metadata_path(prefix)
    with disk_errors(path):
        path.unlink(missing_ok=True)
