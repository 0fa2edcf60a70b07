"""The tests that any accelerator plugin of lmcore must pass, as a pytest plugin.

    pytest --pyargs lmcore_conformance --accelerator mychip

`registry` has every check with its level and reason, `declaration` what an author says of gaps,
`runner` the processes in which checks run, `report` the levels that a plugin reaches.
"""

from __future__ import annotations

__all__ = ["SUITE_VERSION"]

SUITE_VERSION = "1.0"
"""Version of the suite's checks and requirements.  The first number is that of the plugin contract
that it tests; a check or requirement that is added raises the second."""
