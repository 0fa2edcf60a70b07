"""Environment variables of lmcore, so that a misspelt one is noticed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from lmcore.base import log
from lmcore.base.errors import nearest

__all__ = ["VARIABLES", "warn_unknown_variables"]

logger = logging.getLogger(__name__)

_PREFIX = "LMCORE_"
_OF_WORKERS = "LMCORE_SELECTION"
VARIABLES = (
    "LMCORE_DEVICE",
    "LMCORE_LAUNCHED",
    "LMCORE_PLUGINS",
    "LMCORE_PLUGIN_OFF",
    "LMCORE_SECRET",
    "LMCORE_SECRET_FILE",
    _OF_WORKERS,
)
"""Names of all variables of lmcore; a plugin's own begin with LMCORE_ and the plugin's name."""


def warn_unknown_variables(env: Mapping[str, str], plugins: Iterable[str]) -> None:
    """Log a warning for each variable with lmcore's prefix that neither lmcore nor a plugin reads.

    Processes that lmcore starts do not repeat it.

    Args:
        env: Environment of the process.
        plugins: Names of the installed plugins.
    """
    unknown = sorted(name for name in env if name.startswith(_PREFIX) and name not in VARIABLES)
    if not unknown or _OF_WORKERS in env:
        return
    of_plugins = tuple(f"{_PREFIX}{name.upper().replace('-', '_')}_" for name in plugins)
    for name in unknown:
        if not name.startswith(of_plugins):
            near = nearest(name, VARIABLES)
            meant = f"; did you mean `{near}`?" if near else ""
            text = "`%s` has no effect: lmcore has no such variable%s"
            log.warn_once(logger, text, name, meant, all_ranks=True)
