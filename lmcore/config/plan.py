"""Plan of a run: the resolved configuration, which all layers above read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcore.config.derived.batch_size import BatchSizes, batch_sizes
from lmcore.config.derived.data_source import RunSources
from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.option import Option
from lmcore.config.plugin_section import plugin_options
from lmcore.config.section import Config, run_options
from lmcore.config.settings import Provenance
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.model.manifest import Manifest
from lmcore.model.shape import ModelShape

__all__ = ["ResumePoint", "RunPlan"]


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run continues from.

    Attributes:
        checkpoint: Its directory, `iter_XXXXXXX`.
        manifest: Its manifest.
        verified: True if its files were compared with their checksums.
        damaged: Newer checkpoints that were passed over because they are damaged.
        data_rules: Values of `split_rule` and `blend_rule` by which its run ordered the samples;
            empty with `--finetune`.
        loss_rules: Values of `calculate_per_token_loss` and `include_padding_in_loss` of its run;
            empty with `--finetune`.
        global_batch_size: Samples in a step of its run; None with `--finetune` or if unknown.
        foreign: True for a checkpoint of another program.
    """

    checkpoint: Path
    manifest: Manifest
    verified: bool = False
    damaged: tuple[Path, ...] = ()
    data_rules: Mapping[str, str] = field(default_factory=dict)
    loss_rules: Mapping[str, bool] = field(default_factory=dict)
    global_batch_size: int | None = None
    foreign: bool = False


@dataclass(frozen=True)
class RunPlan:
    """Resolved settings of a run and the counts derived from them, equal on every rank.

    Attributes:
        config: All settings, with derived defaults filled in.
        provenance: Origin of each setting; kind "derived" for defaults that `resolve` fills in.
        preset: Name of the preset; None if none was given.
        sources: Data sources, with the datasets of file lists and the metadata of each.
        tokenizer: Identity of the tokenizer.
        resume: The checkpoint to continue from; None if the run starts from initial weights.
        world_size: Number of processes.
        layout: Parallel layout of the processes.
        num_micro_batches: Micro-batches of each process in a step of `global_batch_size`.
        vocab_size: Size of the vocabulary before padding, in tokens.
        padded_vocab_size: Rows of the embedding.
        train_iters: Number of steps.
        train_samples: Number of training samples; as given, else train_iters * global_batch_size.
        valid_samples: Number of samples in all validations of the run together.
        test_samples: Number of samples in one test.
        lr_decay_samples: Samples after which the learning rate has reached its minimum.
        lr_warmup_samples: Samples of linear warm-up; not a whole number for some fractions.
        parameter_count: Exact number of parameters.
        flops_per_step: Model FLOPs of a step of `global_batch_size`, over all processes, without
            recomputation.
        model_shape: Sizes that a checkpoint must agree with, by name.
        shape: Shape of the model.
    """

    config: Config
    provenance: Mapping[str, Provenance]
    preset: str | None
    sources: RunSources
    tokenizer: TokenizerIdentity
    resume: ResumePoint | None
    world_size: int
    layout: ParallelLayout
    num_micro_batches: int
    vocab_size: int
    padded_vocab_size: int
    train_iters: int
    train_samples: int
    valid_samples: int
    test_samples: int
    lr_decay_samples: int
    lr_warmup_samples: float
    parameter_count: int
    flops_per_step: int
    model_shape: Mapping[str, int]
    shape: ModelShape

    @property
    def data_parallel_size(self) -> int:
        """Number of processes that see different samples."""
        return self.layout.data

    @property
    def global_batch_size(self) -> int:
        """Samples in a step over all processes; with a ramp, in a step after it."""
        micro_batch_size = self.config.training.micro_batch_size
        return self.num_micro_batches * micro_batch_size * self.data_parallel_size

    @property
    def batch_sizes(self) -> BatchSizes:
        """Global batch size of every step."""
        return batch_sizes(self.config, self.global_batch_size)

    @property
    def length_option(self) -> str:
        """Name of the option that sets the length of the run."""
        by_samples = self.config.training.train_samples is not None
        return "train_samples" if by_samples else "train_iters"

    @property
    def flops_per_sample(self) -> int:
        """Model FLOPs per sample, counted as in `flops_per_step`."""
        return self.flops_per_step // self.global_batch_size

    @property
    def derived(self) -> dict[str, int | float]:
        """Counts derived from the settings, by name."""
        names = (
            "world_size",
            "data_parallel_size",
            "num_micro_batches",
            "vocab_size",
            "padded_vocab_size",
            "train_iters",
            "train_samples",
            "valid_samples",
            "test_samples",
            "lr_decay_samples",
            "lr_warmup_samples",
            "parameter_count",
            "flops_per_step",
        )
        return {name: getattr(self, name) for name in names}

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting and derived count by name, which must be equal on all ranks."""
        return {name: self.value(option) for name, option in self.options.items()} | self.derived

    @property
    def options(self) -> dict[str, Option]:
        """Every option by name: the core's, then the plugins'."""
        options = dict(run_options())
        for plugin, section in self.config.plugins.items():
            options |= {option.name: option for option in plugin_options(plugin, type(section))}
        return options

    def value(self, option: Option) -> Any:
        """Return the value of an option."""
        return self.config.value(option)

    @property
    def fingerprint(self) -> str:
        """Digest of the settings, 16 hexadecimal digits; equal on all ranks of a run.

        The sections `checkpoint` and `logging` do not change it.
        """
        settings = dataclasses.asdict(self.config)
        settings = {key: settings[key] for key in settings if key not in {"checkpoint", "logging"}}
        text = json.dumps({"settings": settings, "derived": self.derived}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return settings, provenance and derived counts as plain values, for JSON."""
        return {
            "preset": self.preset,
            "config": dataclasses.asdict(self.config),
            "sources": {name: origin.source for name, origin in self.provenance.items()},
            "derived": self.derived,
            "model_shape": dict(self.model_shape),
            "fingerprint": self.fingerprint,
        }
