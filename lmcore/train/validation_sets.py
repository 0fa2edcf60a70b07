"""`ValidationSet`: named data for validation, beside the validation data of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore.base.errors import DataError, counted
from lmcore.config.derived.data_source import Blend, DataSource, RunSources
from lmcore.data.blend.sources import (
    OpenSource,
    SampleSettings,
    TrainingSamples,
    build_samples,
    open_sources,
)

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan

__all__ = ["ValidationSet", "open_validation_sets"]


@dataclass(frozen=True)
class ValidationSet:
    """Named data for validation, which has a loss for itself.

    Attributes:
        sources: Its open data sources.
        samples: Its samples.
    """

    sources: tuple[OpenSource, ...]
    samples: TrainingSamples


def open_validation_sets(
    plan: RunPlan, settings: SampleSettings, prefix_of: Callable[[DataSource], str]
) -> dict[str, ValidationSet]:
    """Open the named validation sets of a run, whose data may be training data, too.

    Args:
        plan: The run; without validations it opens none.
        settings: Settings of all samples.
        prefix_of: Returns the prefix of a source.

    Raises:
        DataError: A data set is damaged, or too short for a sample.
    """
    sets = plan.sources.sets if plan.valid_samples else {}
    return {name: _opened(name, blend, plan, settings, prefix_of) for name, blend in sets.items()}


def _opened(
    name: str,
    blend: Blend,
    plan: RunPlan,
    settings: SampleSettings,
    prefix_of: Callable[[DataSource], str],
) -> ValidationSet:
    data = plan.config.data
    opened = open_sources(
        RunSources(None, {"valid": blend}),
        needed=("valid",),
        prefix_of=prefix_of,
        split_rule=data.split_rule,
        blend_rule=data.blend_rule,
        verify_indices=data.verify_data,
    )["valid"]
    # A data set that is shorter than a sample would be repeated within one.
    if not any(settings.builder.samples_per_epoch(source, settings) for source in opened):
        tokens = sum(source.indexed.tokens_in(source.documents) for source in opened)
        raise DataError(
            f"the validation set `{name}` of `{blend.flag}` has no sample",
            why=f"it has {counted(tokens, 'token')}, and a sample of `--seq-length "
            f"{settings.sequence_length}` needs more",
            hint="give more data, or leave the set out",
        )
    return ValidationSet(opened, build_samples(opened, plan.valid_samples, settings, name="valid"))
