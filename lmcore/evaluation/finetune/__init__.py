"""Tasks that a model is fine-tuned on: their files, and the scores of a head's predictions."""

from __future__ import annotations

from lmcore.evaluation.finetune.glue import GLUE
from lmcore.evaluation.finetune.race import RACE
from lmcore.evaluation.finetune.record import TunedTask

__all__ = ["TUNED"]

TUNED: tuple[TunedTask, ...] = (*RACE, *GLUE)
"""Tasks of lmcore with files to train on."""
