"""Data file lists and metadata files of a run's sources, read and checked before data is opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, LmcoreError, counted
from lmcore.config.derived.data_source import Blend, DataSource, RunSources
from lmcore.data.blend.file_list import read_data_file_list
from lmcore.data.indexed.metadata import read_metadata
from lmcore.data.task.table import inspect_task

if TYPE_CHECKING:
    from lmcore.data.indexed.metadata import DatasetMetadata

__all__ = ["inspect_sources"]


def inspect_sources(sources: RunSources) -> tuple[RunSources, list[LmcoreError]]:
    """Read the data file lists of a run and the metadata beside its datasets.

    Args:
        sources: Sources as the flags name them.

    Returns:
        The sources with the datasets of file lists in place of the lists, each dataset with the
        tokenizer that made it; and every problem that the rules of the configuration do not find:
        bad lists, bad metadata, datasets of different tokenizers.
    """
    problems: list[LmcoreError] = []
    if sources.task is not None:
        return inspect_task(sources)
    divided = sources.divided
    if divided is not None and divided.file_list is not None:
        if not Path(divided.file_list).is_file():
            return sources, []
        try:
            listed, problems, note = _read_list(divided.file_list)
        except LmcoreError as problem:
            return sources, [problem]
        sources = replace(sources, divided=replace(divided, sources=listed, note=note))
    metadata: dict[str, DatasetMetadata] = {}
    prefixes = [s.name for blend in sources.blends() for s in blend.sources if s.is_dataset]
    for prefix in dict.fromkeys(prefixes):
        try:
            found = read_metadata(prefix)
        except LmcoreError as problem:
            problems.append(problem)
        else:
            metadata |= {prefix: found} if found is not None else {}
    return _with_metadata(sources, metadata), [*problems, *_different_tokenizers(metadata)]


def _read_list(path: str) -> tuple[tuple[DataSource, ...], list[LmcoreError], str]:
    """Return the datasets of a data file list, its problems, and a note on datasets of one name."""
    files, problems = read_data_file_list(path)
    found = [_find(file.path, Path(path).parent) for file in files]
    problems += [
        ConfigError(
            f"`--data-file-list {path}` names `{prefix}` twice",
            why="the same samples would be repeated in the same order",
            hint="name it once, with a larger weight",
        )
        for prefix, count in Counter(prefix for prefix, _ in found).items()
        if count > 1
    ]
    lost = [
        f"`{prefix}{missing[0]}`"
        for prefix in dict.fromkeys(prefix for prefix, _ in found)
        if (missing := [end for end in _ENDINGS if not Path(f"{prefix}{end}").is_file()])
    ]
    if lost:
        problem = ConfigError(
            f"`--data-file-list {path}`: {len(lost)} of {counted(len(files), 'dataset')} "
            f"{'does' if len(lost) == 1 else 'do'} not exist",
            why=f"no file {', '.join(lost[:5])}{', ...' * (len(lost) > 5)}; relative paths are "
            "relative to the working directory, else to the list's",
            hint="if the data has moved, write the list again with `lmcore data weights --rebase`",
        )
        problems.append(problem)
    listed = tuple(
        DataSource(prefix, file.weight) for (prefix, _), file in zip(found, files, strict=True)
    )
    return listed, problems, _note(path, [(used, other) for used, other in found if other])


_ENDINGS = (".idx", ".bin")


def _find(prefix: str, directory: Path) -> tuple[str, str | None]:
    """Return the prefix of a listed dataset, and a second dataset that the path could mean.

    A relative path is relative to the working directory, as in Megatron; if no dataset is there,
    to the directory of the list.

    Args:
        prefix: Path of the dataset in the list.
        directory: Directory of the list.
    """
    beside = str(directory / prefix)
    here, there = _idx_or_bin(prefix), _idx_or_bin(beside)
    if here is None:
        return (prefix if there is None else beside), None
    return prefix, None if there is None or here.samefile(there) else beside


def _idx_or_bin(prefix: str) -> Path | None:
    paths = (Path(f"{prefix}{end}") for end in _ENDINGS)
    return next((path for path in paths if path.is_file()), None)


def _note(path: str, ambiguous: list[tuple[str, str]]) -> str:
    if not ambiguous:
        return ""
    used, other = ambiguous[0]
    more = f", and {len(ambiguous) - 1:,} more" if len(ambiguous) > 1 else ""
    return (
        f"`{path}`: `{used}` is the dataset of the working directory, not `{other}` beside the "
        f"list{more}; absolute paths leave no choice"
    )


def _with_metadata(sources: RunSources, metadata: Mapping[str, DatasetMetadata]) -> RunSources:
    def recorded(source: DataSource) -> DataSource:
        found = metadata.get(source.name) if source.is_dataset else None
        if found is None:
            return source
        return replace(source, tokenizer=found.identity, append_eod=found.append_eod)

    def blend_of(blend: Blend) -> Blend:
        return replace(blend, sources=tuple(recorded(source) for source in blend.sources))

    divided = None if sources.divided is None else blend_of(sources.divided)
    own = {part: blend_of(blend) for part, blend in sources.own.items()}
    sets = {name: blend_of(blend) for name, blend in sources.sets.items()}
    return replace(sources, divided=divided, own=own, sets=sets)


def _different_tokenizers(metadata: Mapping[str, DatasetMetadata]) -> list[LmcoreError]:
    """Return a problem if datasets were prepared with different tokenizers.

    Args:
        metadata: Metadata of the datasets by prefix.
    """
    prefixes: dict[str, list[str]] = {}
    for prefix, found in metadata.items():
        prefixes.setdefault(found.fingerprint, []).append(prefix)
    if len(prefixes) < 2:
        return []
    makers = [
        f"`{metadata[names[0]].identity.type}` with fingerprint `{fingerprint[:12]}` made "
        + ", ".join(f"`{name}`" for name in names[:5])
        + ", ..." * (len(names) > 5)
        for fingerprint, names in prefixes.items()
    ]
    first, other = (names[0] for names in list(prefixes.values())[:2])
    return [
        ConfigError(
            f"`{first}` and `{other}` were not prepared with the same tokenizer",
            why="; ".join(makers),
            hint="prepare all data of a run with one tokenizer",
        )
    ]
