"""Comparison of the corpora of a run that resumes with the checkpoint's.

A checkpoint records the digest of each corpus.  The order of the samples has a fingerprint too, but
that does not change with every token.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError
from lmcore.base.log import ALL_RANKS
from lmcore.train.resume.saved_run import part_of

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan

__all__ = ["KEY", "check_same_corpora"]

logger = logging.getLogger(__name__)

KEY = "corpora"
"""Key of the digests in a checkpoint's `meta`, by name of the corpus."""


def check_same_corpora(plan: RunPlan, digests: Mapping[str, str]) -> None:
    """Refuse to continue with a corpus whose files changed, unless a flag accepts other samples.

    Files of validation and test that changed are named in a warning.

    Args:
        plan: The run.
        digests: Digest of each corpus of the run, by name.

    Raises:
        ConfigError: A corpus of training differs from the checkpoint's.
    """
    asked, resume = plan.config.checkpoint, plan.resume
    if resume is None or asked.finetune:
        return
    saved = part_of(resume.manifest.meta, KEY)
    changed = [name for name, digest in digests.items() if saved.get(name, digest) != digest]
    trained = {source.name for source in plan.sources.blends()[0].sources}
    accepted = asked.override_data_order or asked.change_blend
    stopping = [] if accepted else [name for name in changed if name in trained]
    if stopping:
        names = ", ".join(f"`{name}`" for name in stopping)
        raise ConfigError(
            f"corpus {names}: the documents are not the checkpoint's",
            why=f"files of it changed, or its name has other files, since `{resume.checkpoint}` "
            "was written; samples would be repeated or left out",
            hint="restore the files; or continue with the new documents by `--override-data-order`",
        )
    for name in changed:
        logger.warning("corpus `%s`: the documents are not the checkpoint's", name, extra=ALL_RANKS)
