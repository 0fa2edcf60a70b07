"""The shares of several hosts: which files each one prepares, and all shares as one dataset.

A share is a run of files of the input's order, so that the shares one after another are what one
host would have written, byte for byte.  Every host works out all shares alike; no host waits for
another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from lmcore.data.indexed.files import replacing
from lmcore.data.input.files import InputFile
from lmcore.data.prepare.request import (
    KeyReport,
    PrepareReport,
    PrepareRequest,
)
from lmcore.data.prepare.resume_state import INDENT, Identity, changed_files, changed_settings
from lmcore.errors import ConfigError, DataError, LmcoreError

__all__ = ["join_partitions", "partition_files", "write_partition_record"]

_MAX_BYTES = 1 << 28


def partition_files(
    files: Sequence[InputFile], partition: int, partitions: int
) -> Sequence[InputFile]:
    """Return the files of a share; the shares have about as many bytes each, and a file at least.

    Raises:
        ConfigError: There are more shares than files, or a file that cannot be divided by its
            size, such as a pipe.
    """
    if len(files) < partitions:
        raise ConfigError(
            f"`--partitions {partitions}` needs as many files, and `--input` names {len(files)}",
            hint="cut the largest ones, for example with `split -n l/8 FILE FILE.`",
        )
    try:
        ends = list(accumulate(Path(file.path).stat().st_size for file in files))
    except OSError as error:
        raise ConfigError(
            "`--partition` needs files whose sizes are known",
            why=f"`{error.filename}`: {error.strerror}",
        ) from None
    cuts = [0]
    for share in range(1, partitions):
        wanted = ends[-1] * share / partitions
        cut = sum(end <= wanted for end in ends)
        cuts.append(min(max(cut, cuts[-1] + 1), len(files) - (partitions - share)))
    cuts.append(len(files))
    return files[cuts[partition] : cuts[partition + 1]]


def _record_path(prefix: str) -> Path:
    return Path(f"{prefix}.json")


def write_partition_record(
    request: PrepareRequest, identity: Identity, report: PrepareReport
) -> None:
    """Say beside a share's files what they are, for `join_partitions`.

    Args:
        request: Of the share.
        identity: Of the whole input.
        report: What the share gave.
    """
    content = {"identity": _common(identity), "report": asdict(report)}
    with replacing(_record_path(request.prefix)) as file:
        file.write(json.dumps(content, ensure_ascii=False).encode())


def _common(identity: Identity) -> Identity:
    """Return the part of an identity that all shares have: hosts may see files elsewhere."""
    settings = {name: value for name, value in identity["settings"].items() if name != "partition"}
    files = [[Path(path).name, kind, size] for path, kind, size, _ in identity["files"]]
    return json.loads(json.dumps({"settings": settings, "files": files}))  # type: ignore[no-any-return]


def join_partitions(request: PrepareRequest, identity: Identity) -> PrepareReport:
    """Put the shares of all hosts together; the bytes are those of one host's run.

    The shares' own files stay.

    Args:
        request: The one that each host had, without `partition`.
        identity: Of the whole input, as this host sees it.

    Raises:
        DataError: A share is missing, or was made of other input or with other settings.
    """
    from lmcore.data.tools.merge import merge

    shares = [replace(request, partition=i) for i in range(request.partitions)]
    reports = _reports(shares, _common(identity))
    outputs = []
    for i, key in enumerate(request.json_keys):
        merged = merge(
            [share.key_prefix(key) for share in shares],
            request.key_prefix(key),
        )
        empty = sum(report["outputs"][i]["empty"] for report in reports)
        size = Path(f"{merged.prefix}.bin").stat().st_size
        outputs.append(
            KeyReport(
                key, merged.prefix, merged.documents, merged.tokens, empty, size, merged.dtype
            )
        )
    skipped: dict[str, int] = {}
    for report in reports:
        for reason, count in report["skipped"].items():
            skipped[reason] = skipped.get(reason, 0) + count
    return PrepareReport(
        files=tuple(name for report in reports for name in report["files"]),
        documents=sum(report["documents"] for report in reports),
        json_bytes=sum(report["json_bytes"] for report in reports),
        seconds=max(report["seconds"] for report in reports),
        skipped=skipped,
        outputs=tuple(outputs),
    )


def _reports(shares: Sequence[PrepareRequest], wanted: Identity) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = []
    problems: list[LmcoreError] = []
    for share in shares:
        path = _record_path(share.prefix)
        try:
            with path.open("rb") as file:
                record = json.loads(file.read(_MAX_BYTES))
            found, report = record["identity"], record["report"]
            differences = _differences(found, wanted)
        except FileNotFoundError:
            problems.append(
                DataError(
                    f"share {share.partition} of {share.partitions} is missing: no `{path}`",
                    hint=f"prepare it with `--partition {share.partition}`",
                )
            )
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            problems.append(DataError(f"cannot read `{path}`", why=str(error)))
        else:
            if differences:
                problems.append(
                    DataError(
                        f"share {share.partition} was made otherwise (`{path}`)",
                        why=INDENT.join(differences),
                        hint=f"prepare it again with `--partition {share.partition}`",
                    )
                )
            reports.append(report)
    if problems:
        raise ConfigError.collect(problems)
    return reports


def _differences(found: Identity, wanted: Identity) -> list[str]:
    told = changed_settings(found, wanted) + changed_files(found["files"], wanted["files"])
    return told[:8] + ([f"and {len(told) - 8} more"] if len(told) > 8 else [])
