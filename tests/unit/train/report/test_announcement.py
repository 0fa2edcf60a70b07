"""The first lines of a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.optim.schedule import LearningRateSchedule
from lmcore.train.report.announcement import _schedule, _training_data, _validation

_MIXED = "; `lmcore data prepare --shuffle SEED` mixes them"


def plan_of(schedule: LearningRateSchedule) -> Any:
    """Return what the line reads of a plan with this schedule, in steps of 8 samples."""
    return SimpleNamespace(
        lr_warmup_samples=schedule.warmup_samples,
        lr_decay_samples=schedule.decay_samples,
        global_batch_size=8,
        batch_sizes=SimpleNamespace(ramp_samples=0),
    )


@pytest.mark.parametrize(
    "samples, words",
    [
        (0, "no warm-up,"),
        (0.8, "no warm-up,"),
        (4, "warm-up over 1 step,"),
        (8, "warm-up over 1 step,"),
        (16_000, "warm-up over 2,000 steps,"),
    ],
)
def test_warm_up_is_counted_in_steps(samples: float, words: str) -> None:
    """The schedule's line has the whole number of warm-up steps, in the singular for one."""
    schedule = LearningRateSchedule("cosine", 2e-3, 0.0, samples, 32_000)
    assert words in _schedule(plan_of(schedule), schedule)


def test_a_schedule_that_is_not_of_the_settings_comes_with_its_end() -> None:
    """A kept or restarted schedule ends where the settings do not say."""
    schedule = LearningRateSchedule("cosine", 2e-3, 0.0, 8, 80)
    plan = plan_of(schedule)
    assert _schedule(plan, schedule).endswith("cosine decay to 0")
    kept = dataclasses.replace(schedule, decay_samples=40)
    assert _schedule(plan, kept).endswith("cosine decay to 0 after 5 steps")
    restarted = dataclasses.replace(schedule, start_samples=80)
    words = "learning rate 0.002, restarted after 10 steps, warm-up over 1 step, cosine decay to 0"
    assert _schedule(plan, restarted) == f"{words} after 20 steps"


@pytest.mark.parametrize(
    "files, seed, words",
    [
        (1, None, None),
        (2, 3, None),
        (
            2,
            None,
            "3 of 100 documents (3%): 97 to 99, in the order of its 2 input files",
        ),
    ],
)
def test_validation_of_the_last_files_is_told(
    tmp_path: Path, files: int, seed: int | None, words: str | None
) -> None:
    """A dataset of several files in their order is validated on the last ones: a line says so."""
    from lmcore.data.blend.sources import OpenSource
    from lmcore.data.indexed.dataset import IndexedDataset
    from lmcore.data.prepare.run import PrepareRequest, prepare
    from lmcore.data.tokenizer import ByteTokenizer

    inputs = [tmp_path / f"{i}.jsonl" for i in range(files)]
    for path in inputs:
        path.write_text(f"{json.dumps({'text': 'a'})}\n" * (100 // files))
    prepare(
        PrepareRequest(
            tuple(map(str, inputs)), str(tmp_path / "all"), ByteTokenizer(), shuffle=seed
        )
    )
    prefix = str(tmp_path / "all_text_document")
    source = OpenSource(prefix, IndexedDataset(prefix), (97, 100))
    plan: Any = SimpleNamespace(valid_samples=8, sources=SimpleNamespace(divided=object()))
    datasets: Any = SimpleNamespace(sources={"valid": (source,)})
    assert list(_validation(plan, datasets)) == (
        [] if words is None else [f"valid     {words}{_MIXED}"]
    )
    datasets.sources["valid"] = (source, source)
    words = "valid     6 of 200 documents (3%): a range of each of the 2 datasets"
    assert list(_validation(plan, datasets)) == [words]
    plan.sources.divided = None
    words = f"valid     {prefix}, {prefix}: 6 tokens, 6 documents"
    assert list(_validation(plan, datasets)) == [words]
    plan.valid_samples = 0
    assert list(_validation(plan, datasets)) == []


def test_training_data_without_the_documents_of_other_parts(tmp_path: Path) -> None:
    """With separate sources for each part, the line counts what training reads."""
    from lmcore.data.blend.sources import OpenSource
    from lmcore.data.indexed.dataset import IndexedDataset
    from lmcore.data.prepare.run import PrepareRequest, prepare
    from lmcore.data.tokenizer import ByteTokenizer

    (tmp_path / "x.jsonl").write_text('{"text": "ab"}\n' * 4 + '{"text": "abcd"}\n' * 2)
    prepare(PrepareRequest((str(tmp_path / "x.jsonl"),), str(tmp_path / "x"), ByteTokenizer()))
    indexed = IndexedDataset(str(tmp_path / "x_text_document"))
    plan: Any = SimpleNamespace(sources=SimpleNamespace(divided=None))
    datasets: Any = SimpleNamespace(
        sources={
            "train": (OpenSource("x", indexed, (0, 5)),),
            "valid": (OpenSource("x", indexed, (5, 6)),),
        },
        tokenizer=SimpleNamespace(name="ByteTokenizer"),
        token_count=indexed.tokens,
        document_count=indexed.document_count,
    )
    tokens = 4 * 2 + 4  # without an end of document
    assert _training_data(plan, datasets) == f"{tokens} tokens, ByteTokenizer, 5 documents"
    plan.sources.divided = object()
    assert _training_data(plan, datasets).startswith(f"{indexed.tokens} tokens, ")
    assert _training_data(plan, datasets).endswith(", 6 documents")
