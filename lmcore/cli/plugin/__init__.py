"""`lmcore plugin ...`: commands for authors of plugins, which `lmcore-conformance` adds.

The kit implements `plugin check` and `plugin new` in its folders `plugin_check/` and `new_plugin/`,
in `plugins/conformance/src/lmcore_conformance/`.
"""

from __future__ import annotations

from lmcore.cli.group import run_group

__all__ = ["run"]


def run(argv: list[str]) -> int:
    """Run `lmcore plugin ...` and return the exit status."""
    return run_group("plugin", argv)
