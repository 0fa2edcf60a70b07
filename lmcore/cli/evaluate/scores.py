"""Scores of checkpoints that have a head already."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import ConfigError, DataError, LmcoreError, printable, several
from lmcore.base.log import warn_once
from lmcore.base.missing_path import missing_path_hint
from lmcore.cli.evaluate.outputs import check_outputs, check_replaced, write_results
from lmcore.cli.evaluate.report import aligned, part_record, part_rows
from lmcore.cli.evaluate.settings import with_own_tokens
from lmcore.cli.evaluate.stop import NOTHING_KEPT, said_at_stop, say_after_launcher
from lmcore.cli.loading import plan_processes, require_checkpoint, run_planned, started_runtime
from lmcore.cli.text.progress import ProgressLine
from lmcore.cli.text.sample_output import open_output_file
from lmcore.evaluation.chosen import place_of, places_of

if TYPE_CHECKING:
    from lmcore.cli.evaluate.section import EvaluateSection
    from lmcore.cli.loading import ProcessPlan
    from lmcore.config.plugin_section import PluginSettings
    from lmcore.config.tokenizer import TokenizerSettings
    from lmcore.evaluation.finetune.files import TaskFile
    from lmcore.evaluation.finetune.model import HeadModel
    from lmcore.evaluation.finetune.record import TunedTask
    from lmcore.evaluation.finetune.score import PartScore
    from lmcore.evaluation.replicas import Replicas
    from lmcore.evaluation.run import TaskProgress
    from lmcore.plugin import PluginSet
    from lmcore.runtime.runtime import Runtime

__all__ = [
    "RECORD_NAME",
    "head_of",
    "require_outputs",
    "runtime_of",
    "score_heads",
    "score_part",
    "warn_of_training_files",
]

logger = logging.getLogger(__name__)

RECORD_NAME = "finetune.json"
"""File in a fine-tuned run's directory with its settings and scores."""
_MAX_BYTES = 1 << 24
_Parts = dict[str, list["TaskFile"]]
"""Files by the name of their part; a file that is named by the user is of no part."""
_Wanted = tuple["TunedTask", _Parts]
"""Task with its files."""


def score_heads(
    section: EvaluateSection,
    tasks: Sequence[TunedTask],
    plugins: PluginSet,
    settings: PluginSettings,
    argv: Sequence[str],
) -> int:
    """Score fine-tuned checkpoints on tasks; return the exit status.

    Args:
        section: Options of the command.
        tasks: The tasks.
        plugins: Plugins to choose from.
        settings: Options of the plugins.
        argv: Arguments of the command, for further processes of it.

    Raises:
        ConfigError: The options contradict each other, or the head is not a task's.
        DataError: Files are missing or have another layout.
    """
    _require_whole_model(section)
    checkpoints = [require_checkpoint(Path(one), section.ckpt_step) for one in section.checkpoints]
    for checkpoint in checkpoints:
        _require_heads(tasks, checkpoint)
    plan = plan_processes(section, plugins, replicas=True)
    wanted: list[_Wanted] = []
    if not plan.rank.rank and not plan.starts_processes:  # rank 0 has all files
        wanted = _read(section, tasks, checkpoints)

    def work() -> None:
        _score(section, checkpoints, wanted, plan, plugins, settings)

    with said_at_stop(NOTHING_KEPT, says=not plan.rank.rank):
        status = run_planned(["evaluate", *argv], plan, plugins, work)
    if plan.starts_processes:
        say_after_launcher(NOTHING_KEPT, status)
    return status


def _read(
    section: EvaluateSection, tasks: Sequence[TunedTask], checkpoints: Sequence[Path]
) -> list[_Wanted]:
    """Return the tasks with their files, and refuse files of results that cannot be written."""
    places = places_of(section.task_data, [task.name for task in tasks])
    predicts = section.examples is not None
    wanted = [
        (task, _files(task, place_of(task, places), section.limit, predicts=predicts))
        for task in tasks
    ]
    paths = [one.path for _, parts in wanted for part in parts.values() for one in part]
    require_outputs(section, paths)
    for checkpoint in checkpoints:
        warn_of_training_files(paths, *_trained_on(checkpoint))
    return wanted


def _require_whole_model(section: EvaluateSection) -> None:
    """Refuse to divide a model that is scored by its head."""
    if section.tensor_model_parallel_size * section.pipeline_model_parallel_size > 1:
        raise ConfigError(
            "a head is scored by whole models",
            why="the sizes of tensor and pipeline parallelism divide a model",
            hint="leave them out; the checkpoint may be of any layout, and `--nproc-per-node N` "
            "starts N replicas",
        )


def require_outputs(section: EvaluateSection, inputs: Sequence[Path]) -> None:
    """Refuse files of results that cannot be written or are of others, and rounded weights.

    Args:
        section: Options of the command.
        inputs: Files and folders that are read.

    Raises:
        ConfigError: There is one.
    """
    read = [one for path in inputs for one in (path, *(path.glob("*") if path.is_dir() else ()))]
    check_outputs(section.output, section.examples, read)
    check_replaced(section.output, section.examples)
    if section.quantization is not None:
        raise ConfigError(
            f"`--quantization {section.quantization}` is not supported for heads",
            hint="use `--precision bf16`",
        )


def _require_heads(tasks: Sequence[TunedTask], checkpoint: Path) -> None:
    """Refuse a head that is not a task's, before files are read."""
    from lmcore.checkpoint import survey
    from lmcore.evaluation.finetune.record import require_head

    manifest = survey(checkpoint).newest()[1]
    config: Any = manifest.meta.get("config")
    head = str(manifest.model_shape.get("task"))
    try:
        labels = [str(one) for one in config["config"]["task"]["task_labels"]]
    except (KeyError, TypeError):
        labels = []
    for task in tasks:
        require_head(task, head, labels if head == "classification" else [], checkpoint)


def _files(task: TunedTask, place: Path, limit: int | None, *, predicts: bool) -> _Parts:
    """Return the files to score: of validation and test, or the one that is named.

    Args:
        task: The task.
        place: Directory of the data, or one file or folder.
        limit: Number of rows that are taken from the beginning of each file; None: all.
        predicts: True if predictions are written, so that no labels are needed.
    """
    from lmcore.evaluation.finetune.files import find_part, is_labelled, read_file

    if place.is_file() or (task.head == "multiple-choice" and any(place.glob("*.txt"))):
        parts = {"": [place]}
    elif not place.exists():
        hint = missing_path_hint(place, "check the path of `--task-data`")
        raise DataError(f"there is no `{place}`", hint=hint)
    else:
        test = find_part(task, place, "test", needed=False)
        parts = {"valid": find_part(task, place, "valid", needed=not test), "test": test}
    found: _Parts = {}
    unlabelled: list[Path] = []
    for part, paths in parts.items():
        for path in paths:
            if predicts or is_labelled(task, path):
                found.setdefault(part, []).append(read_file(task, path, limit))
            else:
                unlabelled.append(path)
    if not found:
        raise ConfigError(
            f"no labels in {several([str(path) for path in unlabelled])}",
            why="there is nothing to compare the predictions with",
            hint="add `--examples FILE`, which writes the predictions",
        )
    for path in unlabelled:
        logger.info("`%s` has no labels: left out (`--examples` has predictions)", path)
    return found


def warn_of_training_files(
    files: Sequence[Path], trained_on: Sequence[Path], checksums: Mapping[str, str]
) -> None:
    """Warn of files that a model was trained on, and is scored by.

    Args:
        files: Files that are scored.
        trained_on: Files of the training.
        checksums: SHA-256 of files of the training, and perhaps of others, by path.
    """
    from lmcore.evaluation.finetune.files import checksum_of

    known = {str(one.resolve()) for one in trained_on}
    content = {checksums[one]: one for one in known if one in checksums}
    for path in files:
        if str(path.resolve()) in known:
            logger.warning("`%s` is training data: scores on it say little of other texts", path)
        elif content and path.exists() and (same := content.get(checksum_of(path))):
            logger.warning(
                "`%s` has the content of `%s`, which is training data: scores on it say little of "
                "other texts",
                *(path, same),
            )


def _trained_on(checkpoint: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files that a run was trained on, and checksums, as far as they are recorded."""
    from lmcore.checkpoint import survey

    found: list[Path] = []
    checksums: dict[str, str] = {}
    try:
        path, manifest = survey(checkpoint).newest()
        config: Any = manifest.meta.get("config")
        listed = config["config"]["task"]["task_data"]
        found += [Path(one) for one in listed if isinstance(one, str)]
        record = json.loads(read_bounded_file(path.parent.parent / RECORD_NAME, _MAX_BYTES))
        found += [Path(one) for one in record["settings"]["train"] if isinstance(one, str)]
        checksums |= {str(path): str(one) for path, one in record["settings"]["checksums"].items()}
    except (LmcoreError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # a run of another origin does not say
    return found, checksums


@contextmanager
def runtime_of(
    section: EvaluateSection,
    checkpoint: Path,
    plan: ProcessPlan,
    plugins: PluginSet,
    settings: PluginSettings,
) -> Iterator[Runtime]:
    """Enter a context with the device in use, in the precision that the model was trained in.

    Args:
        section: Options of the command; a precision there has precedence.
        checkpoint: The checkpoint.
        plan: Processes of the command.
        plugins: Plugins to choose from.
        settings: Options of the plugins.
    """
    from lmcore.checkpoint import survey

    manifest = survey(checkpoint).newest()[1]
    config: Any = manifest.meta.get("config")
    try:
        saved = config["config"]["accelerator"]["precision"]
    except (KeyError, TypeError):
        saved = None
    if section.precision is None and isinstance(saved, str):
        section = dataclasses.replace(section, precision=saved)
    with started_runtime(section, plan, plugins, settings) as runtime:
        yield runtime


def head_of(
    section: EvaluateSection,
    checkpoint: Path,
    runtime: Runtime,
    plugins: PluginSet,
    choice: TokenizerSettings,
) -> HeadModel:
    """Load the model of a checkpoint.

    Args:
        section: Options of the command.
        checkpoint: The checkpoint.
        runtime: Device, precision and kernels.
        plugins: Plugins, which may register tokenizers.
        choice: Tokenizer chosen by the user instead of the checkpoint's own.
    """
    from lmcore.data.tokenizer.build import registered_types
    from lmcore.evaluation.finetune.model import load_head

    return load_head(
        checkpoint,
        runtime,
        choice=choice,
        extra=registered_types(plugins),
        length=section.seq_length,
    )


def score_part(
    section: EvaluateSection,
    head: HeadModel,
    task: TunedTask,
    files: Sequence[TaskFile],
    pool: Replicas | None = None,
) -> PartScore:
    """Score a model on files, with a line of progress.

    Args:
        section: Options of the command.
        head: The model.
        task: The task.
        files: The files or folders.
        pool: Replicas that compute the passes; None: this model alone.
    """
    from lmcore.evaluation.finetune.score import score_files

    with ProgressLine(_progress_text) as line:
        tokens = section.batch_tokens
        found = score_files(head, task, files, tokens=tokens, progress=line, pool=pool)
    for one in found.files:
        if one.cut:
            warn_once(
                logger,
                "`%s`: %d of %d rows are longer than the %d tokens of a sequence and cut",
                *(one.name, one.cut, len(one.rows), head.pairs.length),
            )
    return found


def _progress_text(progress: TaskProgress) -> str:
    left = progress.seconds_left
    ends = "" if left is None else f", {left:,.0f} s left"
    return f"{progress.task}: {progress.done:,} of {progress.total:,} rows{ends}"


def _score(
    section: EvaluateSection,
    checkpoints: Sequence[Path],
    wanted: Sequence[_Wanted],
    plan: ProcessPlan,
    plugins: PluginSet,
    settings: PluginSettings,
) -> None:
    """Load each model, score it and show all results; other ranks than 0 compute passes."""
    report: dict[str, dict[str, Any]] = {}
    written = section.examples is not None and not plan.rank.rank
    opened = open_output_file(Path(str(section.examples))) if written else nullcontext()
    with (
        opened as examples,
        runtime_of(section, checkpoints[0], plan, plugins, settings) as runtime,
    ):
        for checkpoint in checkpoints:
            with _loaded_head(section, checkpoint, plan, runtime, plugins) as (head, pool):
                for task, parts in wanted:
                    files = [file for part in parts.values() for file in part]
                    scored = score_part(section, head, task, files, pool)
                    report.setdefault(str(checkpoint), {})[task.name] = _record(task, parts, scored)
                    if examples is not None:
                        examples.writelines(example_lines(checkpoint, task, scored))
    if not plan.rank.rank:
        _show(section, report, [task for task, _ in wanted])


@contextmanager
def _loaded_head(
    section: EvaluateSection,
    checkpoint: Path,
    plan: ProcessPlan,
    runtime: Runtime,
    plugins: PluginSet,
) -> Iterator[tuple[HeadModel, Replicas | None]]:
    """Yield a model, and on rank 0 its replicas in other processes, if there are any."""
    choice = with_own_tokens(section, checkpoint).tokenizer_choice()
    processes = runtime.processes
    head = None if plan.rank.rank else head_of(section, checkpoint, runtime, plugins, choice)
    if processes is not None:
        # All load what rank 0 has found, though a run may write a newer one meanwhile.
        found = processes.gather(head and str(head.checkpoint), "the checkpoint")[0]
        head = head or head_of(section, Path(str(found)), runtime, plugins, choice)
    assert head is not None
    logger.info("loaded %s on %s", head.checkpoint, runtime.device.name)
    if processes is None:
        yield head, None
        return
    with head.replicas(processes.rendezvous, plan.layout) as pool:
        yield head, pool


def _show(
    section: EvaluateSection, report: Mapping[str, Mapping[str, Any]], tasks: Sequence[TunedTask]
) -> None:
    """Print the table or the JSON object, and write the object to the file of `--output`."""
    content = json.dumps(report, indent=2, allow_nan=False)
    if section.output is not None:
        write_results(Path(section.output), content)
    if section.json:
        print(content)
        return
    rows = list(_table_rows(report, tasks))
    if rows:
        print(aligned([["task", "part", "file", "examples", "metric", *report], *rows]))
    unlabelled = {
        name
        for tasks_of in report.values()
        for record in tasks_of.values()
        for name, one in record["files"].items()
        if not one.get("metrics")
    }
    if unlabelled:
        listed = ", ".join(f"`{printable(name)}`" for name in sorted(unlabelled))
        space = "\n" if rows else ""
        print(f"{space}{listed}: without labels; the predictions are in `{section.examples}`")


def _record(task: TunedTask, parts: _Parts, scored: PartScore) -> dict[str, Any]:
    """Return the JSON object of a task: the scores of all files, and of the files of each part."""
    from lmcore.evaluation.finetune.score import together

    files, of_parts = iter(scored.files), {}
    for part, read in parts.items():
        own = together(task, [next(files) for _ in read], scored.seconds)
        of_parts[part] = part_record(task, own)
    return {**part_record(task, scored), "parts": of_parts}


def example_lines(checkpoint: Path, task: TunedTask, part: PartScore) -> Iterator[str]:
    """Yield a JSON line about each row.

    Args:
        checkpoint: The checkpoint.
        task: The task.
        part: Scores of the files.
    """
    from lmcore.evaluation.finetune.score import example_records

    first = {"checkpoint": str(checkpoint), "task": task.name}
    for one in part.files:
        for record in example_records(task, one):
            yield json.dumps(first | record) + "\n"


def _table_rows(
    report: Mapping[str, Mapping[str, Any]], tasks: Sequence[TunedTask]
) -> Iterator[list[str]]:
    """Yield a row for each metric of a file with labels, a column for each checkpoint."""
    for task in tasks:
        records = [tasks_of[task.name]["parts"] for tasks_of in report.values()]
        for part in records[0]:
            columns = [list(part_rows(task, one[part])) for one in records]
            for same in zip(*columns, strict=True):
                yield [task.name, part, *same[0][:3], *(row[3] for row in same)]
