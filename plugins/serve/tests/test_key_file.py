"""Files of API keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore_serve.key_file import read_keys


@pytest.mark.parametrize(
    "mode, warned", [(0o600, False), (0o400, False), (0o644, True), (0o640, True)]
)
def test_who_can_read_the_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    """A file that other users can read is named, with the command that ends it."""
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n", encoding="ascii")
    file.chmod(mode)
    assert read_keys(str(file)) == ["one", "two"]
    assert (f"`chmod 600 {file}`" in caplog.text) == warned
