"""Refusal of output paths that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.data.existing_output import require_unused
from lmcore.data.input.document import key_missing


@pytest.mark.parametrize("rest", ["x", "deeper/x"])
def test_output_below_a_file(tmp_path: Path, rest: str) -> None:
    """An output below a file is refused before input is read, and the file is named."""
    file = tmp_path / "web.jsonl"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="cannot write") as caught:
        require_unused([file / rest], "--output-prefix")
    assert caught.value.why == f"`{file}` is a file"
    require_unused([tmp_path / "new" / "x"], "--output-prefix")


def test_keys_joined_by_commas() -> None:
    """Several keys in one word are shown as several words."""
    problem = key_missing("title,text", ["text", "title"], "--json-keys")
    assert problem.hint == "separate keys by spaces: `--json-keys title text`"
    assert "spaces" not in str(key_missing("a,b", ["text"], "--json-keys").hint)
