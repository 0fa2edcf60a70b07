"""`lmcore evaluate`: score trained models on tasks."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from lmcore.base.durable import is_device
from lmcore.base.errors import (
    CheckpointArgumentError,
    ConfigError,
    LmcoreError,
    counted,
)
from lmcore.cli.evaluate.dispatch import evaluate_head, split_training
from lmcore.cli.evaluate.outputs import (
    check_outputs,
    check_replaced,
    note_replaced,
    report,
    table,
    write_results,
)
from lmcore.cli.evaluate.section import EvaluateSection
from lmcore.cli.evaluate.settings import require_tokenizer, shape_of
from lmcore.cli.evaluate.stop import said_at_stop, say_after_launcher
from lmcore.cli.evaluate.tasks import (
    files_of_tasks,
    list_tasks,
    require_no_flag_of_checkpoint,
    wanted_tasks,
)
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
from lmcore.cli.text.sample_output import open_output_file
from lmcore.config.foreign.evaluate import evaluate_flags, upstream_arguments
from lmcore.config.foreign.generate import GivenModel
from lmcore.config.option import options_of
from lmcore.config.options.command_line import parse_with_plugins, wants_help
from lmcore.evaluation.chosen import require_examples
from lmcore.plugin.registrations import plugin_sections
from lmcore.runtime.launch.worker_protocol import launch_info

if TYPE_CHECKING:
    from lmcore.config.plugin_section import PluginSettings
    from lmcore.evaluation.harness.run import Catalogue, HarnessResult
    from lmcore.evaluation.journal import Journal
    from lmcore.evaluation.replicas import ReplicaPool
    from lmcore.evaluation.run import TaskProgress, TaskResult
    from lmcore.evaluation.task import Task
    from lmcore.inference.load import LoadedModel
    from lmcore.model.shape import ModelShape
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


def run(argv: list[str]) -> int:
    """Run `lmcore evaluate` and return the exit status."""
    argv, training = split_training(upstream_arguments(argv))
    plugins = find_plugins(argv, probe=not wants_help(argv))
    model = GivenModel()
    own = {flag for one in options_of(EvaluateSection) for flag in one.flags}
    if not wants_help(argv):
        require_no_flag_of_checkpoint(argv, plugins)
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
        list_tasks(section.task, known)
        return 0
    if (status := evaluate_head(section, training, plugins, settings, known.all, argv)) is not None:
        return status
    wanted = wanted_tasks(section, known.all)
    inputs = [path for _, files in wanted for path in files]
    check_outputs(section.output, section.examples, [*inputs, *files_of_tasks(section)])
    checkpoints = [require_checkpoint(Path(one), section.ckpt_step) for one in section.checkpoints]
    plan = plan_processes(section, plugins, replicas=True)
    if not plan.rank.rank and not launch_info(os.environ).report_file:
        check_replaced(section.output, section.examples)
        with _explained(section, plan):
            _require_all(section, checkpoints, model)
        require_examples(wanted, section.limit)

    def work() -> None:
        _evaluate(section, checkpoints, wanted, plan, plugins, settings, model)

    kept = _kept(section)
    with said_at_stop(kept, says=not plan.rank.rank), _explained(section, plan):
        status = run_planned(["evaluate", *argv], plan, plugins, work)
    if plan.starts_processes:
        say_after_launcher(kept, status)
    return status


@contextmanager
def _explained(section: EvaluateSection, plan: ProcessPlan) -> Iterator[None]:
    """Say what is kept at an error, and of a model that predicts no text that it is not scored."""
    try:
        yield
    except LmcoreError as error:
        from lmcore.inference.load import NoTextError

        if section.output and not plan.rank.rank and Path(f"{section.output}.part").exists():
            error.add_note(_kept(section))
        if not isinstance(error, NoTextError):
            raise
        raise CheckpointArgumentError(
            error.what.replace("cannot generate text", "cannot be scored"),
            why=error.why,
            hint="give a GPT or Llama model: the tasks ask for the probability of each token after "
            "the tokens before it; a BERT is fine-tuned on RACE and GLUE by `--finetune`",
        ) from None


def _kept(section: EvaluateSection) -> str:
    """Return what an interrupted evaluation keeps."""
    if section.output is None or is_device(Path(section.output)):
        return "nothing is kept; with `--output FILE` the same command continues"
    return f"the same command continues, with the results in `{section.output}.part`"


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
    from lmcore.evaluation.passes import BLOCK

    names = _distinct(checkpoints)
    if not plan.rank.rank:
        _say_files(section, names, wanted)
    with (
        _journal(section, plan) as journal,
        _opened(section, plan) as examples,
        started_runtime(section, plan, plugins, settings) as runtime,
    ):
        catalogue = _catalogue(section, plan)
        for checkpoint, name in zip(checkpoints, names, strict=True):
            with (
                loaded_model(
                    section,
                    checkpoint,
                    plan,
                    runtime,
                    plugins,
                    rows=BLOCK,
                    require=functools.partial(_require_fitting, checkpoint, model),
                ) as loaded,
                _pool(loaded, plan, runtime) as pool,
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
    content = json.dumps(report(found), indent=2, allow_nan=False)
    if section.output is not None:
        write_results(Path(section.output), content)
    if journal is not None:
        journal.remove()  # after the results are written
    print(content if section.json else table(found))


def _say_files(
    section: EvaluateSection, names: Sequence[str], wanted: Sequence[tuple[Task, list[Path]]]
) -> None:
    """Log the files of each task, and warn if results of another evaluation are replaced."""
    for task, files in wanted if section.task else ():
        where = os.path.commonpath([path.parent for path in files]) or "."
        place = files[0] if len(files) == 1 else f"{counted(len(files), 'file')} of `{where}`"
        logger.info("%s: %s", task.name, f"`{place}`" if len(files) == 1 else place)
    if section.output is not None:
        tasks = None if section.harness else [task.name for task, _ in wanted]
        note_replaced(section.output, names, tasks)


def _require_all(section: EvaluateSection, checkpoints: Sequence[Path], model: GivenModel) -> None:
    """Raise if a model cannot be scored by the options, before the first one is scored.

    Raises:
        CheckpointError, ConfigError: It cannot, as far as its shape is known, or its tokenizer is
            missing.
    """
    from lmcore.evaluation.requests import positions_read
    from lmcore.train.resume.foreign import ForeignModels

    foreign = ForeignModels()
    for checkpoint in checkpoints:
        shape = shape_of(section, checkpoint, foreign)
        if shape is not None:
            _require_fitting(checkpoint, model, shape)
            positions_read(shape.max_position_embeddings, section.seq_length, section.stride)
        require_tokenizer(section, checkpoint, foreign)


def _require_fitting(checkpoint: Path, model: GivenModel, shape: ModelShape) -> None:
    """Raise if a model is not the one that is described, or reads a text to answer it.

    Raises:
        ConfigError: It is not.
    """
    _require_text(checkpoint, shape)
    model.require(shape.to_dict())


def _require_text(checkpoint: Path, shape: ModelShape) -> None:
    """Raise if a model's family predicts no text from its beginning.

    Raises:
        CheckpointError, ConfigError: It does not.
    """
    from lmcore.inference.load import NoTextError
    from lmcore.model.family import answers_prompts, family_of

    body = family_of(shape).body
    if body is not None and body.bidirectional:
        raise NoTextError(
            f"the {family_of(shape).name} model of `{checkpoint}` cannot generate text",
            why="it predicts the tokens in the place of masks",
        )
    if answers_prompts(shape):
        raise ConfigError(
            f"the model of `{checkpoint}` has an encoder",
            why="the tasks ask for the probabilities of a text's own continuation",
            hint="give a GPT or Llama model",
        )


@contextmanager
def _pool(
    loaded: LoadedModel | None, plan: ProcessPlan, runtime: Runtime
) -> Iterator[ReplicaPool | None]:
    """Yield the replicas on rank 0, None for a single one; on other ranks, None at their end."""
    if loaded is None:
        yield None
        return
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
    if section.output is None or plan.rank.rank or is_device(Path(section.output)):
        yield None
        return
    from lmcore.evaluation.journal import Journal

    with closing(Journal(Path(f"{section.output}.part"))) as journal:
        yield journal


def _opened(section: EvaluateSection, plan: ProcessPlan) -> AbstractContextManager[TextIO | None]:
    if section.examples is None or plan.rank.rank:
        return nullcontext()
    return open_output_file(Path(section.examples))
