"""Settings of a fine-tuning, and the flags of training that follow from them."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import LmcoreError
from lmcore.cli.device_count import default_process_count
from lmcore.config.option import flag_of, options_of
from lmcore.config.section.tokenizer import TokenizerSection

if TYPE_CHECKING:
    from lmcore.checkpoint import Manifest
    from lmcore.cli.evaluate.section import EvaluateSection
    from lmcore.config.tokenizer import TokenizerSettings
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.evaluation.finetune.record import Part, TunedTask
    from lmcore.model.shape import ModelShape
    from lmcore.plugin import PluginSet
    from lmcore.train.resume.foreign import ForeignModels

__all__ = ["TunedSettings", "require_tokenizer", "settings_of", "shape_of", "with_own_tokens"]

logger = logging.getLogger(__name__)

_ALSO_OF_TRAINING = (
    *("device", "plugin_off", "precision", "ops", "strict_ops", "deterministic", "num_threads"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "nproc_per_node"),
    *("vocab_size", "tokenizer_type"),
)
"""Options of `lmcore evaluate` that `lmcore train` has too."""
_WORDPIECES = {"BertWordPieceCase", "BertWordPieceLowerCase"}


@dataclass(frozen=True)
class TunedSettings:
    """Settings of the fine-tuning of a task.

    Attributes:
        task: Name of the task.
        checkpoint: Checkpoint that training begins from.
        train, valid, test: Absolute paths of the files.
        epochs, lr, warmup, seq_length, global_batch_size: See `Recipe`.
        micro_batch_size: Samples of a pass on one device.
        eval_interval: Steps between validations; None: as many as an epoch has.
        training: Further arguments of `lmcore train`.
        checksums: SHA-256 of each file or folder by its path.
        devices: Flags of device and layout, which a fine-tuning that continues may change.
    """

    task: str
    checkpoint: str
    train: tuple[str, ...]
    valid: tuple[str, ...]
    test: tuple[str, ...]
    epochs: float
    lr: float
    warmup: float
    seq_length: int
    global_batch_size: int
    micro_batch_size: int
    eval_interval: int | None
    training: tuple[str, ...]
    checksums: Mapping[str, str]
    devices: tuple[str, ...]

    def values(self) -> dict[str, Any]:
        """Return what must be equal when a fine-tuning continues, as JSON values."""
        free = {"micro_batch_size", "devices"}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
            if name not in free
        }

    def interval(self, rows: int) -> int:
        """Return the number of steps between validations.

        Args:
            rows: Number of training rows.
        """
        return self.eval_interval or -(-rows // self.global_batch_size)

    def steps(self, rows: int) -> int:
        """Return the number of steps of a run: whole epochs end with a step.

        Args:
            rows: Number of training rows.
        """
        return max(1, math.ceil(self.epochs * -(-rows // self.global_batch_size)))

    def flags(
        self, task: TunedTask, data: Mapping[str, Path], rows: int, seed: int, save: Path
    ) -> list[str]:
        """Return the arguments of `lmcore train` of a new run.

        Args:
            task: The task.
            data: Files with the rows of training and of validation.
            rows: Number of training rows.
            seed: Seed of the run.
            save: Directory of the run.
        """
        steps = self.steps(rows)
        interval = min(steps, self.interval(rows))
        values: dict[str, Any] = {
            "load": self.checkpoint,
            "task": task.head,
            "task_data": data["train"],
            "task_valid_data": data["valid"],
            "seq_length": self.seq_length,
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "train_iters": steps,
            "lr": self.lr,
            "min_lr": 0,
            "lr_decay_style": "linear",
            "lr_warmup_fraction": self.warmup,
            "eval_interval": interval,
            "save_interval": interval,
            "seed": seed,
            "save": save,
        }
        given = {word.partition("=")[0] for word in self.training}
        found = [
            word
            for name, value in values.items()
            if flag_of(name) not in given
            for word in (flag_of(name), str(value))
        ]
        found += ["--use-checkpoint-args", "--finetune", "--task-label", "label", "--task-text"]
        found += ["text", "text2"] if task.pair else ["text"]
        if task.labels:
            found += ["--task-labels", *task.labels]
        if task.recipe.choice_tokens is not None:
            found += ["--task-choice-tokens", str(task.recipe.choice_tokens)]
        return [*found, *self.devices, *self.training]


def settings_of(
    section: EvaluateSection,
    task: TunedTask,
    checkpoint: Path,
    files: Mapping[Part, Sequence[Path]],
    training: Sequence[str],
    plugins: PluginSet,
) -> TunedSettings:
    """Return the settings of a fine-tuning.

    Args:
        section: Options of the command.
        task: The task.
        checkpoint: Checkpoint that training begins from.
        files: Files of each part.
        training: Further arguments of `lmcore train`.
        plugins: Plugins to choose from.
    """
    from lmcore.evaluation.finetune.files import checksum_of

    recipe = task.recipe
    batch = section.global_batch_size or recipe.global_batch_size
    paths = {part: tuple(str(one.resolve()) for one in found) for part, found in files.items()}
    length = section.seq_length
    if length is None:
        length = min(recipe.seq_length, _positions(section, checkpoint) or recipe.seq_length)
    return TunedSettings(
        task=task.name,
        checkpoint=str(checkpoint.resolve()),
        train=paths["train"],
        valid=paths["valid"],
        test=paths["test"],
        epochs=section.epochs or recipe.epochs,
        lr=recipe.lr if section.lr is None else section.lr,
        warmup=recipe.warmup if section.lr_warmup_fraction is None else section.lr_warmup_fraction,
        seq_length=length,
        global_batch_size=batch,
        micro_batch_size=section.micro_batch_size
        or _micro_batch(section, batch, recipe.micro_batch_size, plugins),
        eval_interval=section.eval_interval,
        training=tuple(training),
        checksums={one: checksum_of(Path(one)) for part in paths.values() for one in part},
        devices=tuple(_devices(with_own_tokens(section, checkpoint))),
    )


def shape_of(
    section: EvaluateSection, checkpoint: Path, foreign: ForeignModels | None = None
) -> ModelShape | None:
    """Return the shape of a checkpoint's model; None if it is of no known format.

    Args:
        section: Options of the command.
        checkpoint: The checkpoint, of any format.
        foreign: Models of other programs that were described; None: none.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    from lmcore.checkpoint import survey
    from lmcore.families.saved_shape import read_shape
    from lmcore.model.checkpoint_format import format_of
    from lmcore.train.resume.foreign import ForeignModels

    if format_of(checkpoint) in {None, "lmcore"}:
        path, manifest = survey(checkpoint).newest()
        return read_shape(manifest.model_shape, path)
    model = (foreign or ForeignModels()).describe(checkpoint, section.ckpt_step)
    return None if model is None else model.shape


def require_tokenizer(section: EvaluateSection, checkpoint: Path, foreign: ForeignModels) -> None:
    """Raise if a checkpoint has no tokenizer, and none is chosen, before a model is loaded.

    Args:
        section: Options of the command.
        checkpoint: The checkpoint, of any format.
        foreign: Models of other programs that were described.

    Raises:
        ConfigError: It has none.
        CheckpointError: The checkpoint is damaged.
    """
    from lmcore.checkpoint import survey
    from lmcore.conversion.loading.checkpoint_tokenizer import NO_CHOICE, has_own, no_tokenizer
    from lmcore.conversion.native.manifest import recorded_type
    from lmcore.model.checkpoint_format import format_of

    if section.tokenizer_choice() != NO_CHOICE:
        return
    if format_of(checkpoint) in {None, "lmcore"}:
        path, manifest = survey(checkpoint).newest()
        found, recorded = has_own(path, manifest), recorded_type(manifest.meta)
    else:
        model = foreign.describe(checkpoint, section.ckpt_step)
        found = model is None or model.tokenizer is not None
        recorded = None if model is None else model.tokenizer_type
    if not found:
        raise no_tokenizer(checkpoint, recorded)


def _positions(section: EvaluateSection, checkpoint: Path) -> int | None:
    """Return the number of the checkpoint's learned positions; None if it has no table of them."""
    shape = shape_of(section, checkpoint)
    if shape is None or not shape.learned_positions:
        return None
    return shape.max_position_embeddings


def with_own_tokens(section: EvaluateSection, checkpoint: Path) -> EvaluateSection:
    """Return the options with a chosen WordPiece without `[BOS]`, `[EOS]` if the model's has none.

    Such a model has no rows for them, and they are in no row of a task.  The choice is left out if
    the checkpoint has the same tokens in a `tokenizer.json`.

    Args:
        section: Options of the command.
        checkpoint: The checkpoint, of any format.
    """
    from lmcore.checkpoint import survey
    from lmcore.data.tokenizer import tokenizer_from
    from lmcore.model.checkpoint_format import format_of
    from lmcore.train.resume.foreign import ForeignModels

    choice = section.tokenizer_choice()
    if choice.tokenizer_type not in _WORDPIECES or choice.vocab_file is None:
        return section
    if choice.add_special_tokens is not None:
        return section
    if format_of(checkpoint) in {None, "lmcore"}:
        path, manifest = survey(checkpoint).newest()
        if own := _kept_tokenizer(path, manifest):
            return _without_choice(section) if _has_same(own, choice) else section
        config: Any = manifest.meta.get("config")
        try:
            surplus = config["config"]["data"]["add_special_tokens"] is False
        except (KeyError, TypeError):
            surplus = False
    else:
        model = ForeignModels().describe(checkpoint, section.ckpt_step)
        rows = None if model is None else model.vocab_size or model.shape.padded_vocab_size
        surplus = rows is not None and tokenizer_from(choice).vocab_size > rows
        if surplus and model is not None and _is_own(model.tokenizer, choice):
            return _without_choice(section)
    return dataclasses.replace(section, add_special_tokens=False) if surplus else section


def _without_choice(section: EvaluateSection) -> EvaluateSection:
    """Return the options without the chosen WordPiece, and say that the checkpoint's is used."""
    logger.info(
        "`--vocab-file %s` has the tokens of the checkpoint's own tokenizer, which is used",
        section.tokenizer_choice().vocab_file,
    )
    return dataclasses.replace(section, tokenizer_type=None, vocab_file=None)


def _kept_tokenizer(checkpoint: Path, manifest: Manifest) -> Tokenizer | None:
    """Return a run's copy of a tokenizer that is no WordPiece file; None if there is none."""
    from lmcore.conversion.loading.checkpoint_tokenizer import NO_CHOICE, find_tokenizer

    try:
        found = find_tokenizer(checkpoint, manifest, NO_CHOICE, {})
    except LmcoreError:  # of a plugin, or without files
        return None
    return None if found.name in _WORDPIECES else found


def _is_own(own: TokenizerSettings | None, chosen: TokenizerSettings) -> bool:
    """Return True if a `tokenizer.json` of the checkpoint has the tokens of a chosen WordPiece."""
    from lmcore.data.tokenizer import tokenizer_from

    if own is None or own.tokenizer_type in _WORDPIECES:
        return False
    return _has_same(tokenizer_from(own), chosen)


def _has_same(own: Tokenizer, chosen: TokenizerSettings) -> bool:
    """Return True if a tokenizer has the tokens of a chosen WordPiece."""
    from lmcore.data.tokenizer import tokenizer_from

    bare = tokenizer_from(dataclasses.replace(chosen, add_special_tokens=False))
    # Which token ends a document, `[SEP]` or none, changes nothing: rows are no documents.
    spellings = [getattr(one, "spellings", None) for one in (own, bare)]
    return spellings[0] is not None and spellings[0] == spellings[1]


def _micro_batch(section: EvaluateSection, batch: int, most: int, plugins: PluginSet) -> int:
    """Return the largest number of samples of a pass that divides the step on the devices."""
    from lmcore.runtime.device_choice import select_device
    from lmcore.runtime.launch.rank import RankInfo

    processes = section.nproc_per_node
    if processes is None:
        rank = RankInfo()
        chosen = select_device(plugins, section.device, rank)
        processes = default_process_count(plugins, chosen, rank)
    model = section.tensor_model_parallel_size * section.pipeline_model_parallel_size
    replicas = max(1, processes // model)
    if batch % replicas:
        return 1  # `lmcore train` names the sizes that do not fit
    own = batch // replicas
    return next(size for size in range(min(most, own), 0, -1) if own % size == 0)


def _devices(section: EvaluateSection) -> Iterator[str]:
    """Yield the flags of options that training has too, and that the user gave."""
    tokenizer = {option.name for option in options_of(TokenizerSection)}
    for option in options_of(type(section)):
        value = getattr(section, option.name)
        if option.name not in {*_ALSO_OF_TRAINING, *tokenizer} or value == option.default:
            continue
        if isinstance(value, bool):
            yield option.flag if value else option.flags[1]
        else:
            yield option.flag
            yield from map(str, value if isinstance(value, tuple) else [value])
