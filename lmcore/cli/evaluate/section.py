"""Options of `lmcore evaluate`."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.cli.evaluate.finetune_section import FinetuneOptions
from lmcore.cli.loading import LoadingSection
from lmcore.config.option import option

__all__ = ["EvaluateSection"]


@dataclass(frozen=True)
class EvaluateSection(FinetuneOptions, LoadingSection):
    """Score trained models on tasks, or by the perplexity of a text."""

    checkpoints: tuple[str, ...] = option(
        (),
        "Run directories, checkpoints, or directories of other programs, such as Hugging Face or "
        "Megatron.",
        metavar="CHECKPOINT",
    )
    task: tuple[str, ...] = option(
        (), "Tasks, by name; or a Python or YAML file that defines some.", metavar="NAME"
    )
    task_data: tuple[str, ...] = option(
        (),
        "Directory with the files of tasks in the layouts of their releases; or `NAME=FILE`, the "
        "file of one task.",
        metavar="DIR",
    )
    text: str | None = option(
        None,
        "File of text, or of JSON lines with `text`, whose loss and perplexity are computed.",
        metavar="FILE",
    )
    data_path: tuple[str, ...] = option(
        (),
        "Indexed data sets, `PREFIX.bin` and `PREFIX.idx`: the loss and perplexity of their "
        "documents are computed, a task for each prefix.",
        metavar="PREFIX",
    )
    index: str | None = option(
        None,
        "Index of `lmcore index build`, whose blocks answer the questions of the task `nq`; the "
        "checkpoint is its encoder.",
        metavar="DIR",
    )
    stride: int | None = option(
        None,
        "Tokens that each window of a long text predicts after the first one; fewer than the "
        "model's positions give each token more context. Default: the positions.",
        minimum=1,
    )
    harness: tuple[str, ...] = option(
        (),
        "Tasks, groups, tags or YAML files of lm-eval-harness, which fetches their data; "
        "`python -m lmcore.evaluation.harness ls tasks` lists them.",
        metavar="NAME",
    )
    harness_include: str | None = option(
        None, "Directory with further tasks of lm-eval-harness.", metavar="DIR"
    )
    num_fewshot: int | None = option(
        None,
        "Solved examples before each question of `--harness`; default: each task's.",
        minimum=0,
    )
    apply_chat_template: bool = option(
        False, "Ask the questions of `--harness` in the form of the model's chat template."
    )
    limit: int | None = option(
        None, "Take this many examples from the beginning of each task.", minimum=1
    )
    batch_tokens: int = option(
        2048,
        "Tokens that are computed before their results are read; it changes no result.",
        minimum=1,
    )
    json: bool = option(False, "Print one JSON object instead of the table.")
    output: str | None = option(
        None,
        "File for the JSON object, beside what is printed; `FILE.part` beside it keeps the results "
        "of an evaluation that is stopped, and the same command continues it.",
        metavar="FILE",
    )
    examples: str | None = option(
        None, "File for a JSON line about each example, with its log-probabilities.", metavar="FILE"
    )
    list: bool = option(
        False, "List the tasks, with the files that each reads; with `--task` these alone."
    )
