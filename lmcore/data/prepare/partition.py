"""Partitions of the input over several hosts, and joining their datasets.

A partition is a range of the input files, in order, so that the concatenated partitions are what
one host would have written, byte for byte.  Every host computes the same partitions; no host waits
for another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import ConfigError, DataError, LmcoreError, unreadable
from lmcore.data.indexed.files import replacing
from lmcore.data.input.files import InputFile
from lmcore.data.prepare.request import (
    KeyReport,
    PrepareReport,
    PrepareRequest,
)
from lmcore.data.prepare.resume_state import INDENT, Identity, changed_files, changed_settings

__all__ = ["join_partitions", "partition_files", "write_partition_record"]

_MAX_BYTES = 1 << 28


def partition_files(
    files: Sequence[InputFile], partition: int, partitions: int
) -> Sequence[InputFile]:
    """Return the files of a partition: at least one, and a similar number of bytes in each.

    Args:
        files: all input files.
        partition: number of the partition, from 0.
        partitions: number of partitions.

    Raises:
        ConfigError: more partitions than files, or an input without a size, such as a pipe.
    """
    if len(files) < partitions:
        raise ConfigError(
            f"`--partitions {partitions}` needs at least as many files, `--input` has {len(files)}",
            hint="split the largest ones, for example with `split -n l/8 FILE FILE.`",
        )
    try:
        ends = list(accumulate(Path(file.path).stat().st_size for file in files))
    except OSError as error:
        raise ConfigError(
            "`--partition` needs files of known size",
            why=f"`{error.filename}`: {error.strerror}",
        ) from None
    cuts = [0]
    for number in range(1, partitions):
        wanted = ends[-1] * number / partitions
        cut = sum(end <= wanted for end in ends)
        cuts.append(min(max(cut, cuts[-1] + 1), len(files) - (partitions - number)))
    cuts.append(len(files))
    return files[cuts[partition] : cuts[partition + 1]]


def _record_path(prefix: str) -> Path:
    return Path(f"{prefix}.json")


def write_partition_record(
    request: PrepareRequest, identity: Identity, report: PrepareReport
) -> None:
    """Write the record of a partition beside its files, for `join_partitions`.

    Args:
        request: request of the partition.
        identity: identity of the whole input.
        report: report of the partition.
    """
    content = {"identity": _common(identity), "report": asdict(report)}
    with replacing(_record_path(request.prefix)) as file:
        file.write(json.dumps(content, ensure_ascii=False).encode())


def _common(identity: Identity) -> Identity:
    """Return the identity without what may differ between hosts, such as directories."""
    settings = {name: value for name, value in identity["settings"].items() if name != "partition"}
    files = [[Path(path).name, kind, size] for path, kind, size, _ in identity["files"]]
    return json.loads(json.dumps({"settings": settings, "files": files}))  # type: ignore[no-any-return]


def join_partitions(request: PrepareRequest, identity: Identity) -> PrepareReport:
    """Join the partitions of all hosts to the datasets that one host would have written.

    The files of the partitions are kept.

    Args:
        request: request of the hosts, without `partition`.
        identity: identity of the whole input, on this host.

    Raises:
        ConfigError: partitions that are missing, or of other input or settings.
        DataError: a damaged dataset, or the file system refuses.
    """
    from lmcore.data.tools.merge import merge

    shares = [replace(request, partition=i) for i in range(request.partitions)]
    reports = _reports(shares, _common(identity))
    outputs = []
    for i, key in enumerate(request.json_keys):
        merged = merge(
            [share.key_prefix(key) for share in shares],
            request.key_prefix(key),
            overwrite=request.overwrite,
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
            record = json.loads(read_bounded_file(path, _MAX_BYTES))
            found, report = record["identity"], record["report"]
            differences = _differences(found, wanted)
        except FileNotFoundError:
            problems.append(
                DataError(
                    f"partition {share.partition} of {share.partitions} is missing: no `{path}`",
                    hint=f"prepare it with `--partition {share.partition}`",
                )
            )
        except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            why = unreadable(error) if isinstance(error, OSError) else str(error)
            problems.append(DataError(f"cannot read `{path}`", why=why))
        else:
            if differences:
                problems.append(
                    DataError(
                        f"partition {share.partition} has other input or settings (`{path}`)",
                        why=INDENT.join(differences),
                        hint=f"prepare it again with `--partition {share.partition}`",
                    )
                )
            reports.append(report)
    if problems:
        raise ConfigError.collect(problems)
    return reports


def _differences(found: Identity, wanted: Identity) -> list[str]:
    changes = changed_settings(found, wanted) + changed_files(found["files"], wanted["files"])
    return changes[:8] + ([f"and {len(changes) - 8} more"] if len(changes) > 8 else [])
