"""The command line as a module: `python -m lmcore COMMAND`, for launchers that start modules."""

from __future__ import annotations

from lmcore.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
