"""Checkpoints: a flat mapping of tensors and JSON, complete or absent, verified on load.

It depends on no model and no training.  Importing this package loads no torch; saving and loading
do (and torch's distributed checkpoint package with them, at the first call).
"""

from __future__ import annotations

from lmcore.checkpoint.choice import chosen_checkpoint
from lmcore.checkpoint.layout import find_checkpoint, no_such_directory, survey
from lmcore.checkpoint.load import CheckpointReader, load_checkpoint
from lmcore.checkpoint.manifest import Manifest, TensorEntry, check_shape, read_manifest
from lmcore.checkpoint.save import save_checkpoint, save_streamed
from lmcore.checkpoint.verify import newest_verified, verify_checkpoint
from lmcore.checkpoint.write_plan import WritePlan, WritePlanner, num_bytes

__all__ = [
    "CheckpointReader",
    "Manifest",
    "TensorEntry",
    "WritePlan",
    "WritePlanner",
    "check_shape",
    "chosen_checkpoint",
    "find_checkpoint",
    "load_checkpoint",
    "newest_verified",
    "no_such_directory",
    "num_bytes",
    "read_manifest",
    "save_checkpoint",
    "save_streamed",
    "survey",
    "verify_checkpoint",
]
