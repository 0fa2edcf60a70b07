"""Command lines of Megatron's `tasks/main.py`, for `lmcore evaluate`.

A command that names a task in capitals is translated as a whole: `--load` is the checkpoint and
`--valid-data` the file of the task; a task that is fine-tuned takes `--pretrained-checkpoint`, and
the flags of its training follow after `--`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable, Sequence

from lmcore.base.errors import ConfigError
from lmcore.config.foreign.generate import GivenModel, run_flags, without_effect
from lmcore.config.foreign.megatron_flags import train_flags
from lmcore.config.options.flags import ForeignFlag, Translation, UnsupportedFlagError

__all__ = ["evaluate_flags", "is_tuned", "tuned_flags", "upstream_arguments"]

logger = logging.getLogger(__name__)

_LANGUAGE = {"WIKITEXT103": "wikitext103_stream", "LAMBADA": "lambada"}
_TUNED = {"RACE": "race", "MNLI": "mnli", "QQP": "qqp"}
_PASSES = ("--micro-batch-size", "--global-batch-size", "--batch-size", "--eval-micro-batch-size")
_PASS_SIZE = "passes have a fixed size, so that no result depends on it"
_QUESTIONS = "use `--task nq --index DIR --task-data FILE`"
_OF_QUESTIONS = {
    "--faiss-match": "1",
    "--faiss-topk-retrievals": "1",
    "--faiss-use-gpu": "0",
    "--qa-data-dev": "1",
    "--qa-data-test": "1",
    "--train-hard-neg": "1",
    "--train-with-neg": "0",
    "--val-av-rank-hard-neg": "1",
    "--val-av-rank-other-neg": "1",
}
"""Flags of Megatron's task of questions and passages (ORQA), with the number of their values."""
_OF_COMMAND = (
    *("--train-data", "--valid-data", "--save", "--epochs", "--micro-batch-size", "--lr"),
    *("--lr-warmup-fraction", "--seq-length", "--eval-interval", "--tokenizer-type"),
    *("--vocab-file", "--merge-file", "--tokenizer-model", "--device", "--global-batch-size"),
)
"""Flags of `lmcore evaluate --finetune`; all others are flags of training."""
_SET = {
    "--save-interval": "checkpoints are saved at each validation, and the best one is kept",
    "--keep-last": "the best checkpoint is kept",
    "--eval-iters": "each validation is of all rows",
}
"""Flags of training that `lmcore evaluate --finetune` sets, with what happens instead."""
_Group = tuple[str, tuple[str, ...]]


def evaluate_flags(own: Collection[str], model: GivenModel) -> dict[str, ForeignFlag]:
    """Return the foreign flags of `lmcore evaluate` by name: of Megatron's tasks, and of a run.

    Args:
        own: Flags of the command itself, which are not foreign.
        model: Place for the flags of the model's shape, which parsing fills.
    """
    flags = run_flags(model)
    flags |= {name: without_effect("1", _PASS_SIZE) for name in _PASSES}
    flags |= {
        name: ForeignFlag(arity, functools.partial(_refuse, name, _QUESTIONS))
        for name, arity in _OF_QUESTIONS.items()
    }
    flags |= {
        name: ForeignFlag("*", functools.partial(_refuse, name, _of_task(name)))
        for name in ("--load", "--pretrained-checkpoint", "--strict-lambada")
    }
    flags["--overlapping-eval"] = ForeignFlag(
        "1", lambda values: Translation(flags=("--stride", *values)), replacement="--stride"
    )
    flags["--keep-last"] = without_effect("0", "every example counts")
    flags |= {
        name: without_effect("0", "nothing is trained") for name in ("--eval-only", "--skip-train")
    }
    return {name: flag for name, flag in flags.items() if name not in own}


def is_tuned(argv: Sequence[str]) -> bool:
    """Return True for a command line of Megatron's tasks that trains a head."""
    return " ".join(dict(_groups(argv)[1]).get("--task", ())) in _TUNED


def tuned_flags(own: Collection[str]) -> dict[str, ForeignFlag]:
    """Return the foreign flags of `lmcore evaluate --finetune` by name, with training flags.

    Args:
        own: Flags of the command itself, which are not foreign.
    """
    flags = {**train_flags(), **{name: without_effect("*", _SET[name]) for name in _SET}}
    return {name: flag for name, flag in flags.items() if name not in own}


def _of_task(name: str) -> str:
    if name == "--strict-lambada":
        return "use `--task lambada_strict`"
    return "give the checkpoint without a flag: `lmcore evaluate CHECKPOINT --task NAME`"


def _refuse(name: str, hint: str, values: tuple[str, ...]) -> Translation:
    what = f"`{' '.join((name, *values))}` is not supported"
    return Translation(problem=UnsupportedFlagError(what, hint=hint))


def upstream_arguments(argv: Sequence[str], *, announce: bool = True) -> list[str]:
    """Return the arguments of `lmcore evaluate` for a command line of Megatron's tasks.

    Args:
        argv: Arguments; others are returned as they are.
        announce: True to log the flags that change nothing.

    Raises:
        ConfigError: No file of the task is given, or several.
    """
    checkpoints, groups = _groups(argv)
    name = " ".join(dict(groups).get("--task", ()))
    if name in _LANGUAGE:
        return _language(name, checkpoints, groups)
    if name in _TUNED:
        # Flags of training may be after a `--`, as `lmcore evaluate --finetune` has them.
        checkpoints, groups = _groups([word for word in argv if word != "--"])
        for flag, values in groups if announce else ():
            if flag in _SET:
                logger.info("`%s` changes nothing here: %s", " ".join((flag, *values)), _SET[flag])
        return _tuned(name, checkpoints, groups)
    return list(argv)


def _groups(argv: Sequence[str]) -> tuple[list[str], list[_Group]]:
    """Return the words before the first flag, and each flag with the words after it."""
    before: list[str] = []
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            groups.append((name, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            before.append(word)
    return before, [(name, tuple(values)) for name, values in groups]


def _language(name: str, checkpoints: Sequence[str], groups: Sequence[_Group]) -> list[str]:
    given = dict(groups)
    files = given.get("--valid-data", ())
    if len(files) != 1:
        raise ConfigError(
            f"`--task {name}` needs `--valid-data FILE`",
            why=f"{len(files)} files are given" if files else None,
            hint="or `--task-data DIR` with the name of the task in small letters",
        )
    task = _LANGUAGE[name]
    if name == "LAMBADA" and "--strict-lambada" in given:
        task = "lambada_strict"
    made = [*checkpoints, *given.get("--load", ()), "--task", task]
    made += ["--task-data", f"{task}={files[0]}"]
    # The sizes of a batch are options of fine-tuning alone.
    left_out = {"--task", "--valid-data", "--load", "--strict-lambada", *_PASSES}
    return [*made, *_words(one for one in groups if one[0] not in left_out)]


def _tuned(name: str, checkpoints: Sequence[str], groups: Sequence[_Group]) -> list[str]:
    given = dict(groups)
    begins = given.get("--pretrained-checkpoint", ()) or given.get("--load", ())
    made = [*checkpoints, *begins, "--task", _TUNED[name], "--finetune"]
    made += _words(one for one in groups if one[0] in _OF_COMMAND)
    # `--finetune` was added here.
    left_out = {"--task", "--pretrained-checkpoint", "--load", "--seed", "--finetune"}
    left_out |= {*_SET, *_OF_COMMAND}
    if seed := given.get("--seed"):
        made += ["--seeds", *seed]
    training = _words(one for one in groups if one[0] not in left_out)
    return [*made, *(["--", *training] if training else [])]


def _words(groups: Iterable[_Group]) -> list[str]:
    return [word for name, values in groups for word in (name, *values)]
