"""`lmcore evaluate ENCODER --task nq --index DIR`: questions that blocks of an index answer."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, DataError
from lmcore.cli.evaluate.outputs import write_results
from lmcore.cli.evaluate.report import aligned, metrics_record, shown
from lmcore.cli.evaluate.scores import require_outputs
from lmcore.cli.evaluate.stop import NOTHING_KEPT, said_at_stop
from lmcore.cli.index.build import loaded_encoder
from lmcore.cli.text.sample_output import open_output_file
from lmcore.evaluation.chosen import NQ, places_of

if TYPE_CHECKING:
    from lmcore.cli.evaluate.section import EvaluateSection
    from lmcore.config.plugin_section import PluginSettings
    from lmcore.evaluation.score import Metric
    from lmcore.plugin import PluginSet
    from lmcore.retrieval.answers import Question

__all__ = ["NQ", "RELEASE", "SUMMARY", "TOPS", "evaluate_retrieval"]

"""Name of the task."""
TOPS = (1, 5, 20, 100)
"""Numbers of blocks among which an answer is looked for."""
SUMMARY = "Questions that one of the first blocks of an index answers, as in Natural Questions."
RELEASE = "`nq-test.qa.csv` of Dense Passage Retrieval, or JSON lines with `question` and `answers`"
_FILES = ("nq-test.qa.csv", "nq-test*", "*nq*test*", "*nq*.qa.csv", "*nq*.jsonl")


def evaluate_retrieval(
    section: EvaluateSection, plugins: PluginSet, settings: PluginSettings
) -> int:
    """Score an index and its encoder by the questions of a file; return the exit status.

    Args:
        section: Options of the command.
        plugins: Plugins to choose from.
        settings: Options of the plugins.

    Raises:
        CheckpointError, ConfigError, DataError: The index, its encoder or the file cannot be used,
            or options contradict each other.
    """
    _check(section)
    path = _file(section)
    require_outputs(section, [path])
    from lmcore.evaluation.score import Metric, standard_error
    from lmcore.retrieval.answers import place_of_answer, read_questions
    from lmcore.retrieval.index import BlockIndex
    from lmcore.retrieval.index_encoder import require_encoder
    from lmcore.retrieval.search import search

    asked = read_questions(path)[: section.limit]
    assert section.index is not None
    index = BlockIndex(Path(section.index))
    load = Path(section.checkpoints[0] if section.checkpoints else index.record.checkpoint)
    begin = time.perf_counter()
    with (
        said_at_stop(NOTHING_KEPT),
        loaded_encoder(section, load, plugins, settings) as encoder,
    ):
        require_encoder(index, encoder)
        source = index.source(encoder)
        found = search(index, encoder.questions([one.text for one in asked]), top=max(TOPS))
    places: list[int | None] = []
    for question, blocks in zip(asked, found.blocks, strict=True):
        texts = [source.text(int(number)) for number in blocks]
        places.append(
            place_of_answer(question.answers, [f"{one.title} {one.text}" for one in texts])
        )
    metrics = {}
    for top in TOPS:
        answered = [float((place or math.inf) <= top) for place in places]
        metrics[f"top{top}"] = Metric(math.fsum(answered) / len(answered), standard_error(answered))
    _show(section, load, metrics, len(asked), time.perf_counter() - begin)
    if section.examples is not None:
        _write_examples(Path(section.examples), load, asked, places, found.blocks.tolist())
    return 0


def _check(section: EvaluateSection) -> None:
    """Refuse options that do not fit."""
    if section.index is None:
        raise ConfigError(
            f"the task `{NQ}` needs `--index DIR`",
            why="its questions are answered by the blocks of an index",
            hint="`lmcore index build` makes one",
        )
    if len(section.checkpoints) > 1:
        raise ConfigError(
            f"the task `{NQ}` is for one encoder, not {len(section.checkpoints)}",
            why="the vectors of an index are from one",
            hint="give one checkpoint, or none for the encoder that built the index",
        )
    others = [name for each in section.task for name in each.split(",") if name.strip() != NQ]
    given = {
        "--task": others or None,
        "--text": section.text,
        "--data-path": section.data_path or None,
        "--stride": section.stride,
        "--harness": section.harness or None,
        "--finetune": section.finetune or None,
    }
    for flag, value in given.items():
        if value is not None:
            shown_value = f" {','.join(others)}" if flag == "--task" else ""
            raise ConfigError(
                f"`{flag}{shown_value}` cannot be combined with the task `{NQ}`",
                why="an encoder predicts no text",
                hint="use two commands",
            )


def _file(section: EvaluateSection) -> Path:
    """Return the file with the questions.

    Raises:
        ConfigError, DataError: None is given, or there is none in the directory.
    """
    places = places_of(section.task_data, [NQ])
    place = places.get(NQ, places.get(""))
    if place is None:
        raise ConfigError(f"the task `{NQ}` needs `--task-data FILE`", why=f"it reads {RELEASE}")
    if not place.is_dir():
        return place
    for pattern in _FILES:
        if held := sorted(place.glob(pattern)) or sorted(place.glob(f"*/{pattern}")):
            return held[0]
    raise DataError(
        f"`{place}` has no file of the task `{NQ}`", why=f"it reads {RELEASE}", hint="give the file"
    )


def _show(
    section: EvaluateSection, load: Path, metrics: dict[str, Metric], count: int, seconds: float
) -> None:
    """Print the table or the JSON object, and write the object to the file of `--output`."""
    record = metrics_record(metrics)
    task = {"examples": count, "seconds": round(seconds, 3), "metrics": record}
    content = json.dumps({str(load): {NQ: {**task, "index": section.index}}}, indent=2)
    if section.output is not None:
        write_results(Path(section.output), content)
    rows = [["task", "examples", "metric", str(load)]]
    rows += [[NQ, f"{count:,}", name, shown(one)] for name, one in record.items()]
    print(content if section.json else aligned(rows))


def _write_examples(
    path: Path,
    load: Path,
    asked: Sequence[Question],
    places: Sequence[int | None],
    blocks: Sequence[Sequence[int]],
) -> None:
    with open_output_file(path) as stream:
        for number, (question, place) in enumerate(zip(asked, places, strict=True)):
            line = {"checkpoint": str(load), "task": NQ, "example": number}
            line |= {"question": question.text, "answers": question.answers, "place": place}
            stream.write(json.dumps({**line, "blocks": blocks[number]}) + "\n")
