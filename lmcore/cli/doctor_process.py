"""The process in which `lmcore doctor` runs one plugin's checks: NAME, then the file to write."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from lmcore.errors import LmcoreError
from lmcore.plugins import discover, doctor_checks

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Write the checks of the plugin *argv[0]* to the file *argv[1]* as JSON."""
    name, answer = argv
    try:
        checks = doctor_checks(discover().usable_record(name))
    except LmcoreError as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return 1
    text = json.dumps([dataclasses.asdict(check) for check in checks])
    Path(answer).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
