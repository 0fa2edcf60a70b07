"""What every test of the repository shares: the selection of tests and their time limits.

The modules are in `tests/lib`, which `pythonpath` in pyproject.toml puts on the path.
"""

from __future__ import annotations

pytest_plugins = ["suite.selection", "suite.durations"]
