"""Hashes of the packages that the checks install, for `pip --require-hashes`.

    hashes.py            write `.ci/tox.txt` and `.ci/packages.txt`, after a change of the pins
    hashes.py verify     fetch all packages of `.ci/packages.txt`, and fail if a file is another one

`.ci/tox.txt` has what `.ci/run` installs before all else: wheels for every platform, one hash each.
`.ci/packages.txt` has the packages of constraints.txt except our own, torch (whose wheel has
another hash in each of its indexes) and source archives.  It has the hashes of the wheels for Linux
on x86-64 and Python 3.11.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TOX = ROOT / ".ci" / "tox.txt"
PACKAGES = ROOT / ".ci" / "packages.txt"
TOX_HEADER = """\
# tox and what it needs, for `pip install --require-hashes`: written by tests/lib/suite/hashes.py
"""
PACKAGES_HEADER = """\
# The wheels of constraints.txt for Linux on x86-64 and Python 3.11, for `pip --require-hashes`:
# written and verified by tests/lib/suite/hashes.py.
"""
LEFT_OUT = re.compile(r"(lmcore\b|torch==|deepspeed==)", re.IGNORECASE)
"""Pins without a wheel of one hash."""

PLATFORM = ("Linux", "x86_64", (3, 11))


def chosen(*options: str) -> list[tuple[str, str, str, str]]:
    """Return name, version, file and SHA-256 of what pip would install, given its arguments."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report), *options]
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


def pins() -> list[str]:
    """Return the pins of constraints.txt whose wheels have hashes in `.ci/packages.txt`."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [
        line
        for line in lines
        if "==" in line[1:] and not line.startswith("#") and not LEFT_OUT.match(line)
    ]


def lines_of(rows: list[tuple[str, str, str, str]]) -> str:
    """Return the lines of a requirements file with hashes."""
    return "".join(
        f"{name}=={version} --hash=sha256:{digest}\n" for name, version, _, digest in rows
    )


def write() -> None:
    """Write both files."""
    rows = chosen("tox")
    bound = [file for _, _, file, _ in rows if not file.endswith("-none-any.whl")]
    if bound:
        sys.exit(f"error: other platforms have other files than {', '.join(bound)}")
    TOX.write_text(TOX_HEADER + lines_of(rows), encoding="utf-8")
    if (platform.system(), platform.machine(), sys.version_info[:2]) != PLATFORM:
        sys.exit("error: .ci/packages.txt is written by Python 3.11 on Linux and x86-64")
    rows = chosen("--no-deps", "--only-binary", ":all:", *pins())
    PACKAGES.write_text(PACKAGES_HEADER + lines_of(rows), encoding="utf-8")


def verify() -> None:
    """Fetch the wheels of `.ci/packages.txt`; pip fails if one has another hash."""
    if (platform.system(), platform.machine(), sys.version_info[:2]) != PLATFORM:
        print("skipped: the hashes are those of wheels for Python 3.11 on Linux and x86-64")
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--require-hashes", "--dest", folder]
        done = subprocess.run([*command, "--requirement", str(PACKAGES)], check=False)
        if done.returncode:
            sys.exit(done.returncode)
        print(f"{len(list(Path(folder).iterdir()))} packages have the recorded hashes")


if __name__ == "__main__":
    verify() if sys.argv[1:] == ["verify"] else write()
