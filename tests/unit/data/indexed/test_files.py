"""Files of datasets: what the system refuses is an error that names the path."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore.base.errors import DataError
from lmcore.data.indexed.files import disk_errors


def test_a_file_in_place_of_a_directory(tmp_path: Path) -> None:
    """A directory that cannot be made because of a file does not only say `File exists`."""
    path = tmp_path / "cache"
    path.write_text("x")
    with pytest.raises(DataError) as caught, disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    assert caught.value.why == f"`{path}` is a file, not a directory"
