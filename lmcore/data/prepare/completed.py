"""Record of a completed preparation, `PREFIX.prepared.json`, by which `--resume` recognizes it.

A job that is restarted after its dataset is complete ends at once instead of starting over.  Runs
with `--resume` write the record; it is valid as long as the files are unchanged.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmcore.bounded_file import read_bounded_file
from lmcore.data.indexed.files import replacing
from lmcore.data.indexed.metadata import metadata_path
from lmcore.data.prepare.request import KeyReport, PrepareReport, PrepareRequest
from lmcore.data.prepare.resume_state import Identity, changed_files, changed_settings

__all__ = ["read_completed", "remove_completed", "write_completed"]

_log = logging.getLogger(__name__)
_VERSION = 1
_MAX_BYTES = 1 << 28  # a corpus of a million files


def _path(request: PrepareRequest) -> Path:
    return Path(f"{request.prefix}.prepared.json")


def remove_completed(request: PrepareRequest) -> None:
    """Remove the record of an older dataset before its files are replaced."""
    _path(request).unlink(missing_ok=True)


def write_completed(request: PrepareRequest, identity: Identity, report: PrepareReport) -> None:
    """Write the record after all files have their final names.

    Raises:
        DataError: the file system refuses.
    """
    content = {
        "version": _VERSION,
        "identity": identity,
        "files": _files(request),
        "report": asdict(report),
    }
    with replacing(_path(request)) as file:
        file.write(json.dumps(content, ensure_ascii=False).encode())


def read_completed(request: PrepareRequest, identity: Identity) -> PrepareReport | None:
    """Return the report of an earlier run with the same input and settings; None if there is none.

    For a dataset of other input or settings, log the differences and return None.
    """
    try:
        content = json.loads(read_bounded_file(_path(request), _MAX_BYTES))
        if content["version"] != _VERSION or content["files"] != _files(request):
            return None
        recorded, report = content["identity"], _report_of(content["report"])
        changes = changed_settings(recorded, identity)
        changes += changed_files(recorded["files"], identity["files"])
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        RecursionError,
    ):
        return None  # not written by this version
    if changes:
        listed = "; ".join(changes[:3])
        _log.warning("`%s` has other input or settings; %s", request.prefix, listed)
        return None
    _log.warning(
        "`%s` is complete, from the same input and settings: nothing to do",
        request.prefix,
    )
    return report


def _files(request: PrepareRequest) -> list[list[Any]]:
    """Return name, size and modification time of each file of the datasets."""
    paths = []
    for prefix in map(request.key_prefix, request.json_keys):
        paths += [Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), Path(metadata_path(prefix))]
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def _report_of(values: dict[str, Any]) -> PrepareReport:
    outputs = tuple(KeyReport(**output) for output in values["outputs"])
    return PrepareReport(**{**values, "files": tuple(values["files"]), "outputs": outputs})
