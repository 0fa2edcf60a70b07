"""Error for `--continue` with a directory of another program, without torch."""

from __future__ import annotations

import shlex
from pathlib import Path

from lmcore.errors import CheckpointError, ConfigError, LmcoreError

__all__ = ["not_a_run"]


def not_a_run(path: Path, step: str | None = None) -> LmcoreError | None:
    """Return the error for a run to continue that is another program's; None if it is none.

    Args:
        path: Path of `--continue`, at which no run is.
        step: Value of `--ckpt-step`; None if it is not given.
    """
    # Only if needed: they are slow.
    from lmcore.model.checkpoint_format import format_of, formats, of_absent_plugin

    if not path.is_dir():
        return None
    try:
        name = format_of(path)
    except CheckpointError:  # several checkpoints, and no file names the newest
        name = "megatron"
    if name is None:
        return of_absent_plugin(path)
    if name == "lmcore":
        return None
    found = formats()[name]
    shown = shlex.quote(str(path))
    at_step = "" if step is None else f" --ckpt-step {shlex.quote(step)}"
    convert = f"`lmcore checkpoint convert {shown} RUN --to lmcore{at_step}"
    begins = f"`--load {shown}{at_step}` begins a run at step 0 with the weights alone"
    what = f"`--continue {path}`: it is {found.described}, not a run of lmcore"
    why = "a run continues with the settings and the state that lmcore wrote"
    if found.optimizer:
        hint = f"{convert}` makes a run that continues, with the optimizer's state; {begins}"
        return ConfigError(what, why=why, hint=hint)
    why += "; such a model has weights alone"
    hint = begins
    others = (one for one in formats().values() if one.optimizer and one.matches(path))
    if (beside := next(others, None)) is not None:
        convert += f" --source-format {beside.name}`"
        hint = f"{convert} makes a run of {beside.described} in it, with the optimizer's state; "
        hint += begins
    return ConfigError(what, why=why, hint=hint)
