"""Check that a benchmark measures an installed lmcore with its C++ part; flags for toy sizes.

In a clone of the repository Python may find the source tree in place of what is installed: through
`PYTHONPATH`, an editable installation, or the current folder, which `python -m` searches first.
What that lacks of C++ is done in Python, at a tenth of the speed, and no figure shows why.

Every script that is run as a command calls `parse` and, before it measures, `check`.  With `--toy`
the sizes are tiny and any lmcore will do: that tries the script, and the output says so.
It imports little itself, for some scripts measure a start.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["TOY", "check", "marked", "parse", "shared_flags"]

TOY = "toy size: not a measurement"


def parse(parser: ArgumentParser, **toy: Any) -> Namespace:
    """Add the flags of every benchmark and parse the command line.

    Args:
        parser: Has the script's own flags.
        toy: Defaults of these at toy size; what the command line says goes before them.
    """
    parser.add_argument("--toy", action="store_true", help=f"try the script; {TOY}")
    parser.add_argument(
        "--without-native", action="store_true", help="measure an lmcore that has no C++ part"
    )
    asked = parser.parse_args()
    if asked.toy:
        assert toy.keys() <= vars(asked).keys(), f"no flags of this script: {toy}"
        parser.set_defaults(**toy)
        asked = parser.parse_args()
    return asked


def check(asked: Namespace) -> None:
    """End the script if lmcore is not what is to be measured; at toy size say what it is.

    Python processes that are started later find lmcore where this one does: not in the current
    folder.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    if asked.toy:
        # A script that prints JSON marks that (`marked`).
        stream = sys.stderr if getattr(asked, "json", None) is True else sys.stdout
        print(TOY, file=stream, flush=True)
        return
    problem = source_problem() or ("" if asked.without_native else native_problem())
    if problem:
        print(problem, file=sys.stderr)
        raise SystemExit(2)


def shared_flags(asked: Namespace) -> tuple[str, ...]:
    """Return the flags that `parse` has added and the command line gave, for a script's own."""
    flags = {"--toy": asked.toy, "--without-native": asked.without_native}
    return tuple(flag for flag, given in flags.items() if given)


def marked(figures: Mapping[str, Any], asked: Namespace) -> dict[str, Any]:
    """Return figures for JSON; with a note that they mean nothing, if sizes are toy sizes."""
    return {"note": TOY, **figures} if asked.toy else dict(figures)


def source_problem() -> str:
    """Return what is wrong with where lmcore comes from; "" if it is installed."""
    import importlib.util
    from importlib import metadata

    spec = importlib.util.find_spec("lmcore")
    hint = "`pip install .` in the repository, and then"
    if spec is None or spec.origin is None:
        why = f"this Python, {sys.executable}, does not find it"
        return _problem("lmcore is not installed", why, f"{hint} run the script again")
    found = Path(spec.origin).resolve()
    places = [one.locate_file("lmcore") for one in metadata.distributions(name="lmcore")]
    if found.parent in [Path(str(place)).resolve() for place in places]:
        return ""
    return _problem(
        "this lmcore is not an installed one, so its speed says nothing",
        f"it is the source at {found.parent}, which PYTHONPATH, the current folder or an editable "
        "installation puts first",
        f"{hint} run the script outside the clone or with PYTHONSAFEPATH=1, without a source tree "
        "in PYTHONPATH; or try it with `--toy`",
    )


def native_problem() -> str:
    """Return why lmcore has no C++ part; "" if it has one."""
    from lmcore.data import native

    if native.available:
        return ""
    return _problem(
        "this lmcore has no C++ part",
        native.reason,
        "install it with a C++ compiler, or measure it as it is with `--without-native`",
    )


def _problem(what: str, why: str, hint: str) -> str:
    return f"error: {what}\nwhy: {why}\n\nhint: {hint}"
