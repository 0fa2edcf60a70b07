"""Metadata of a dataset, `PREFIX.meta.json`: its tokenizer, counts of tokens, and checksums.

Megatron's two files do not record the tokenizer.  Datasets of other tools have no metadata file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lmcore import __version__
from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import DataError
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.data.indexed.checksums import DatasetChecksums
from lmcore.data.indexed.files import disk_errors, replacing
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.tokenizer import Tokenizer

__all__ = [
    "DatasetMetadata",
    "commit",
    "metadata_path",
    "read_metadata",
    "remove_metadata",
    "verify_files",
    "write_metadata",
]


@dataclass(frozen=True)
class DatasetMetadata:
    """Content of `PREFIX.meta.json`.

    Attributes:
        tokenizer: Result of `Tokenizer.describe()`: type and settings that rebuild the tokenizer.
        vocab_size: Number of ids without padding.
        eod: Id of the end-of-document token, or None.
        fingerprint: Result of `Tokenizer.fingerprint()`, equal for equal tokenizers.
        append_eod: True if each document ends with the end-of-document token.
        documents: Number of documents.
        sequences: Number of sequences.
        tokens: Number of tokens.
        dtype: Type of a stored token.
        lmcore_version: Version of lmcore that wrote the file.
        checksums: Checksums of the two files; None in the metadata of older versions.
        input_files: Number of files that the documents come from; None if unknown.
        shuffle: Seed that the documents were shuffled with; None: they are in the input's order.
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
    checksums: DatasetChecksums | None = None
    input_files: int | None = None
    shuffle: int | None = None

    @property
    def identity(self) -> TokenizerIdentity:
        """Identity of the tokenizer that made the dataset."""
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
        checksums: DatasetChecksums | None = None,
        input_files: int | None = None,
        shuffle: int | None = None,
    ) -> DatasetMetadata:
        """Return the metadata of a dataset that *tokenizer* made; see the attributes."""
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
            checksums=checksums,
            input_files=input_files,
            shuffle=shuffle,
        )


def metadata_path(prefix: str | Path) -> Path:
    """Return the path of a dataset's metadata file."""
    return Path(f"{prefix}.meta.json")


def read_metadata(prefix: str | Path) -> DatasetMetadata | None:
    """Return the metadata of a dataset, or None if it has no metadata file.

    Raises:
        DataError: The metadata file is invalid.
    """
    path = metadata_path(prefix)
    try:
        values = json.loads(read_bounded_file(path, _MAX_BYTES))
        found = {
            field.name: values.get(field.name) if field.name in _OPTIONAL else values[field.name]
            for field in fields(DatasetMetadata)
            if field.name != "checksums"
        }
        described = values.get("checksums")
        checksums = None if described is None else DatasetChecksums.of_json(described)
    except FileNotFoundError:
        return None
    except KeyError as error:
        raise DataError(f"`{path}` has no `{error.args[0]}`", hint=_HINT) from None
    except OSError as error:
        why = error.strerror or str(error)
        raise DataError(f"cannot read `{path}`", why=why, hint=_HINT) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"cannot read `{path}`", why=str(error), hint=_HINT) from None
    for name, value in found.items():
        kinds = _KINDS.get(name, (int,))
        if type(value) not in kinds:
            raise DataError(
                f"`{path}`: `{name}` is {json.dumps(value)[:60]}",
                why=f"expected {' or '.join(kind.__name__ for kind in kinds)}",
                hint=_HINT,
            )
    return DatasetMetadata(**found, checksums=checksums)


_HINT = "prepare the data again, or delete this file: the dataset can be read without it"
_MAX_BYTES = 1 << 25
_KINDS: dict[str, tuple[type, ...]] = {
    "tokenizer": (dict,),
    "eod": (int, type(None)),
    "fingerprint": (str,),
    "append_eod": (bool,),
    "dtype": (str,),
    "lmcore_version": (str,),
    "input_files": (int, type(None)),
    "shuffle": (int, type(None)),
}
"""Types of the fields that are not integers."""
_OPTIONAL = ("checksums", "input_files", "shuffle")
"""Fields that the files of older versions lack; None is not written."""


def write_metadata(prefix: str | Path, metadata: DatasetMetadata) -> None:
    """Write the metadata of a dataset; the file appears complete."""
    values = asdict(metadata)
    values = {
        name: value for name, value in values.items() if value is not None or name not in _OPTIONAL
    }
    text = json.dumps(values, indent=1, ensure_ascii=False)
    with replacing(metadata_path(prefix)) as file:
        file.write(f"{text}\n".encode())


def verify_files(prefix: str | Path, share: tuple[int, int] | None = None) -> int | None:
    """Compare the files of a dataset with the checksums in its metadata.

    Args:
        prefix: Path of the dataset without ending.
        share: Number of this process and of all processes that divide the blocks of the `.bin`
            among them; None for a few blocks.  The `.idx` is always verified as a whole.

    Returns:
        Number of bytes of the `.bin` that were verified; None if there are no checksums.

    Raises:
        DataError: The files do not match their checksums, or the metadata is invalid.
    """
    metadata = read_metadata(prefix)
    if metadata is None or metadata.checksums is None:
        return None
    checksums = metadata.checksums
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    own = None if share is None else range(share[0], checksums.blocks, share[1])
    blocks = checksums.sample() if own is None else list(own)
    problem = checksums.idx_problem(idx_path) or checksums.bin_problem(bin_path, blocks)
    if problem is not None:
        raise DataError(
            f"the dataset `{prefix}` is damaged",
            why=problem,
            hint="restore the files from a copy, or prepare the data again; if another tool wrote "
            f"them on purpose, remove `{metadata_path(prefix)}`, which describes other files",
        )
    return min(len(blocks) * checksums.block_bytes, checksums.bin_bytes)


def commit(
    writer: IndexedDatasetWriter,
    tokenizer: Tokenizer,
    *,
    append_eod: bool,
    input_files: int | None = None,
) -> None:
    """Give the files of a writer their names and write their metadata, with checksums.

    Args:
        writer: Writer with all documents.
        tokenizer: Tokenizer of the documents.
        append_eod: True if each document ends with the tokenizer's end of a document.
        input_files: Number of files that were read; None: it is not recorded.

    Raises:
        DataError: The disk is full or refuses.
    """
    writer.finish()
    checksums = writer.checksums()
    remove_metadata(writer.prefix)
    writer.commit()
    metadata = DatasetMetadata.of(
        tokenizer,
        append_eod=append_eod,
        documents=writer.documents,
        sequences=writer.sequences,
        tokens=writer.tokens,
        dtype=writer.dtype.name,
        checksums=checksums,
        input_files=input_files,
    )
    write_metadata(writer.prefix, metadata)


def remove_metadata(prefix: str | Path) -> None:
    """Remove the metadata file of an older dataset of that name."""
    path = metadata_path(prefix)
    with disk_errors(path):
        path.unlink(missing_ok=True)
