"""Options of `lmcore data retro`, which are parsed together with the options of a run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError
from lmcore.config.option import option, options_of
from lmcore.config.plugin_section import PluginSections, PluginSettings

if TYPE_CHECKING:
    from lmcore.config.option import Option

__all__ = ["NAME", "STEPS", "RetroDataSection", "SectionsWithRetro"]

NAME = "data_retro"
"""Name of the section in a file of settings."""
STEPS = ("db-build", "index-build", "query-pretraining-neighbors")
"""Steps in their order, by Megatron's names."""
_ALSO = {
    "build": STEPS,
    "chunks": STEPS[:1],
    "index": STEPS[1:2],
    "neighbors": STEPS[2:],
    "neighbours": STEPS[2:],
    "pretraining-query-neighbors": STEPS[2:],
}
_MOST = 1 << 30


@dataclass(frozen=True)
class RetroDataSection:
    """Find the neighbours of the chunks of a run's samples, for models of the family Retro."""

    retro_tasks: str = option(
        "build",
        "Steps to do, with commas: db-build, index-build and query-pretraining-neighbors, or in "
        "short chunks, index and neighbours; `build` is all of them.",
        metavar="STEPS",
    )
    retro_encoder: str | None = option(
        None,
        "Encoder of the chunks: a run or checkpoint of ICT or BERT, or the directory of a model of "
        "`sentence-transformers`. Default: the encoder that built the index.",
        metavar="DIR",
    )
    retro_doc_block_size: int = option(
        100_000, "Documents that are cut into chunks at a time.", minimum=1, maximum=_MOST
    )
    retro_block_size: int = option(
        100_000,
        "Chunks that are encoded, and whose neighbours are found, at a time. Their vectors are in "
        "memory, and a step that was stopped repeats at most as many.",
        minimum=1,
        maximum=_MOST,
    )
    retro_bert_batch_size: int = option(
        16,
        "Chunks that the encoder computes together; on a GPU 128 or more.",
        minimum=1,
        maximum=1 << 16,
    )
    retro_bert_max_chunk_length: int = option(
        256, "Most tokens of a chunk for the encoder.", minimum=3, maximum=1 << 16
    )
    retro_bert_tokenizer_type: str | None = option(
        None, "Type of the encoder's tokenizer; default: its checkpoint's.", metavar="TYPE"
    )
    retro_bert_vocab_file: str | None = option(
        None, "Vocabulary of the encoder's tokenizer; default: its checkpoint's.", metavar="FILE"
    )
    retro_index_str: str | None = option(
        None,
        "Search with Faiss, by the index that `faiss.index_factory` makes of this text, such as "
        "`IVF256_HNSW8,PQ32`. Default: an exact search without Faiss.",
        metavar="TEXT",
    )
    retro_index_ntrain: int | None = option(
        None,
        "Chunks, evenly spaced, that train a Faiss index; default: all.",
        minimum=1,
        maximum=_MOST,
    )
    retro_query_nprobe: int = option(
        65536, "Lists of a Faiss index that are searched.", minimum=1, maximum=_MOST
    )
    retro_query_ef_search: int = option(
        256, "Depth of the search in a graph (HNSW) of Faiss.", minimum=1, maximum=_MOST
    )
    retro_query_num_neighbors_query: int = option(
        200, "Nearest chunks that are looked for.", minimum=1, maximum=1 << 16
    )
    retro_query_num_neighbors_save: int = option(
        20,
        "Of these, the neighbours that are saved: the first of other documents than the sample's.",
        minimum=1,
        maximum=1 << 16,
    )

    def steps(self) -> tuple[str, ...]:
        """Return the steps to do, in their order.

        Raises:
            ConfigError: There is no such step.
        """
        asked: set[str] = set()
        for name in self.retro_tasks.split(","):
            word = name.strip()
            if word not in STEPS and word not in _ALSO:
                raise ConfigError(
                    f"`--retro-tasks {self.retro_tasks}`: there is no step `{word}`",
                    hint=f"the steps are {', '.join(STEPS)}; `build` is all of them",
                )
            asked |= set(_ALSO.get(word, (word,)))
        return tuple(step for step in STEPS if step in asked)

    def check(self) -> None:
        """Refuse options that do not fit each other.

        Raises:
            ConfigError: More neighbours are saved than looked for, or an option of Faiss is given
                without its index.
        """
        saved, queried = self.retro_query_num_neighbors_save, self.retro_query_num_neighbors_query
        if saved > queried:
            raise ConfigError(
                f"`--retro-query-num-neighbors-save {saved}` is more than "
                f"`--retro-query-num-neighbors-query {queried}`",
                why="the neighbours that are saved are chosen among the chunks that are found",
                hint="look for more: some are of the sample's own documents",
            )
        if self.retro_index_str is None and self.retro_index_ntrain is not None:
            raise ConfigError(
                "`--retro-index-ntrain` has no effect without `--retro-index-str`",
                why="an exact search needs no training",
                hint="leave it out, or name a Faiss index",
            )


@dataclass(frozen=True)
class SectionsWithRetro(PluginSections):
    """Sections of plugins, and `RetroDataSection` under the name `NAME`."""

    @functools.cached_property
    def options(self) -> Mapping[str, Option]:
        """Every option of the plugins and of the section, by its name."""
        own = {
            one.name: dataclasses.replace(one, plugin=NAME)
            for one in options_of(RetroDataSection, name=NAME)
        }
        plugins = PluginSections(self.sections, self.left_out).options
        return {**plugins, **own}

    def settings(self, values: Mapping[str, Any] = MappingProxyType({})) -> PluginSettings:
        """Return the sections, filled from *values* by option name."""
        found = PluginSections(self.sections, self.left_out).settings(values)
        own = {one.name for one in dataclasses.fields(RetroDataSection)}
        given = {name: value for name, value in values.items() if name in own}
        return PluginSettings({**found, NAME: RetroDataSection(**given)})
