"""Runs continued from their own `config.yaml`, which is bitwise the uninterrupted run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lmcore.config.file.yaml_file import written_value
from lmcore.config.load import load_config
from lmcore.plugin import discover
from lmcore.plugin.registrations import plugin_sections

FLAGS = "--train-iters 8 --global-batch-size 8 --attention-dropout 0.1 --exit-interval 3"


def write_as_earlier(config: Path) -> None:
    """Write a run's `config.yaml` as lmcore 2026.11 did: every value is a setting."""
    loaded = load_config([str(config)], plugins=plugin_sections(discover()))
    sections: dict[str, list[str]] = {}
    for option in loaded.options.values():
        text = f"  {option.key}: {written_value(loaded.value(option.name))}"
        source = loaded.provenance[option.name].source
        sections.setdefault(option.section, []).append(f"{text}  # {source}")
    lines = ["# The settings of a run; `lmcore train THIS_FILE --save NEW_DIR` repeats it."]
    for section, rows in sections.items():
        lines += ["", f"{section}:", *rows]
    config.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("earlier", [False, True])
def test_continued_by_its_file(
    train: Any,
    assert_same: Any,
    data_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    earlier: bool,
) -> None:
    """Three starts by the run's file, from another working directory, are one run."""
    monkeypatch.chdir(Path(data_prefix).parent)
    flags = f"{FLAGS} --lr 0.01 --lr-warmup-fraction 0 --data-path {Path(data_prefix).name}"
    whole = train("whole", flags.replace("--exit-interval 3", ""))
    run = train("run", flags)
    config = run.directory / "config.yaml"
    if earlier:
        write_as_earlier(config)
    else:
        (run.directory.parent / "elsewhere").mkdir()
        monkeypatch.chdir(run.directory.parent / "elsewhere")
        config = Path(os.path.relpath(config))
    for _ in range(2):
        run = train("run", f"{config} --load {run.directory}", None)
        assert run.status == 0, run.err
        assert "warning" not in run.err
    assert run.curve() == whole.curve()
    assert_same(run.saved(), whole.saved())
    text = (run.directory / "config.yaml").read_text()
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert lines["lr"].endswith("# --lr")


def test_fine_tuned_run(train: Any) -> None:
    """A fine-tuned run is continued by its file, which asks for no second fine-tuning."""
    base = train("base", "--train-iters 2")
    config = base.directory / "config.yaml"
    tuned = train("tuned", f"{config} --finetune --load {base.directory} --exit-interval 1", None)
    assert tuned.status == 0, tuned.err
    config = tuned.directory / "config.yaml"
    again = train("tuned", f"{config} --load {tuned.directory} --exit-interval none", None)
    assert again.status == 0, again.err
    assert [row["step"] for row in again.rows] == [1, 2]


def test_default_run_continued(train: Any) -> None:
    """The bundled text is continued without a word about a split that nobody gave."""
    run = train("run", "--train-iters 2 --exit-interval 1 --eval-iters 1", None)
    config = run.directory / "config.yaml"
    again = train(
        "run", f"{config} --load {run.directory} --exit-interval none --eval-iters 1", None
    )
    assert again.status == 0, again.err
    assert "--split" not in again.err
    assert "warning" not in again.err
