"""The kit for authors of plugins: `lmcore plugin new|check`, the contract, the conformance suite.

    lmcore plugin new mychip
    lmcore plugin check mychip
    python -m pytest --pyargs lmcore_conformance --accelerator mychip

`plugin` adds the commands of `new_plugin` and `plugin_check`; `contract` has the snapshots.  Of the
suite, `pytest_plugin` is the module that pytest loads, `registry` has every check with its level
and reason, `declaration` an author's gaps, `runner` the processes in which checks run, `report` the
levels that a plugin reaches.
"""

from __future__ import annotations

__all__ = ["SUITE_VERSION"]

SUITE_VERSION = "1.2"
"""Version of the suite's checks and requirements.  The first number is the first of the plugin
contract that it tests; a check or requirement that is added raises the second."""
