"""`lmcore evaluate`: score trained models on tasks."""

from __future__ import annotations

import importlib.util
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.durable import write_atomically
from lmcore.base.errors import CheckpointError, ConfigError, MissingPackageError, printable
from lmcore.cli.evaluate_section import EvaluateSection
from lmcore.cli.loading import (
    ProcessPlan,
    loaded_model,
    plan_processes,
    require_checkpoint,
    run_planned,
    started_runtime,
)
from lmcore.cli.selection import find_plugins
from lmcore.cli.text.progress import ProgressLine
from lmcore.cli.text.sample_output import check_output_file, open_output_file
from lmcore.cli.tuned.dispatch import evaluate_head, split_training
from lmcore.cli.tuned.report import aligned, metrics_record
from lmcore.cli.tuned.retrieval import NQ, RELEASE, SUMMARY, TOPS
from lmcore.config.foreign.evaluate import evaluate_flags, upstream_arguments
from lmcore.config.foreign.generate import GivenModel
from lmcore.config.option import options_of
from lmcore.config.options.command_line import parse_with_plugins, wants_help
from lmcore.evaluation.passes import BLOCK
from lmcore.plugin.registrations import plugin_sections

if TYPE_CHECKING:
    from lmcore.config.plugin_section import PluginSettings
    from lmcore.evaluation.harness.run import Catalogue, HarnessResult
    from lmcore.evaluation.journal import Journal
    from lmcore.evaluation.plugin_tasks import KnownTasks
    from lmcore.evaluation.replicas import ReplicaPool
    from lmcore.evaluation.run import TaskProgress, TaskResult
    from lmcore.evaluation.task import Task
    from lmcore.inference.load import LoadedModel
    from lmcore.plugin import PluginSet
    from lmcore.runtime.runtime import Runtime

    Result = TaskResult | HarnessResult

__all__ = ["run"]

logger = logging.getLogger(__name__)

_EPILOG = """\
The scores are defined in docs/reference/tasks.md.  `--list` lists the tasks and their files.

  lmcore evaluate runs/my-run --task lambada,arc_easy --task-data evals
  lmcore evaluate runs/my-run gpt2-medium --task hellaswag --task-data hellaswag_val.jsonl
  lmcore evaluate runs/my-run --text book.txt --stride 256
  lmcore evaluate runs/my-run --harness mmlu,gsm8k --num-fewshot 5
  lmcore evaluate runs/bert --task mnli --finetune --task-data glue --save runs/mnli
  lmcore evaluate runs/mnli/best --task mnli --task-data glue"""
_TEXT = "text"
_INTERRUPTED = 128 + signal.SIGINT
_MAX_RESULTS = 1 << 24
"""Most bytes of a file of results, far above what there are."""


def run(argv: list[str]) -> int:
    """Run `lmcore evaluate` and return the exit status."""
    argv, training = split_training(upstream_arguments(argv))
    plugins = find_plugins(argv, probe=not wants_help(argv))
    model = GivenModel()
    own = {flag for one in options_of(EvaluateSection) for flag in one.flags}
    section, settings = parse_with_plugins(
        EvaluateSection,
        argv,
        command="lmcore evaluate",
        plugins=plugin_sections(plugins),
        positionals=("checkpoints",),
        foreign=evaluate_flags(own, model),
        epilog=_EPILOG,
    )
    from lmcore.evaluation.plugin_tasks import known_tasks

    known = known_tasks(plugins)
    if section.list:
        _list(section.task, known)
        return 0
    if (status := evaluate_head(section, training, plugins, settings, known.all)) is not None:
        return status
    wanted = _wanted(section, known.all)
    outputs = {"--output": section.output, "--examples": section.examples}
    for flag, path in outputs.items():
        if path is not None:
            check_output_file(Path(path), flag)
    if section.output is not None and section.output == section.examples:
        raise ConfigError("`--output` and `--examples` name the same file", hint="give two files")
    checkpoints = [require_checkpoint(Path(one), section.ckpt_step) for one in section.checkpoints]
    plan = plan_processes(section, plugins, replicas=True)
    if section.output is not None and not plan.rank.rank:
        _check_results(Path(section.output))

    def work() -> None:
        _evaluate(section, checkpoints, wanted, plan, plugins, settings, model)

    with _explained(section):
        status = run_planned(["evaluate", *argv], plan, plugins, work)
    if plan.starts_processes and status == _INTERRUPTED:
        sys.stderr.write(f"\n{_kept(section)}\n")  # below the launcher's line
    return status


@contextmanager
def _explained(section: EvaluateSection) -> Iterator[None]:
    """Say at Ctrl-C what is kept, and of a model that predicts no text that it is not scored."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(_kept(section))
        raise
    except CheckpointError as error:
        from lmcore.inference.load import NoTextError

        if not isinstance(error, NoTextError):
            raise
        raise CheckpointError(
            error.what.replace("cannot generate text", "cannot be scored"),
            why=error.why,
            hint="give a GPT or Llama model: the tasks ask for the probability of each token after "
            "the tokens before it",
        ) from None


def _kept(section: EvaluateSection) -> str:
    """Return what an interrupted evaluation keeps."""
    if section.output is None:
        return "nothing is kept; with `--output FILE` the same command continues"
    return f"the same command continues, with the results in `{section.output}.part`"


def _check_results(path: Path) -> None:
    """Raise if a file would be replaced that has no results of this command.

    Raises:
        ConfigError: There is such a file.
    """
    if not path.exists():
        return
    try:
        values = json.loads(read_bounded_file(path, _MAX_RESULTS))
        results = [task for one in values.values() for task in one.values()]
        known = bool(results) and all({"examples", "metrics"} <= task.keys() for task in results)
    except (OSError, ValueError, AttributeError, RecursionError):
        known = False
    if not known:
        raise ConfigError(
            f"`--output {path}` exists, and has no results of `lmcore evaluate`",
            why="it would be replaced",
            hint="name another file, or remove it",
        )


def _list(asked: Sequence[str], known: KnownTasks) -> None:
    """Print the tasks that are asked for, or all of them."""
    from lmcore.evaluation.chosen import named_tasks

    brought = {task.name: distribution for task, distribution in known.added}
    for task in named_tasks(asked, known.all) if asked else known.all:
        files = f"{task.files[0]}, of {task.release}" if task.files else f"of {task.release}"
        print(f"{task.name:<16}{printable(task.summary)}")
        print(f"{'':<16}{', '.join(task.metrics)}; files: {printable(files)}")
        if task.name in brought:
            print(f"{'':<16}from {brought[task.name]}")
    if asked:
        return
    print(f"{NQ:<16}{SUMMARY}")
    print(f"{'':<16}{', '.join(f'top{one}' for one in TOPS)}; with --index; files: {RELEASE}")
    from lmcore.evaluation.finetune import TUNED

    print("\nwith --finetune:\n")
    for own in TUNED:
        print(f"{own.name:<16}{own.summary}")
        print(f"{'':<16}{', '.join(own.metrics)}; files: {own.release}")


def _wanted(section: EvaluateSection, known: Sequence[Task]) -> list[tuple[Task, list[Path]]]:
    """Return the tasks with their files.

    Args:
        section: Options of the command.
        known: Tasks to choose from.

    Raises:
        ConfigError, DataError: The options contradict each other, or files are missing.
    """
    from lmcore.evaluation.chosen import chosen_tasks
    from lmcore.evaluation.files import find_files
    from lmcore.evaluation.task import Task
    from lmcore.evaluation.tasks.language import plain_text

    if not section.checkpoints:
        raise ConfigError(
            "`lmcore evaluate` needs a checkpoint",
            why="paths after `--task` and `--task-data` are taken as their values",
            hint="`lmcore evaluate runs/my-run --task lambada --task-data evals`",
        )
    _require_harness(section)
    found = chosen_tasks(section.task, section.task_data, known, flag="--task")
    if section.text is not None:
        metrics = ("loss", "token_perplexity", "word_perplexity", "bits_per_byte")
        task = Task(_TEXT, "A text.", (), plain_text, metrics, "you")
        found.append((task, find_files(task, Path(section.text))))
    if section.data_path:
        from lmcore.evaluation.indexed import indexed_task

        found += [(indexed_task(one), [Path(one)]) for one in dict.fromkeys(section.data_path)]
    if not found and not section.harness:
        raise ConfigError(
            "`lmcore evaluate` needs a task, a text, or a data set",
            why=f"the tasks are {', '.join(task.name for task in known)}",
            hint="`--task lambada --task-data evals`, `--text FILE`, or `--data-path PREFIX`",
        )
    return found


def _require_harness(section: EvaluateSection) -> None:
    """Raise if tasks of lm-eval-harness, or the options for them, cannot be used.

    Raises:
        ConfigError: An option is for tasks that are not asked for, or there is no such directory.
        MissingPackageError: lm-eval-harness is not installed.
    """
    if section.harness:
        if importlib.util.find_spec("lm_eval") is None:
            raise MissingPackageError(
                "lm_eval", needed_for="`--harness`", install="pip install lm_eval"
            )
        if section.harness_include and not Path(section.harness_include).is_dir():
            raise ConfigError(
                f"`--harness-include {section.harness_include}` is no directory",
                hint="give the directory that has the YAML files",
            )
        return
    given = {
        "--harness-include": section.harness_include,
        "--num-fewshot": section.num_fewshot,
        "--apply-chat-template": section.apply_chat_template or None,
    }
    for flag, value in given.items():
        if value is not None:
            raise ConfigError(
                f"`{flag}` needs `--harness`", why="it is an option of lm-eval-harness's tasks"
            )


def _evaluate(
    section: EvaluateSection,
    checkpoints: Sequence[Path],
    wanted: Sequence[tuple[Task, list[Path]]],
    plan: ProcessPlan,
    plugins: PluginSet,
    settings: PluginSettings,
    model: GivenModel,
) -> None:
    """Load each model, score it and show all results; other ranks than 0 hold parts of models."""
    found: list[tuple[str, list[Result]]] = []
    with (
        _journal(section, plan) as journal,
        _opened(section, plan) as examples,
        started_runtime(section, plan, plugins, settings) as runtime,
    ):
        catalogue = _catalogue(section, plan)
        for checkpoint, name in zip(checkpoints, _distinct(checkpoints), strict=True):
            with (
                loaded_model(
                    section,
                    checkpoint,
                    plan,
                    runtime,
                    plugins,
                    rows=BLOCK,
                    require=lambda shape: model.require(shape.to_dict()),
                ) as loaded,
                _pool(loaded, checkpoint, plan, runtime) as pool,
            ):
                if loaded is None or plan.rank.rank:
                    continue  # its passes are computed
                results: list[Result] = [
                    *_results(section, loaded, wanted, journal, name, examples, pool)
                ]
                if catalogue is not None:
                    made = _harness_results(section, loaded, catalogue, journal, pool)
                    _write_records(examples, name, made)
                    results += made
            found.append((name, results))
    if plan.rank.rank:
        return
    content = json.dumps(_report(found), indent=2, allow_nan=False)
    if section.output is not None:
        write_atomically(Path(section.output), (content + "\n").encode())
    if journal is not None:
        journal.remove()  # after the results are written
    print(content if section.json else _table(found))


@contextmanager
def _pool(
    loaded: LoadedModel | None, checkpoint: Path, plan: ProcessPlan, runtime: Runtime
) -> Iterator[ReplicaPool | None]:
    """Yield the replicas on rank 0, None for a single one; on other ranks, None at their end."""
    if loaded is None:
        yield None
        return
    if loaded.reads_source:
        raise ConfigError(
            f"the model of `{checkpoint}` has an encoder",
            why="the tasks ask for the probabilities of a text's own continuation",
            hint="give a GPT or Llama model",
        )
    if getattr(loaded.model, "answers", None) is False and not plan.rank.rank:
        logger.warning("the model reads neighbours, and is scored without any")
    if plan.layout.data == 1:
        yield None
        return
    from lmcore.evaluation.replicas import replica_pool

    assert runtime.processes is not None
    with replica_pool(loaded, runtime.processes.rendezvous, plan.layout) as pool:
        yield pool


def _distinct(checkpoints: Sequence[Path]) -> list[str]:
    """Return a name for each checkpoint; one that is given again has a number."""
    names: list[str] = []
    for checkpoint in map(str, checkpoints):
        name, number = checkpoint, 1
        while name in names:
            number += 1
            name = f"{checkpoint} ({number})"
        names.append(name)
    return names


def _results(
    section: EvaluateSection,
    loaded: LoadedModel,
    wanted: Sequence[tuple[Task, list[Path]]],
    journal: Journal | None,
    checkpoint: str,
    examples: TextIO | None,
    pool: ReplicaPool | None,
) -> list[TaskResult]:
    from lmcore.evaluation.run import Evaluation

    evaluation = Evaluation(
        loaded,
        tokens=section.batch_tokens,
        stride=section.stride,
        length=section.seq_length,
        limit=section.limit,
        journal=journal,
        pool=pool,
    )
    # All are asked before the first pass: a wrong example is found before hours of work.
    asked = [evaluation.ask(task, files) for task, files in wanted]
    with ProgressLine(_progress_text) as line:
        return [
            evaluation.score(
                one,
                progress=line,
                record=None if examples is None else _writer(examples, checkpoint, one.task.name),
            )
            for one in asked
        ]


def _catalogue(section: EvaluateSection, plan: ProcessPlan) -> Catalogue | None:
    """Return the tasks of lm-eval-harness, which rank 0 evaluates; None if there are none."""
    if not section.harness or plan.rank.rank:
        return None
    from lmcore.evaluation.harness.run import Catalogue

    include = section.harness_include
    return Catalogue(section.harness, None if include is None else Path(include))


def _harness_results(
    section: EvaluateSection,
    loaded: LoadedModel,
    catalogue: Catalogue,
    journal: Journal | None,
    pool: ReplicaPool | None,
) -> list[HarnessResult]:
    with ProgressLine(_progress_text) as line:
        return catalogue.evaluate(
            loaded,
            tokens=section.batch_tokens,
            num_fewshot=section.num_fewshot,
            limit=section.limit,
            chat=section.apply_chat_template,
            progress=line,
            journal=journal,
            pool=pool,
        )


def _writer(
    examples: TextIO, checkpoint: str, task: str
) -> Callable[[Mapping[str, object]], object]:
    """Return a function that writes the line of an example."""
    head = {"checkpoint": checkpoint, "task": task}
    return lambda record: examples.write(
        # The records of lm-eval-harness have values of data sets, such as dates.
        json.dumps({**head, **record}, default=str) + "\n"
    )


def _write_records(
    examples: TextIO | None, checkpoint: str, results: Sequence[HarnessResult]
) -> None:
    for result in results if examples is not None else ():
        assert examples is not None
        write = _writer(examples, checkpoint, result.name)
        for record in result.records():
            write(record)


def _progress_text(progress: TaskProgress) -> str:
    left = progress.seconds_left
    ends = "" if left is None else f", {left:,.0f} s left"
    total = "" if progress.total is None else f" of {progress.total:,}"
    return f"{progress.task}: {progress.done:,}{total} requests{ends}"


@contextmanager
def _journal(section: EvaluateSection, plan: ProcessPlan) -> Iterator[Journal | None]:
    """Open the file by which the evaluation continues, if results are written to a file."""
    if section.output is None or plan.rank.rank:
        yield None
        return
    from lmcore.evaluation.journal import Journal

    with closing(Journal(Path(f"{section.output}.part"))) as journal:
        yield journal


def _opened(section: EvaluateSection, plan: ProcessPlan) -> AbstractContextManager[TextIO | None]:
    if section.examples is None or plan.rank.rank:
        return nullcontext()
    return open_output_file(Path(section.examples))


def _report(found: Sequence[tuple[str, list[Result]]]) -> dict[str, object]:
    """Return the JSON object: for each checkpoint and task the metrics, errors and counts."""
    return {
        checkpoint: {
            result.name: {
                "examples": result.count,
                "cut_contexts": result.cut,
                "seconds": round(result.seconds, 3),
                "metrics": metrics_record(result.metrics),
                **result.details(),
            }
            for result in results
        }
        for checkpoint, results in found
    }


def _table(found: Sequence[tuple[str, list[Result]]]) -> str:
    """Return the table: a row for each metric of a task, a column for each checkpoint."""
    heads = [printable(checkpoint) for checkpoint, _ in found]
    rows = [["task", "examples", "metric", *heads]]
    for number, first in enumerate(found[0][1]):
        for name in first.metrics:
            values = []
            for _, results in found:
                one = results[number].metrics[name]
                error = "" if one.error is None else f" ± {one.error:.4f}"
                values.append(f"{one.value:.4f}{error}")
            rows.append([first.name, f"{first.count:,}", name, *values])
    return aligned(rows)
