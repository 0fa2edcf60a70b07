"""Hashes of the packages that `.ci/run` installs before all else: `.ci/tox.txt`.

    hashes.py        write the file, after a change of the pins of tox or of what it needs

pip chooses the files and reports their hashes; it installs nothing.  All of them are wheels for
every platform, so one hash of each is enough.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / ".ci" / "tox.txt"
HEADER = """\
# tox and what it needs, for `pip install --require-hashes`: written by tests/lib/suite/hashes.py
"""


def chosen(*names: str) -> list[tuple[str, str, str, str]]:
    """Return name, version, file and SHA-256 of what pip would install for some packages."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report), *names]
        env = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
        subprocess.run(command, check=True, env=env)
        files = json.loads(report.read_text(encoding="utf-8"))["install"]
    return sorted(
        (
            one["metadata"]["name"],
            one["metadata"]["version"],
            one["download_info"]["url"].rpartition("/")[2],
            one["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for one in files
    )


def main() -> None:
    """Write the file."""
    rows = chosen("tox")
    bound = [file for _, _, file, _ in rows if not file.endswith("-none-any.whl")]
    if bound:
        sys.exit(f"error: other platforms have other files than {', '.join(bound)}")
    lines = [f"{name}=={version} --hash=sha256:{digest}\n" for name, version, _, digest in rows]
    FILE.write_text(HEADER + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
