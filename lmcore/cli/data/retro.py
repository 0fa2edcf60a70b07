"""`lmcore data retro`: a database of chunks, its index, and the neighbours of a run's samples."""

from __future__ import annotations

import dataclasses
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base import log
from lmcore.base.errors import ConfigError, counted, printable
from lmcore.base.missing_path import missing_path_hint
from lmcore.base.signals import clean_termination
from lmcore.cli.data.retro_section import NAME, STEPS, RetroDataSection, SectionsWithRetro
from lmcore.cli.processes import import_torch
from lmcore.cli.selection import find_plugins
from lmcore.config.option import options_of
from lmcore.config.options.command_line import wants_help
from lmcore.config.options.help import render_help
from lmcore.config.plugin_section import PluginSettings, summary_of
from lmcore.model.family import family_of
from lmcore.plugin.registrations import plugin_sections
from lmcore.runtime.device_choice import prepare_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmcore.cli.run_plan import PlannedRun
    from lmcore.config.plan import RunPlan
    from lmcore.data.blend.sources import OpenSource, SampleSettings
    from lmcore.data.chunks.database import ChunkDatabase
    from lmcore.data.dataset.gpt import GPTDataset
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.retrieval.chunk_encoder import ChunkEncoder
    from lmcore.retrieval.chunk_index import ChunkIndex, FaissSettings
    from lmcore.retrieval.find_neighbours import NeighbourSettings, SourceQueries
    from lmcore.runtime.launch.rank import RankInfo
    from lmcore.train.datasets import RunDatasets

__all__ = ["run"]

_EPILOG = """\
Beside these it takes every option and file of `lmcore train`, which say what the samples are: give
those of the run. Steps that were stopped continue where they were. Several processes, also of
several hosts, may work at once: start the same command in each.

  lmcore data retro --data-path wiki_text_document --seq-length 512 --global-batch-size 64 \\
      --train-iters 1000 --retro-project-dir wiki.retro --retro-encoder runs/bert
  lmcore data retro config.yaml --retro-project-dir wiki.retro --retro-tasks chunks"""

_FAMILY_FLAGS = ("--model-family", "--model-type", "--retro-add-retriever", "--continue")
"""Flags that say which model the run has; without one of them it is a Retro."""

_OF_A_RUN = ("checkpoints", "metrics.jsonl", "manifest.json", "config.json")
"""Files and folders in a directory of a run or of a checkpoint, one of them at least."""
_GLOBAL_BATCH = {"--global-batch-size", "--retro-gpt-global-batch-size"}
"""Flags of the number of samples of a step, which no longer depends on micro-batches."""
_MICRO_BATCH = {"--micro-batch-size", "--batch-size"}


def run(argv: list[str]) -> int:
    """Run `lmcore data retro` and return the exit status."""
    if wants_help(argv):
        groups = [("options", "", options_of(RetroDataSection, name=NAME))]
        about = summary_of(RetroDataSection)
        usage = "[config.yaml ...] [--flags]"
        print(render_help("lmcore data retro", about, groups, usage=usage, epilog=_EPILOG))
        return 0
    from lmcore.cli.run_plan import plan_run
    from lmcore.runtime.launch.rank import only_process

    plugins = find_plugins(argv)
    sections = plugin_sections(plugins)
    rank = only_process(os.environ)
    log.configure(rank=rank.rank, world_size=rank.world_size)
    with_own = SectionsWithRetro(sections.sections, sections.left_out)
    named = any(word.startswith(_FAMILY_FLAGS) for word in argv)
    argv = argv if named else [*argv, "--model-family", "retro"]
    given = {word.partition("=")[0] for word in argv}
    if given & _GLOBAL_BATCH and not given & _MICRO_BATCH:
        argv = [*argv, "--micro-batch-size", "1"]
    planned = plan_run(argv, plugins, rank, with_own)
    settings = dict(planned.plan.config.plugins)
    section = settings.pop(NAME)
    config = dataclasses.replace(planned.plan.config, plugins=PluginSettings(settings))
    planned = dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, config=config))
    section.check()
    steps = section.steps()
    _check_run(planned.plan, section, steps)
    with clean_termination():
        print(printable("\n".join(_Work(section, planned, rank).do(steps))))
    return 0


def _check_run(plan: RunPlan, section: RetroDataSection, steps: tuple[str, ...]) -> None:
    """Refuse what does not fit the run, before anything is computed."""
    _require_decoder(plan)
    if plan.config.retro.retro_project_dir is None:
        raise ConfigError(
            "`--retro-project-dir` is required",
            hint="name a directory, which is made, for the database, the index and the neighbours",
        )
    project = Path(plan.config.retro.retro_project_dir)
    if any((project / name).exists() for name in _OF_A_RUN):
        raise ConfigError(
            f"`--retro-project-dir {project}` is the directory of a run or of a checkpoint",
            why="the files of a project would be among its files",
            hint="name another directory, which is made",
        )
    index = index_path(project)
    if STEPS[1] in steps and section.retro_encoder is None and not index.is_dir():
        raise ConfigError(
            "`--retro-encoder` is required to build an index of chunks",
            hint="give a run or checkpoint of ICT or BERT, or the directory of a model of "
            "`sentence-transformers`",
        )
    if section.retro_encoder is not None and not Path(section.retro_encoder).exists():
        raise ConfigError(
            f"no such file or directory: `--retro-encoder {section.retro_encoder}`",
            hint=missing_path_hint(section.retro_encoder),
        )


def _require_decoder(plan: RunPlan) -> None:
    family = family_of(plan.shape)
    if "targets_BS" not in family.batch:
        raise ConfigError(
            f"{family.name} models read no neighbours",
            why="the samples of `lmcore data retro` are those of a decoder, which continues a text",
            hint="give the options of the Retro run, without `--model-family "
            f"{plan.config.model.model_family}`",
        )


@dataclass(frozen=True)
class _Work:
    section: RetroDataSection
    planned: PlannedRun
    rank: RankInfo

    def do(self, steps: tuple[str, ...]) -> list[str]:
        """Do the steps, and return lines about their results."""
        tokenizer = self.planned.tokenizer
        directory = Path(self.planned.plan.config.retro.retro_project_dir or "")
        datasets, queries = self._samples(directory)
        if steps == STEPS[:1]:
            return [_shown(self._database(directory, datasets, tokenizer, build=True))]
        # The encoder first: what is wrong with it is known before a long build.
        with self._encoder(directory) as encoder:
            database = self._database(directory, datasets, tokenizer, build=STEPS[0] in steps)
            asked = queries if STEPS[2] in steps else []
            index = self._index(directory, database, encoder, asked, build=STEPS[1] in steps)
            made = f"vectors of {index.record.size} channels by `{index.record.checkpoint}`"
            how = index.faiss.factory or "exact search"
            lines = [_shown(database), f"{index.path}: {made}, {how}"]
            if STEPS[2] in steps:
                lines += self._neighbors(directory, queries, database, index, encoder)
        return lines

    def _samples(self, directory: Path) -> tuple[RunDatasets, list[SourceQueries]]:
        from lmcore.data.loading.batch import CausalLMCollation
        from lmcore.families.retro.samples import cycle_of
        from lmcore.families.sample_format import SampleFormat
        from lmcore.train.datasets import build_datasets

        plan = self.planned.plan
        recorder = _Recorder(cycle_of(plan))
        datasets = build_datasets(
            plan,
            self.planned.tokenizer,
            directory / "texts",
            self.planned.texts,
            samples=SampleFormat(recorder, CausalLMCollation(plan.vocab_size, None)),
        )
        return datasets, recorder.queries(datasets, plan.config.model.seq_length)

    def _database(
        self, directory: Path, datasets: RunDatasets, tokenizer: Tokenizer, *, build: bool
    ) -> ChunkDatabase:
        from lmcore.data.chunks.database import Documents, build_database
        from lmcore.data.chunks.neighbours import database_path

        found = {
            (str(Path(one.indexed.prefix).resolve()), one.documents): Documents(
                one.indexed, one.indexed.sequence_range(one.documents)
            )
            for one in datasets.sources["train"]
        }
        return build_database(
            database_path(directory),
            list(found.values()),
            tokenizer,
            chunk_length=self.planned.plan.config.retro.retro_chunk_length,
            block=self.section.retro_doc_block_size,
            build=build,
        )

    @contextmanager
    def _encoder(self, directory: Path) -> Iterator[ChunkEncoder]:
        from lmcore.retrieval.chunk_index import encoder_of

        planned, section = self.planned, self.section
        path = section.retro_encoder or encoder_of(index_path(directory))
        prepare_environment(planned.plugins, planned.selection, self.rank)
        import_torch()
        from lmcore.config.tokenizer import TokenizerSettings
        from lmcore.data.tokenizer.build import registered_types
        from lmcore.retrieval.chunk_encoder import load_chunk_encoder
        from lmcore.runtime.runtime import start_runtime

        choice = TokenizerSettings(
            section.retro_bert_tokenizer_type, vocab_file=section.retro_bert_vocab_file
        )
        config = planned.plan.config
        with start_runtime(config, planned.plugins, planned.selection, self.rank) as runtime:
            yield load_chunk_encoder(
                Path(path),
                runtime,
                longest=section.retro_bert_max_chunk_length,
                choice=choice,
                extra=registered_types(planned.plugins),
            )

    def _index(
        self,
        directory: Path,
        database: ChunkDatabase,
        encoder: ChunkEncoder,
        queries: list[SourceQueries],
        *,
        build: bool,
    ) -> ChunkIndex:
        from lmcore.retrieval.chunk_index import ChunkIndex, build_chunk_index

        path, section = index_path(directory), self.section
        if not build:
            return ChunkIndex(path, self._faiss())
        return build_chunk_index(
            path,
            database,
            self.planned.tokenizer,
            encoder,
            shard=section.retro_block_size,
            batch=section.retro_bert_batch_size,
            faiss=self._faiss(),
            check=lambda: self._require_new_search(directory, queries, database, encoder),
        )

    def _faiss(self) -> FaissSettings:
        from lmcore.retrieval.chunk_index import FaissSettings

        section = self.section
        if section.retro_index_str is None:
            return FaissSettings()
        return FaissSettings(
            section.retro_index_str,
            section.retro_index_ntrain,
            section.retro_query_nprobe,
            section.retro_query_ef_search,
        )

    def _require_new_search(
        self,
        directory: Path,
        queries: list[SourceQueries],
        database: ChunkDatabase,
        encoder: ChunkEncoder,
    ) -> None:
        """Refuse neighbours that are there and were found in another way, before a long build."""
        from lmcore.retrieval.chunk_index import fingerprint_of
        from lmcore.retrieval.find_neighbours import require_new_search

        index = fingerprint_of(encoder, database, self._faiss())
        for one in queries:
            require_new_search(directory, one, database, index, self._search())

    def _search(self) -> NeighbourSettings:
        from lmcore.retrieval.find_neighbours import NeighbourSettings

        section = self.section
        return NeighbourSettings(
            num_queried=section.retro_query_num_neighbors_query,
            num_neighbors=section.retro_query_num_neighbors_save,
            block=section.retro_block_size,
            batch=section.retro_bert_batch_size,
        )

    def _neighbors(
        self,
        directory: Path,
        queries: list[SourceQueries],
        database: ChunkDatabase,
        index: ChunkIndex,
        encoder: ChunkEncoder,
    ) -> Iterator[str]:
        from lmcore.retrieval.find_neighbours import find_neighbours

        tokenizer, settings = self.planned.tokenizer, self._search()
        for one in queries:
            found = find_neighbours(
                *(directory, one, database, index, encoder, tokenizer, settings)
            )
            yield (
                f"{found.path}: neighbours of {counted(found.num_samples, 'sample')} "
                f"of `{one.name}`"
            )


def _shown(database: ChunkDatabase) -> str:
    length = counted(database.record.chunk_length, "token")
    return f"{database.path}: {counted(database.chunks, 'chunk')} of at most {length}"


def index_path(directory: Path) -> Path:
    """Return the path of the index of chunks of a project."""
    return directory / "index"


@dataclass
class _Recorder:
    """Builder of Retro's samples without neighbours, and a record of what it built.

    Attributes:
        cycle: Part of the training samples that gets neighbours.
        found: Source and samples by part and order.
    """

    cycle: float
    found: dict[tuple[str, str], tuple[OpenSource, GPTDataset]] = field(default_factory=dict)

    def build(
        self, source: OpenSource, num_samples: int | None, settings: SampleSettings, *, name: str
    ) -> GPTDataset:
        """Return the samples of a source."""
        from lmcore.data.blend.sources import GPTSamples
        from lmcore.families.retro.samples import read_first

        count = read_first(num_samples, name, self.cycle)
        samples = GPTSamples().build(source, count, settings, name=name)
        key = name, samples.order
        if key not in self.found or len(self.found[key][1]) < len(samples):
            self.found[key] = source, samples
        return samples

    def samples_per_epoch(self, source: OpenSource, settings: SampleSettings) -> int:
        """Return the number of samples in one epoch of a source."""
        from lmcore.data.blend.sources import GPTSamples

        return GPTSamples().samples_per_epoch(source, settings)

    def queries(self, datasets: RunDatasets, seq_length: int) -> list[SourceQueries]:
        """Return the samples of each source of a run, with their number."""
        from lmcore.retrieval.find_neighbours import SourceQueries

        order = ("train", "valid", "test")
        parts = {"train": datasets.train, "valid": datasets.valid, "test": datasets.test}
        found = []
        for (part, key), (source, samples) in sorted(
            self.found.items(), key=lambda item: order.index(item[0][0])
        ):
            count = max(len(samples), _taken(parts[part], key))
            found.append(
                SourceQueries(part, source.name, source.indexed, samples, count, seq_length)
            )
        return found


def _taken(samples: Any, order: str) -> int:
    """Return the number of samples in an order that a blend takes; 0 if it is no blend."""
    from lmcore.data.blend.cyclic_sampler import CyclicDataset
    from lmcore.data.blend.dataset import BlendedDataset

    if isinstance(samples, CyclicDataset):
        return _taken(samples.dataset, order)
    if not isinstance(samples, BlendedDataset):
        return 0
    most = 0
    for stream, needed in zip(samples.sources, samples.needed, strict=True):
        left = needed
        for part in stream.parts:
            if part.order == order:
                most = max(most, min(left, part.available))
            left = max(left - part.available, 0)
    return most
