"""Health of a GPU, from a tree of files as Linux has for the PCI bus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lmcore_xpu.health import health_of

ADDRESS = "0000:3a:00.0"
FACTS = {"gpus": [{"address": "0000:18:00.0"}, {"address": ADDRESS}]}
COUNTERS = "Undefined 0\nDLP {0}\nTOTAL_ERR_FATAL {0}\n"


@pytest.fixture
def bus(tmp_path: Path) -> Path:
    """Folder of a GPU that answers; its link had two errors before."""
    folder = tmp_path / "sys/bus/pci/devices" / ADDRESS
    folder.mkdir(parents=True)
    (folder / "config").write_bytes(b"\x86\x80\xd5\x0b")
    (folder / "aer_dev_fatal").write_text(COUNTERS.format(2))
    return folder


def check_of(root: Path) -> Callable[[], str | None]:
    """Return the check of the second GPU."""
    check = health_of(FACTS, 1, root)
    assert check is not None
    return check


def test_a_gpu_that_answers_is_healthy(bus: Path, tmp_path: Path) -> None:
    """Errors of the time before do not count, nor do counters that are missing or unreadable."""
    check = check_of(tmp_path)
    assert check() is None
    (bus / "aer_dev_fatal").write_text("no counters")
    assert check() is None
    (bus / "aer_dev_fatal").unlink()
    assert check() is None


def test_errors_of_the_link(bus: Path, tmp_path: Path) -> None:
    check = check_of(tmp_path)
    (bus / "aer_dev_fatal").write_text(COUNTERS.format(3))
    assert check() == "1 fatal error of its PCI link since the run began"


def test_a_gpu_that_does_not_answer(bus: Path, tmp_path: Path) -> None:
    """The bus reads ones from it; a GPU that was removed has no files."""
    check = check_of(tmp_path)
    (bus / "config").write_bytes(b"\xff\xff\xff\xff")
    assert check() == f"it does not answer on the PCI bus, at {ADDRESS}"
    assert health_of(FACTS, 1, tmp_path) is None, "it has to answer at first"
    (bus / "config").unlink()
    assert check() == f"it is no longer on the PCI bus, at {ADDRESS}"


def test_where_it_cannot_be_known(tmp_path: Path) -> None:
    """A GPU of Windows, and a program's own probe."""
    assert health_of({"gpus": [{"address": "WSL"}]}, 0, tmp_path) is None
    assert health_of({}, 0, tmp_path) is None
