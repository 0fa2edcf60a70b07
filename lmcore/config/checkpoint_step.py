"""Value of `--ckpt-step`: the step of a checkpoint, or the word for the best one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lmcore.base.errors import ConfigError, counted

__all__ = ["BEST", "checkpoint_step", "steps_in_words"]

_SHOWN = 20

BEST = "best"
_STEP = re.compile(r"(?:iter_|global_step)?(\d{1,15})")


def checkpoint_step(text: str) -> int | None:
    """Return the step that `--ckpt-step` names; None for the best checkpoint.

    Args:
        text: A number, also in the form of a checkpoint's name here (`iter_0000100`) or of
            another program's (`global_step100`), or `best`.

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


def steps_in_words(steps: Sequence[int], others: Sequence[str] = ()) -> str:
    """Return which checkpoints there are, for a message: the last ones if there are many.

    Args:
        steps: Steps of the checkpoints, in their order; empty only if there are others.
        others: Names of checkpoints without a step.
    """
    shown = ", ".join(map(str, steps[-_SHOWN:]))
    if len(steps) + len(others) == 1:
        return f"there is one checkpoint, {f'of step {shown}' if steps else others[0]}"
    earlier = len(steps) - _SHOWN
    more = f"{counted(earlier, 'earlier one')} and " if earlier > 0 else ""
    listed = [f"{more}{'steps' if len(steps) > 1 else 'step'} {shown}"] if steps else []
    return f"there are checkpoints of {' and '.join([*listed, *others[:_SHOWN]])}"
