"""Settings of a run that need a newer torch than the installed one; found without importing it."""

from __future__ import annotations

from collections.abc import Iterator

from lmcore.base.errors import LmcoreError
from lmcore.config.settings import LoadedConfig
from lmcore.contract.torch_versions import MUON, SPLIT_BACKWARD

__all__ = ["torch_problems"]


def torch_problems(loaded: LoadedConfig) -> Iterator[LmcoreError]:
    """Yield an error for each setting that the installed torch cannot run.

    Args:
        loaded: Settings, with their sources.
    """
    problems = []
    if loaded.config.optimizer.optimizer == "muon":
        problems.append(MUON.problem(loaded.shown("optimizer"), hint="use `--optimizer adam`"))
    if (loaded.config.parallel.pipeline_schedule or "").startswith("zero-bubble"):
        shown = loaded.shown("pipeline_schedule")
        hint = "use `--pipeline-schedule 1f1b`"
        problems.append(SPLIT_BACKWARD.problem(shown, hint=hint))
    yield from filter(None, problems)
