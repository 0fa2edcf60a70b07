"""Value of `--ckpt-step`: the step of a checkpoint, or the word for the best one."""

from __future__ import annotations

import re

from lmcore.errors import ConfigError

__all__ = ["BEST", "checkpoint_step"]

BEST = "best"
_STEP = re.compile(r"(?:iter_|global_step)?(\d{1,15})")


def checkpoint_step(text: str) -> int | None:
    """Return the step that `--ckpt-step` names; None for the best checkpoint.

    Args:
        text: A number, also in the form of a checkpoint's name here (`iter_0000100`) or of
            DeepSpeed's tags (`global_step100`), or `best`.

    Raises:
        ConfigError: It is none of these.
    """
    if text == BEST:
        return None
    found = _STEP.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"`--ckpt-step {text}`: expected the number of a step, or `{BEST}`",
            hint=f"`--ckpt-step 100` is the checkpoint of step 100, `--ckpt-step {BEST}` that of "
            "the lowest validation loss",
        )
    return int(found[1])
