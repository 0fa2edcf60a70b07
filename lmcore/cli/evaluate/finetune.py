"""`lmcore evaluate --finetune`: train a head for a task, choose the best checkpoint and score it.

Each seed is a run of `lmcore train --task`.  A run that is done has its scores in `finetune.json`,
so that the same command continues after a stop.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.durable import hidden_path, write_atomically
from lmcore.base.errors import ConfigError, DataError, RunError, counted, unreadable
from lmcore.base.missing_path import missing_path_hint
from lmcore.cli.evaluate.outputs import write_results
from lmcore.cli.evaluate.report import aligned, metrics_record, part_rows, shown
from lmcore.cli.evaluate.runs import EXAMPLES_NAME, TunedData, TunedRun
from lmcore.cli.evaluate.scores import require_outputs, warn_of_training_files
from lmcore.cli.evaluate.settings import TunedSettings, settings_of, shape_of
from lmcore.cli.evaluate.stop import said_at_stop
from lmcore.cli.loading import require_checkpoint
from lmcore.cli.text.sample_output import open_output_file
from lmcore.config.option import flag_of, options_of
from lmcore.config.section.task import TaskSection
from lmcore.evaluation.chosen import place_of, places_of
from lmcore.model.family import family_of

if TYPE_CHECKING:
    from lmcore.cli.evaluate.section import EvaluateSection
    from lmcore.config.plugin_section import PluginSettings
    from lmcore.evaluation.finetune.record import Part, TunedTask
    from lmcore.plugin import PluginSet

__all__ = ["finetune"]

logger = logging.getLogger(__name__)

_TASK_FLAGS = tuple(flag_of(option.name) for option in options_of(TaskSection))
_OWN_FLAGS = (
    *("--load", "--save", "--continue", "--finetune", "--use-checkpoint-args", "--ckpt-step"),
    *("--train-iters", "--train-samples", "--seed", "--lr", "--lr-warmup-fraction"),
    *("--seq-length", "--global-batch-size", "--micro-batch-size"),
    *("--eval-interval", "--save-interval", "--keep-last"),
)
"""Flags of training that the command sets, or that would take its checkpoints away."""
_INSTEAD = {
    "--save-interval": "leave it out: checkpoints are saved at each validation, which "
    "`--eval-interval N` before `--` sets",
    "--keep-last": "leave it out: the best checkpoint is kept",
}
_SETTINGS_NAME = "settings.json"
_RESULTS_NAME = "results.json"
_MAX_BYTES = 1 << 24
_CONTINUES = "the fine-tuning is not complete; the same command continues it"


@dataclass(frozen=True)
class _Place:
    """Directory of `--save`."""

    path: Path

    @property
    def data(self) -> Path:
        """Folder of the files that training reads."""
        return self.path / "data"

    def run(self, seed: int) -> Path:
        """Return the directory of the run of a seed."""
        return self.path / f"seed-{seed}"


def finetune(
    section: EvaluateSection,
    task: TunedTask,
    training: Sequence[str],
    plugins: PluginSet,
    settings: PluginSettings,
) -> int:
    """Train and score a head for each seed; return the exit status.

    Args:
        section: Options of the command.
        task: The task.
        training: Further arguments of `lmcore train`.
        plugins: Plugins to choose from.
        settings: Options of the plugins.

    Raises:
        ConfigError: The options contradict each other, or the directory has another fine-tuning.
        DataError: Files are missing or have another layout.
    """
    checkpoint = _checked(section, training)
    files = _files(section, task)
    require_outputs(section, [path for paths in files.values() for path in paths])
    assert section.save is not None
    place = _Place(Path(section.save))
    data = TunedData(task, files, place.data)
    wanted = settings_of(section, task, checkpoint, files, training, plugins)
    scored = [*files["valid"], *files["test"]]
    warn_of_training_files(scored, files["train"], wanted.checksums)
    _claim(place, wanted)
    done: dict[int, Any] = {}
    for number, seed in enumerate(section.seeds, 1):
        run = TunedRun(section, task, wanted, seed, place.run(seed), data, plugins, settings)
        if (known := run.known()) is None:
            logger.info("seed %d, run %d of %d", seed, number, len(section.seeds))
            with _standard_output_free(section), said_at_stop(_CONTINUES):
                status, known = run.train_and_score()
            if known is None:
                logger.warning(_CONTINUES)
                return status
        else:
            logger.info("seed %d is complete in `%s`", seed, run.directory)
        done[seed] = known
    report = _report(section, task, wanted, done)
    _mark_best(place, report)
    content = json.dumps(report, indent=2, allow_nan=False)
    for path in (place.path / _RESULTS_NAME, *([Path(section.output)] if section.output else [])):
        write_results(path, content)
    if section.examples is not None:
        _join_examples(place, section)
    print(content if section.json else _table(task, report, place))
    return 0


def _checked(section: EvaluateSection, training: Sequence[str]) -> Path:
    """Return the checkpoint, after the options that do not fit were refused."""
    if len(section.checkpoints) != 1:
        raise ConfigError(
            f"`--finetune` begins from one checkpoint, not from {len(section.checkpoints)}",
            hint="`lmcore evaluate CHECKPOINT --task mnli --finetune --task-data DIR --save DIR`",
        )
    if section.save is None:
        raise ConfigError(
            "`--finetune` needs `--save DIR`", why="the runs and their scores are written there"
        )
    for name in ("text", "stride", "limit", "harness"):
        if getattr(section, name):
            raise ConfigError(
                f"`--{name}` cannot be combined with `--finetune`", hint="leave it out"
            )
    if len({*section.seeds}) < len(section.seeds) or not section.seeds:
        raise ConfigError("`--seeds` names no seed, or one twice", hint="name each seed once")
    _check_processes(training)
    checkpoint = require_checkpoint(Path(section.checkpoints[0]), section.ckpt_step)
    shape = shape_of(section, checkpoint)
    if shape is not None and not shape.task and family_of(shape).body is None:
        raise ConfigError(
            f"`{checkpoint}` is a {family_of(shape).name} model, which `--finetune` cannot train",
            why="the family does not say where a head could be attached",
            hint="give a model that has heads, such as BERT, GPT or Llama",
        )
    return checkpoint


def _check_processes(training: Sequence[str]) -> None:
    """Refuse a launcher of several processes, and arguments of training that are set here."""
    from lmcore.runtime.launch.rank import started_by_launcher
    from lmcore.runtime.launch.scheduler_env import translate

    launched = {**os.environ, **translate(os.environ)}
    if started_by_launcher(launched) and launched["WORLD_SIZE"].strip() != "1":
        raise ConfigError(
            "`--finetune` was started by a launcher",
            why="it starts the processes of training itself, on this host",
            hint="start it without one; or train by `lmcore train --task` with the launcher, and "
            "score the run by `lmcore evaluate RUN --task NAME`",
        )
    for name in (*_OWN_FLAGS, *_TASK_FLAGS):
        if any(word.partition("=")[0] == name for word in training):
            raise ConfigError(
                f"`{name}` cannot be given after `--`",
                why="`lmcore evaluate --finetune` sets it",
                hint=_INSTEAD.get(
                    name, "`lmcore evaluate --help` has the options to give before `--`"
                ),
            )


def _files(section: EvaluateSection, task: TunedTask) -> dict[Part, list[Path]]:
    """Return the files of each part, of the test only files with labels."""
    from lmcore.evaluation.finetune.files import find_part, is_labelled

    given: dict[Part, tuple[str, ...]] = {
        "train": section.train_data,
        "valid": section.valid_data,
        "test": section.test_data,
    }
    found: dict[Part, list[Path]] = {}
    places = places_of(section.task_data, [task.name])
    for part, paths in given.items():
        if paths:
            found[part] = [Path(one) for one in paths]
            if missing := [one for one in found[part] if not one.exists()]:
                raise DataError(
                    f"`--{part}-data`: there is no `{missing[0]}`",
                    hint=missing_path_hint(missing[0]),
                )
        elif places or part != "test":
            place = place_of(task, places)
            if place.is_file():
                raise ConfigError(
                    f"`--task-data {place}` is a file",
                    why="`--finetune` reads files of training and of validation",
                    hint="give the directory of the release, or `--train-data` and `--valid-data`",
                )
            found[part] = find_part(task, place, part, needed=part != "test")
        else:
            found[part] = []
    unlabelled = [one for one in found["test"] if not is_labelled(task, one)]
    for path in unlabelled:
        logger.info(
            "`%s` has no labels: it is not scored; with it, `lmcore evaluate %s --task %s "
            "--task-data FILE --examples FILE` writes predictions",
            *(path, Path(str(section.save)) / "best", task.name),
        )
    found["test"] = [one for one in found["test"] if one not in unlabelled]
    return found


def _claim(place: _Place, wanted: TunedSettings) -> None:
    """Record the settings in the directory, or compare them with the recorded ones.

    Raises:
        ConfigError: They differ, so that results would be mixed.
        RunError: The directory cannot be written.
    """
    path, values = place.path / _SETTINGS_NAME, wanted.values()
    try:
        # Settings with which nothing was trained, such as a wrong file, are replaced.
        if path.exists() and any(place.path.glob("seed-*/checkpoints/iter_*")):
            saved = json.loads(read_bounded_file(path, _MAX_BYTES))
            _compare(saved if isinstance(saved, dict) else {}, values, place.path)
            return
        if not path.exists() and place.path.is_dir() and any(place.path.iterdir()):
            raise ConfigError(
                f"`--save {place.path}` is not empty, and has no fine-tuning of this command",
                hint="choose another directory",
            )
        place.path.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(values, indent=2) + "\n").encode())
    except OSError as error:
        raise RunError(
            f"`{place.path}` cannot be used",
            why=unreadable(error),
            hint="choose another directory with `--save`",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"`{path}` is damaged", why=str(error), hint="choose another directory"
        ) from error


def _compare(saved: Mapping[str, Any], values: Mapping[str, Any], path: Path) -> None:
    differ = [name for name in values if saved.get(name) != values[name]]
    if not differ:
        return
    if differ == ["checksums"]:
        _refuse_changed_files(saved.get("checksums"), values["checksums"], path)
    raise ConfigError(
        f"`--save {path}` has a fine-tuning with other settings",
        why="; ".join(_difference(name, saved.get(name), values[name]) for name in differ[:3])
        + "; ..." * (len(differ) > 3),
        hint="give the same flags to continue it, or choose another directory",
    )


def _difference(name: str, saved: object, wanted: object) -> str:
    """Return the words about a setting that was changed, of lists about their differing part."""
    if name == "training" and isinstance(saved, list) and isinstance(wanted, list):
        parts = (_words_after_flags(one) for one in (saved, wanted))
        before, after = ({*one} for one in parts)
        gone, new = sorted(before - after), sorted(after - before)
        said = [f"{what} {' '.join(words):.200}" for what, words in _named(gone, new) if words]
        return f"the flags of training differ: {', '.join(said) or 'another order'}"
    return f"`{name}` was {json.dumps(saved):.200}, and is {json.dumps(wanted):.200}"


def _named(gone: list[str], new: list[str]) -> tuple[tuple[str, list[str]], ...]:
    return (("it was with", gone), ("now with", new))


def _words_after_flags(words: Sequence[object]) -> list[str]:
    """Return each flag with its values as one text."""
    found: list[str] = []
    for word in map(str, words):
        if word.startswith("--") or not found:
            found.append(word)
        else:
            found[-1] += f" {word}"
    return found


def _refuse_changed_files(saved: object, found: Mapping[str, str], path: Path) -> None:
    """Refuse files that have other content than when they were trained on."""
    known = saved if isinstance(saved, dict) else {}
    changed = [one for one in found if known.get(one) != found[one]] or [*found]
    listed = ", ".join(f"`{one}`" for one in changed[:5])
    listed += f" and {len(changed) - 5} more" * (len(changed) > 5)
    raise ConfigError(
        f"`--save {path}` has a fine-tuning on other content of {listed}",
        why=f"SHA-256 was {known.get(changed[0])!s:.16}..., and is {found[changed[0]]:.16}...",
        hint="choose another directory for `--save`, or restore the files to continue it",
    )


@contextlib.contextmanager
def _standard_output_free(section: EvaluateSection) -> Iterator[None]:
    """Let training print to standard error, so that `--json` prints one object."""
    if not section.json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)  # also for the processes of training
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _report(
    section: EvaluateSection, task: TunedTask, wanted: TunedSettings, done: Mapping[int, Any]
) -> dict[str, Any]:
    """Return the JSON object: each seed, then mean and standard deviation over the seeds."""
    from lmcore.evaluation.finetune.metrics import spread

    means: dict[str, Any] = {}
    for part in ("valid", "test"):
        if not all(one.get(part) for one in done.values()):
            continue
        found = {}
        for name in task.metrics:
            values = [one[part]["metrics"][name]["value"] for one in done.values()]
            if None not in values:
                found[name] = spread(values)
        means[part] = metrics_record(found)
    best = max(done, key=lambda seed: _main(task, done[seed]))
    return {
        "task": task.name,
        "checkpoint": section.checkpoints[0],
        "settings": wanted.values(),
        "seeds": {str(seed): one for seed, one in done.items()},
        "mean": means,
        "best_seed": best,
        "best": done[best]["checkpoint"],
    }


def _main(task: TunedTask, record: Mapping[str, Any]) -> float:
    value = record["valid"]["metrics"][task.metrics[0]]["value"]
    return -1e30 if value is None else float(value)


def _mark_best(place: _Place, report: Mapping[str, Any]) -> None:
    """Let the link `best` name the run of the best seed."""
    link, new = place.path / "best", hidden_path(place.path / "best", "link")
    try:
        new.symlink_to(place.run(report["best_seed"]).name, target_is_directory=True)
        new.replace(link)
    except OSError as error:  # a file system without links
        logger.warning("`%s` is not made: %s", link, error.strerror)


def _join_examples(place: _Place, section: EvaluateSection) -> None:
    assert section.examples is not None
    with open_output_file(Path(section.examples)) as target:
        for seed in section.seeds:
            with (place.run(seed) / EXAMPLES_NAME).open(encoding="utf-8") as source:
                target.writelines(source)


def _table(task: TunedTask, report: Mapping[str, Any], place: _Place) -> str:
    """Return a table of the best checkpoint of each seed, and of the mean."""
    rows = [["seed", "step", "part", "file", "examples", "metric", "value"]]
    for seed, one in report["seeds"].items():
        for part in ("valid", "test"):
            if one.get(part):
                rows += [
                    [seed, f"{one['step']:,}", part, *row] for row in part_rows(task, one[part])
                ]
    count = len(report["seeds"])
    for part, metrics in report["mean"].items() if count > 1 else ():
        for name, metric in metrics.items():
            rows.append([f"mean of {count}", "", part, "", "", name, shown(metric)])
    lines = [
        aligned(rows),
        "",
        f"{task.metrics[0]} of validation chose among {counted(_tried(report), 'checkpoint')}",
        f"best      {report['best']}",
        f"results   {place.path / _RESULTS_NAME}",
    ]
    return "\n".join(lines)


def _tried(report: Mapping[str, Any]) -> int:
    return sum(len(one["validations"]) for one in report["seeds"].values())
