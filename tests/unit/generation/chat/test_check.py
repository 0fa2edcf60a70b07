"""The check of a chat template before a server takes requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.generation.chat.template import check_template


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ raise_exception('a') }}"])
def test_templates_that_may_work(tmp_path: Path, source: str) -> None:
    """One that refuses a single message may take others."""
    path = tmp_path / "template"
    path.write_text(source)
    check_template(str(path))


def test_no_template(tmp_path: Path) -> None:
    """It is an error that names the line."""
    path = tmp_path / "template"
    path.write_text("a\n{% for")
    with pytest.raises(ConfigError, match="is no valid template") as caught:
        check_template(str(path))
    assert (caught.value.why or "").startswith("line 2: ")
