"""Rules for the optimizer: its options, the loss scale of fp16, and layouts that it can train."""

from __future__ import annotations

from lmcore.base.errors import ConfigError
from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.optimizers import IMPORT_PATH, OPTIMIZERS, optimizer_facts
from lmcore.config.rules import Problems, Rule
from lmcore.config.settings import LoadedConfig

__all__ = ["OPTIMIZER_RULES", "optimizer_layout_problems"]


def _import_path(loaded: LoadedConfig) -> Problems:
    chosen = loaded.config.optimizer.optimizer
    if ":" in chosen and not IMPORT_PATH.fullmatch(chosen):
        yield ConfigError(
            f"{loaded.shown('optimizer')} is not the import path of a class",
            hint="write `--optimizer module:Class`, such as `torch.optim:NAdam`",
        )


def _loss_scale(loaded: LoadedConfig) -> Problems:
    accelerator = loaded.config.accelerator
    if not accelerator.loss_scale and accelerator.initial_loss_scale < accelerator.min_loss_scale:
        yield ConfigError(
            f"{loaded.shown('initial_loss_scale')} is less than {loaded.shown('min_loss_scale')}",
            why="the scale never falls below its minimum",
            hint=f"use `--min-loss-scale {accelerator.initial_loss_scale:g}` or less",
        )


OPTIMIZER_RULES: tuple[Rule, ...] = (_import_path, _loss_scale)


def optimizer_layout_problems(loaded: LoadedConfig, layout: ParallelLayout) -> Problems:
    """Yield why the optimizer cannot train a model that is divided as *layout* says."""
    chosen, parallel = loaded.config.optimizer, loaded.config.parallel
    facts = optimizer_facts(chosen.optimizer, elementwise=chosen.optimizer_elementwise)
    dividing = []
    if layout.tensor > 1 and (facts.needs_whole or facts.samples_labels):
        dividing.append("tensor_model_parallel_size")
    if layout.zero_stage and facts.needs_whole:
        given = {
            "zero_stage": parallel.zero_stage,
            "use_distributed_optimizer": parallel.use_distributed_optimizer,
        }
        dividing += [name for name, value in given.items() if value] or ["zero_stage"]
    if facts.samples_labels:
        axes = {
            "pipeline_model_parallel_size": layout.pipeline,
            "context_parallel_size": layout.context,
        }
        dividing += [name for name, size in axes.items() if size > 1]
    if not dividing:
        return
    suitable = [
        name
        for name, other in OPTIMIZERS.items()
        if not (other.needs_whole or other.samples_labels)
    ]
    yield ConfigError(
        f"{loaded.shown('optimizer')} cannot be combined with "
        + " and ".join(loaded.shown(name) for name in dividing),
        why=facts.needs_whole
        or "it samples labels from the logits of the whole vocabulary and of whole sequences",
        hint=f"use `--optimizer {suitable[0]}`, `{'`, `'.join(suitable[1:])}`, or "
        + " and ".join(map(loaded.removal, dividing)).replace(" and remove ", " and "),
    )
