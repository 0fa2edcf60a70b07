"""`RunDatasets`: the tokenizer, the data sources and the samples of a run.

A run without data settings trains on named texts, by default on the text that comes with
lmcore, so that every command has data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, LmcoreError, counted
from lmcore.base.log import ALL_RANKS
from lmcore.config.derived.data_source import BUNDLED, DataSource, Part, RunSources
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.data.blend.cyclic_sampler import CyclicDataset
from lmcore.data.blend.dataset import BlendedDataset
from lmcore.data.blend.order import Order, OrderRecord
from lmcore.data.blend.sources import (
    OpenSource,
    SampleSettings,
    TrainingSamples,
    build_samples,
    open_sources,
)
from lmcore.data.blend.train_split import LONG_NAME
from lmcore.data.indexed.dataset_tokenizer import dataset_tokenizer
from lmcore.data.indexed.metadata import verify_files
from lmcore.data.prepare.choose_texts import RunText
from lmcore.data.prepare.corpus import prepare_corpus
from lmcore.data.prepare.mock_data import prepare_mock_data
from lmcore.data.prepare.named_text import NamedText, bundled_text, prepare_named_text
from lmcore.data.task.dataset import prepare_task
from lmcore.data.tokenizer import tokenizer_from
from lmcore.data.tokenizer.comparison import same_tokens, token_difference
from lmcore.data.tokenizer.saved import load_tokenizer
from lmcore.runtime.launch.rank import RankInfo
from lmcore.train.resume.corpora import check_same_corpora
from lmcore.train.resume.saved_run import saved_order
from lmcore.train.validation_sets import ValidationSet, open_validation_sets

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.config.section import DataSection
    from lmcore.config.tokenizer import TokenizerIdentity
    from lmcore.data.indexed.dataset import IndexedDataset
    from lmcore.data.loading.batch import Collation
    from lmcore.data.tokenizer import Tokenizer, TokenizerFactory
    from lmcore.evaluation.run import AskedTask
    from lmcore.evaluation.task import Task
    from lmcore.families.sample_format import SampleFormat
    from lmcore.runtime.process.rendezvous import Rendezvous

__all__ = ["RunDatasets", "build_datasets", "choose_tokenizer"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunDatasets:
    """The samples of a run, and the tokenizer that made them.

    Attributes:
        tokenizer: Tokenizer of the data.
        collation: Function that makes a micro-batch of samples.
        training: Training samples in their order.
        valid: Validation samples; None if the run does not validate.
        test: Test samples; None if the run has no test.
        sources: Open data sources of each part that has documents.
        title: Description of the sources in a few words.
        sets: Named validation sets; the first has the samples of `valid` if there are no others.
        tasks: Tasks that score the model, with their requests.
        corpora: Digest of the files of each corpus by name.
    """

    tokenizer: Tokenizer
    collation: Collation
    training: Order
    valid: TrainingSamples | None
    test: TrainingSamples | None
    sources: Mapping[Part, tuple[OpenSource, ...]]
    title: str = ""
    sets: Mapping[str, ValidationSet] = field(default_factory=dict)
    tasks: tuple[AskedTask, ...] = ()
    corpora: Mapping[str, str] = field(default_factory=dict)
    _sets: tuple[IndexedDataset, ...] = field(default=(), repr=False)

    def verify_files(self, share: tuple[int, int]) -> None:
        """Compare the datasets with their checksums, block by block.

        Args:
            share: Number of this process among the processes of its host that divide the blocks
                among them, and the number of these processes.

        Raises:
            DataError: A dataset is damaged.
        """
        prefixes = [indexed.prefix for indexed in self._sets]
        named = (source for each in self.sets.values() for source in each.sources)
        prefixes += [source.indexed.prefix for source in named]
        sizes = {prefix: verify_files(prefix, share) for prefix in dict.fromkeys(prefixes)}
        if share[0]:
            return
        verified = [size for size in sizes.values() if size is not None]
        if verified:
            logger.info("%s verified", counted(len(verified), "dataset"))
        unknown = [f"`{prefix}`" for prefix, size in sizes.items() if size is None]
        if unknown:
            logger.warning(
                "%s %s no checksums and %s not verified: %s",
                counted(len(unknown), "dataset"),
                "has" if len(unknown) == 1 else "have",
                "is" if len(unknown) == 1 else "are",
                ", ".join(unknown[:5]) + ", ..." * (len(unknown) > 5),
            )

    @property
    def train(self) -> TrainingSamples | CyclicDataset:
        """Training samples."""
        return self.training.samples

    @property
    def order(self) -> str:
        """Fingerprint of the training samples in their order."""
        return self.training.fingerprint

    @property
    def indexed(self) -> IndexedDataset:
        """The first dataset of training."""
        return self.sources["train"][0].indexed

    @property
    def documents(self) -> dict[Part, tuple[int, int]]:
        """First document and end of each part, in its first dataset."""
        return {part: found[0].documents for part, found in self.sources.items()}

    @property
    def token_count(self) -> int:
        """Number of tokens in all datasets."""
        return sum(dataset.tokens for dataset in self._sets)

    @property
    def document_count(self) -> int:
        """Number of documents in all datasets."""
        return sum(dataset.document_count for dataset in self._sets)


def choose_tokenizer(
    settings: DataSection,
    sources: RunSources,
    extra: Mapping[str, TokenizerFactory],
    *,
    copy: Path | None = None,
    of_checkpoint: bool = False,
    undecided: LmcoreError | None = None,
) -> Tokenizer:
    """Return the tokenizer of a run.

    In order: the tokenizer that flags name; the tokenizer that made the datasets; bytes, for a
    named text.

    Args:
        settings: The `data` section.
        sources: Data sources with their metadata, from `inspect_sources`.
        extra: Tokenizer types that plugins registered.
        copy: Copy of the tokenizer in the run directory of the checkpoint to load, which is used
            if the files that made the datasets are gone; None without a checkpoint.
        of_checkpoint: True if the checkpoint to load, not the user, named the tokenizer.
        undecided: Error to raise instead of taking bytes, for a checkpoint that does not have its
            tokenizer; None otherwise.

    Raises:
        ConfigError: Nothing says which, or flags and datasets disagree.
        DataError: The tokenizer's files cannot be used.
    """
    data_sets = [s for blend in sources.blends() for s in blend.sources if s.is_dataset]
    made_with = {source.name: source.tokenizer for source in data_sets}
    if settings.tokenizer_type is not None:
        named = tokenizer_from(TokenizerSettings.of(settings), extra=extra)
        others = [
            _made_with_another(
                prefix, identity, settings, named, extra, of_checkpoint=of_checkpoint
            )
            for prefix, identity in made_with.items()
            if identity is not None and not _fits(named, identity, prefix, extra)
        ]
        if others:
            raise ConfigError.collect(others)
        return named
    if not made_with and undecided is not None:
        raise undecided
    if not made_with:
        return tokenizer_from(TokenizerSettings("ByteTokenizer"))
    known = {prefix: identity for prefix, identity in made_with.items() if identity is not None}
    if len(known) < len(made_with):
        unknown = [prefix for prefix in made_with if prefix not in known]
        raise ConfigError(
            f"nothing says which tokenizer `{unknown[0]}` was prepared with",
            why="there is no metadata file beside it, as `lmcore data prepare` writes one",
            hint="add `--tokenizer-type TYPE`, with its files",
        )
    prefix, first = next(iter(known.items()))
    try:
        return dataset_tokenizer(first, prefix, extra=extra)
    except LmcoreError:
        kept = None if copy is None else _kept(copy, first.fingerprint, extra)
        if kept is None:
            raise
        logger.info("the tokenizer's files are gone: its copy `%s` is used", copy)
        return kept


def _kept(copy: Path, fingerprint: str, extra: Mapping[str, TokenizerFactory]) -> Tokenizer | None:
    """Return the tokenizer of a run's copy if it has this fingerprint, else None."""
    try:
        kept = load_tokenizer(copy, extra=extra)
    except LmcoreError:
        return None
    return kept if kept.fingerprint() == fingerprint else None


def build_datasets(
    plan: RunPlan,
    tokenizer: Tokenizer,
    directory: Path,
    texts: Mapping[str, RunText] | None = None,
    rendezvous: Rendezvous | None = None,
    samples: SampleFormat | None = None,
    tasks: Sequence[tuple[Task, Sequence[Path]]] = (),
) -> RunDatasets:
    """Open the datasets and build the indices of their samples, or load them from the cache.

    Rank 0 builds first, so that the other ranks find named texts and indices ready.

    Args:
        plan: The run.
        tokenizer: Tokenizer of the data.
        directory: Folder for prepared texts, unless `--data-cache-path` gives one.
        texts: Texts of the run from `choose_texts`; None for the bundled text only.
        rendezvous: Connection of the processes; None in a run of one process.
        samples: Format of the samples; None: the format of the run's model.
        tasks: Tasks that score the model, with their files.

    Raises:
        CheckpointError: The manifest of the checkpoint to resume lacks its data.
        ConfigError: The blend is not the checkpoint's, or document boundaries are required and
            the data has no end-of-document tokens.
        DataError: A dataset is damaged, or a part of the split that is needed is empty.
    """
    first = rendezvous.first_process("the data") if rendezvous else contextlib.nullcontext()
    with first:
        datasets = _build(plan, tokenizer, directory, texts, samples)
    if plan.config.data.verify_data:
        rank = rendezvous.rank if rendezvous else RankInfo()
        datasets.verify_files((rank.local_rank, rank.local_world_size))
    if not tasks:
        return datasets
    from lmcore.train.task_scores import ask_tasks  # loads torch; the launcher does not

    return dataclasses.replace(datasets, tasks=ask_tasks(tasks, plan, tokenizer))


def _build(
    plan: RunPlan,
    tokenizer: Tokenizer,
    directory: Path,
    texts: Mapping[str, RunText] | None,
    samples: SampleFormat | None,
) -> RunDatasets:
    settings = plan.config.data
    named = texts if texts is not None else {BUNDLED: bundled_text()}
    sources = plan.sources
    from lmcore.families.sample_format import sample_format  # loads torch; the launcher does not

    samples = samples or sample_format(plan, tokenizer)
    prepared = kept = cache = directory
    if settings.data_cache_path is not None:
        cache = Path(settings.data_cache_path)
        kept = cache / "texts"
        prepared = kept / tokenizer.fingerprint()[:16]

    corpora: dict[str, str] = {}

    def prefix_of(source: DataSource) -> str:
        if source.files and sources.task is not None:
            return prepare_task(source.files, sources.task, tokenizer, prepared)
        if source.mock:
            return prepare_mock_data(
                tokenizer, prepared, seed=plan.config.training.seed, sentences=samples.sentences
            )
        if not source.corpus:
            return source.name
        text, lazy = named[source.name], settings.lazy_loader
        if isinstance(text, NamedText):
            return prepare_named_text(text, tokenizer, prepared, keep_text=kept if lazy else None)
        made = prepare_corpus(text, tokenizer, cache, may_be_gone=lazy)
        corpora[text.name] = made.digest
        return made.prefix

    validates = plan.valid_samples > 0 and not sources.validates_on_sets_alone
    needed: tuple[Part, ...] = ("train", "valid") if validates else ("train",)
    parts = open_sources(
        sources,
        needed=needed,
        prefix_of=prefix_of,
        split_rule=settings.split_rule,
        blend_rule=settings.blend_rule,
        verify_indices=settings.verify_data,
    )
    common = SampleSettings(
        plan.config.model.seq_length,
        plan.config.training.seed,
        settings.data_cache_path,
        settings.final_epoch_threshold,
        samples.builder,
        settings.blend_rule,
    )
    wanted: dict[Part, int] = {"valid": plan.valid_samples, "test": _test_samples(plan, parts)}
    further = {
        part: build_samples(parts[part], count, common, name=part)
        for part, count in wanted.items()
        if count > 0 and part in parts
    }
    sets = {id(source.indexed): source.indexed for opened in parts.values() for source in opened}
    named_sets = open_validation_sets(plan, common, prefix_of)
    if named_sets and "valid" not in further:
        further["valid"] = next(iter(named_sets.values())).samples
    check_same_corpora(plan, corpora)
    training = _training(plan, parts["train"], common, saved_order(plan))
    _report_unused({"train": training.samples, **further})
    return RunDatasets(
        tokenizer,
        samples.collation,
        training,
        further.get("valid"),
        further.get("test"),
        parts,
        _title(sources),
        named_sets,
        corpora=corpora,
        _sets=tuple(sets.values()),
    )


def _training(
    plan: RunPlan,
    sources: tuple[OpenSource, ...],
    settings: SampleSettings,
    saved: OrderRecord | None,
) -> Order:
    """Return the training samples in the order of a new run, or of the checkpoint's."""
    length, cyclic = plan.train_samples, plan.config.data.dataloader_type == "cyclic"
    if saved is None or cyclic:
        return Order.begin(sources, length, settings, cyclic=cyclic)
    changes = plan.config.checkpoint.change_blend
    return Order.continue_from(saved, length, sources, settings, change_blend=changes)


def _report_unused(parts: Mapping[Part, TrainingSamples | CyclicDataset]) -> None:
    """Log a warning of the sources whose weight is too small for a single sample."""
    for part, samples in parts.items():
        if isinstance(samples, BlendedDataset) and samples.unused:
            logger.warning(
                "no sample of %s among the %s of %s: too small a weight, or too few samples",
                ", ".join(f"`{name}`" for name in samples.unused),
                counted(samples.size, "sample"),
                LONG_NAME[part],
                extra=ALL_RANKS,
            )


def _test_samples(plan: RunPlan, parts: Mapping[Part, tuple[OpenSource, ...]]) -> int:
    """Return the number of test samples; log a warning if a test was requested and there is none.

    The bundled text has no test by default: its default split leaves one document at most.
    """
    settings = plan.config.data
    if settings.test_data_path or settings.test_data or settings.test_weighted_split_paths:
        return plan.test_samples
    if not plan.config.training.eval_interval:
        return 0
    if plan.provenance["split"].kind == "default":
        return 0 if plan.sources.bundled else plan.test_samples
    split = plan.sources.split
    if plan.test_samples and split and split.shares[2] > 0 and "test" not in parts:
        logger.warning(
            "`--split %s` leaves no test documents: there is no test at the end",
            split.text,
            extra=ALL_RANKS,
        )
    return plan.test_samples


def _title(sources: RunSources) -> str:
    """Return a short description of the training data."""
    blend = sources.blends()[0]
    if len(blend.sources) > 1:
        kind = "texts" if blend.sources[0].corpus else "datasets"
        return f"{len(blend.sources)} {kind} of {blend.flag}"
    (one,) = blend.sources
    if not one.corpus:
        return one.name
    return "bundled text" if sources.bundled else f"corpus {one.name}"


def _fits(
    named: Tokenizer,
    identity: TokenizerIdentity,
    prefix: str,
    extra: Mapping[str, TokenizerFactory],
) -> bool:
    """Return True if the ids of a dataset have the same tokens in the tokenizer of the run."""
    if identity.fingerprint == named.fingerprint():
        return True
    if _lacks_sentinels_only(named, identity, extra):
        return True
    try:
        made_with = dataset_tokenizer(identity, prefix, extra=extra)
    except LmcoreError:
        return False
    if not same_tokens(named, made_with):
        return False
    logger.info(
        "`%s` was prepared with `%s`, whose ids have the same tokens as those of this run's `%s`",
        prefix,
        made_with.name,
        named.name,
    )
    return True


def _lacks_sentinels_only(
    named: Tokenizer, identity: TokenizerIdentity, extra: Mapping[str, TokenizerFactory]
) -> bool:
    """Return True if a dataset's tokenizer is the run's without the sentinels at its end.

    No text has a sentinel, so that the ids are the same; T5's samples get them in training.
    """
    settings = TokenizerSettings.described(named.describe())
    if not settings.vocab_extra_ids or identity.description.get("vocab_extra_ids"):
        return False
    plain = tokenizer_from(dataclasses.replace(settings, vocab_extra_ids=0), extra=extra)
    return plain.fingerprint() == identity.fingerprint and plain.eod == named.eod


def _made_with_another(
    prefix: str,
    made_with: TokenizerIdentity,
    settings: DataSection,
    named: Tokenizer,
    extra: Mapping[str, TokenizerFactory],
    *,
    of_checkpoint: bool,
) -> ConfigError:
    kind, asked, what = made_with.type, str(settings.tokenizer_type), "this tokenizer"
    hint = f"prepare the dataset again with this run's `{asked}`, or leave `--tokenizer-type` out"
    if of_checkpoint:
        what, flags = "the checkpoint's tokenizer", _flags(TokenizerSettings.of(settings))
        hint = f"prepare the dataset again with `{flags}`"
        if made_with.vocab_size <= named.vocab_size:  # else it has ids without a row
            flags = _flags(TokenizerSettings.described(made_with.description))
            hint += f"; or add `{flags} --change-tokenizer` to train on its ids as they are"
    built: Tokenizer | TokenizerIdentity = made_with
    with contextlib.suppress(LmcoreError):  # its files are gone or have changed
        built = dataset_tokenizer(made_with, prefix, extra=extra)
    owners = "the dataset's", "the checkpoint's" if of_checkpoint else "this run's"
    difference = token_difference(built, named, owners)
    return ConfigError(
        f"`{prefix}` was not prepared with {what}",
        why=f"its token ids come from {f'another `{kind}`' if kind == asked else f'`{kind}`'}"
        + (f": {difference}" if difference else ""),
        hint=hint,
    )


def _flags(settings: TokenizerSettings) -> str:
    given = {name: flag for name, flag in settings.given().items() if name != "vocab_size"}
    return " ".join([f"--tokenizer-type {settings.tokenizer_type}", *given.values()])
