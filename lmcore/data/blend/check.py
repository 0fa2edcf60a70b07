"""What is wrong with a run's data sets before any of them is opened, all of it at once.

The configuration's rules look at the words of the flags; here are read the lists that they name and
the metadata beside the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.config.data_source import read_sources
from lmcore.data.blend.sources import expand_what_can_be
from lmcore.data.indexed.metadata import read_metadata
from lmcore.errors import ConfigError, LmcoreError

if TYPE_CHECKING:
    from lmcore.config.section import DataSection
    from lmcore.data.indexed.metadata import DatasetMetadata

__all__ = ["different_tokenizers", "source_problems"]


def source_problems(settings: DataSection) -> list[LmcoreError]:
    """Return what is wrong with data file lists and with the tokenizers that made the data.

    What the rules of the configuration find is left to them.
    """
    found, _ = read_sources(settings)
    divided = found.divided
    if divided is not None and divided.file_list is not None:
        if not Path(divided.file_list).is_file():
            return []
        try:
            found, problems = expand_what_can_be(found)
        except LmcoreError as problem:
            return [problem]
    else:
        problems = []
    made_with: dict[str, DatasetMetadata] = {}
    names = (one.name for blend in found.blends() for one in blend.sources if not one.corpus)
    for name in dict.fromkeys(names):
        try:
            metadata = read_metadata(name)
        except LmcoreError as problem:
            problems.append(problem)
        else:
            made_with |= {name: metadata} if metadata is not None else {}
    return [*problems, *different_tokenizers(made_with)]


def different_tokenizers(made_with: Mapping[str, DatasetMetadata]) -> list[LmcoreError]:
    """Return a problem where data sets were not all prepared with one tokenizer.

    Args:
        made_with: The metadata of data sets by their prefixes.
    """
    kinds: dict[str, list[str]] = {}
    for prefix, one in made_with.items():
        kinds.setdefault(one.fingerprint, []).append(prefix)
    if len(kinds) < 2:
        return []
    told = [
        f"`{made_with[names[0]].tokenizer['type']}` with fingerprint `{fingerprint[:12]}` made "
        + ", ".join(f"`{name}`" for name in names[:5])
        + ", ..." * (len(names) > 5)
        for fingerprint, names in kinds.items()
    ]
    first, other = (names[0] for names in list(kinds.values())[:2])
    return [
        ConfigError(
            f"`{first}` and `{other}` were not prepared with the same tokenizer",
            why="; ".join(told),
            hint="prepare all data of a run with one tokenizer",
        )
    ]
