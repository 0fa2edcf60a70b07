"""Comparison of the checksums that torch's files have, one for each record of their archive.

torch writes them and never compares them, so that a damaged weight would be read as another weight.
"""

from __future__ import annotations

import zipfile

__all__ = ["damaged_record"]

_PIECE_BYTES = 1 << 20


def damaged_record(archive: zipfile.ZipFile) -> str | None:
    """Return the name of the first record with a wrong checksum; None if all are right.

    Records without a checksum are passed over: torch can leave checksums out.

    Args:
        archive: Open archive.

    Raises:
        zipfile.BadZipFile: The archive itself is damaged.
    """
    for record in archive.infolist():
        if not record.CRC:
            continue
        with archive.open(record) as stream:
            try:
                while stream.read(_PIECE_BYTES):
                    pass
            except (zipfile.BadZipFile, EOFError):
                return record.filename
    return None
