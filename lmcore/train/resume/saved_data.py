"""Record of the data in the checkpoint of `--load`, read before the data is opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore.conversion.native.manifest import UNKNOWN_ORDER
from lmcore.data.blend.dataset import BlendRecord
from lmcore.errors import ConfigError
from lmcore.train.resume.saved_meta import check_saved_run

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan

__all__ = ["SavedData", "saved_data"]


@dataclass(frozen=True)
class SavedData:
    """The data of the run that wrote a checkpoint.

    Attributes:
        order: Fingerprint of the order of the training samples.
        consumed_samples: Number of samples that the run had consumed.
        record: Record of the sources; None for a cyclic order and in old checkpoints.
    """

    order: str
    consumed_samples: int
    record: BlendRecord | None


def saved_data(plan: RunPlan) -> SavedData | None:
    """Return the data record of the checkpoint that the run resumes.

    None if the run starts from initial weights, if the checkpoint does not record the order of its
    samples, and with `--finetune` or `--override-data-order`.

    Raises:
        CheckpointError: The manifest lacks what a run needs to continue.
        ConfigError: `--change-blend`, and the checkpoint has no record of its sources.
    """
    asked, resume = plan.config.checkpoint, plan.resume
    if resume is None or asked.finetune or asked.override_data_order:
        return None
    checkpoint, manifest = resume.checkpoint, resume.manifest
    check_saved_run(checkpoint, manifest, own_schedule=asked.override_opt_param_scheduler)
    meta = manifest.meta
    if meta["data_order"] == UNKNOWN_ORDER and not asked.change_blend:
        return None
    record = meta.get("data")
    if record is None and asked.change_blend:
        raise ConfigError(
            f"`--change-blend`: `{checkpoint}` does not say what was read of which source",
            why="it is of a cyclic order, or of an older version",
            hint="`--override-data-order` continues without keeping count",
        )
    return SavedData(
        meta["data_order"],
        meta["counters"]["consumed_samples"],
        None if record is None else BlendRecord.from_dict(record),
    )
