"""`TunedRun`: the run of one seed, from its training to the scores of its best checkpoint."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.durable import AtomicFile, hidden_path, write_atomically
from lmcore.base.errors import LmcoreError, RunError
from lmcore.base.signals import END_SIGNALS, end_status
from lmcore.cli.evaluate.report import metrics_record, part_record
from lmcore.cli.evaluate.scores import RECORD_NAME, example_lines, head_of, runtime_of, score_part
from lmcore.cli.loading import plan_processes
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.evaluation.finetune.files import labelled_file, write_rows

if TYPE_CHECKING:
    from lmcore.cli.evaluate.section import EvaluateSection
    from lmcore.cli.evaluate.settings import TunedSettings
    from lmcore.config.plugin_section import PluginSettings
    from lmcore.evaluation.finetune.record import Part, TunedTask
    from lmcore.evaluation.finetune.score import PartScore
    from lmcore.plugin import PluginSet

__all__ = ["EXAMPLES_NAME", "TunedData", "TunedRun"]

logger = logging.getLogger(__name__)

EXAMPLES_NAME = "examples.jsonl"
"""File in a run's directory with what its best checkpoint predicts."""
_MAX_BYTES = 1 << 24
_SCORED: tuple[Part, Part] = ("valid", "test")


class TunedData:
    """Rows of a fine-tuning: each file is read once, for all seeds.

    Attributes:
        valid: Files that choose the best checkpoint.
        test: Files that the best checkpoint is scored on.
    """

    def __init__(self, task: TunedTask, files: Mapping[Part, Sequence[Path]], folder: Path) -> None:
        """Read the files of validation and test.

        Args:
            task: The task.
            files: Files of each part.
            folder: Folder for the files that training reads.

        Raises:
            DataError: A file is not there, has another layout, no rows or no labels.
        """
        self._task, self._train, self._folder = task, files["train"], folder
        self.valid, self.test = (
            [labelled_file(task, path) for path in files[part]] for part in _SCORED
        )
        self._written: tuple[dict[str, Path], int] | None = None

    def written(self) -> tuple[dict[str, Path], int]:
        """Write the rows for training; return the files, and the number of training rows.

        Raises:
            DataError: A training file is not there, has another layout, no rows or no labels.
        """
        if self._written is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            found = {part: self._folder.resolve() / f"{part}.jsonl" for part in ("train", "valid")}
            train = (labelled_file(self._task, path) for path in self._train)
            count = write_rows(train, found["train"])
            write_rows(self.valid, found["valid"])
            self._written = found, count
        return self._written


@dataclass(frozen=True)
class TunedRun:
    """Run of one seed.

    Attributes:
        section: Options of the command.
        task: The task.
        wanted: Settings of the fine-tuning.
        seed: Seed of the run.
        directory: Directory of the run.
        data: Rows for training and for scores.
        plugins: Plugins to choose from.
        settings: Options of the plugins.
    """

    section: EvaluateSection
    task: TunedTask
    wanted: TunedSettings
    seed: int
    directory: Path
    data: TunedData
    plugins: PluginSet
    settings: PluginSettings

    def known(self) -> dict[str, Any] | None:
        """Return the record of a run that is done; None if it is not."""
        path = self.directory / RECORD_NAME
        if not path.is_file():
            return None
        try:
            record = json.loads(read_bounded_file(path, _MAX_BYTES))
            if record["settings"] != self.wanted.values() or record["seed"] != self.seed:
                return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        if not (self.directory / EXAMPLES_NAME).is_file():
            return None
        self._keep(int(record["step"]))  # a stop may have come before
        return dict(record)

    def train_and_score(self) -> tuple[int, dict[str, Any] | None]:
        """Train, or continue; return the status, and the record of the run if it is complete.

        Raises:
            LmcoreError: See `lmcore train`, `load_head` and `score_files`.
        """
        from lmcore.cli.train import run

        status = run(self._arguments())
        if status or not self._is_trained():
            return status or self._stop_status(), None
        record = self._scores()
        content = json.dumps(record, indent=2, allow_nan=False) + "\n"
        write_atomically(self.directory / RECORD_NAME, content.encode())
        self._keep(record["step"])
        return 0, record

    def _arguments(self) -> list[str]:
        """Return the arguments of `lmcore train`: of a new run, or to continue one."""
        from lmcore.checkpoint import survey

        if (self.directory / "checkpoints").is_dir() and survey(self.directory).readable:
            return ["--continue", str(self.directory), *self.wanted.devices, *self.wanted.training]
        data, rows = self.data.written()
        steps, interval = self.wanted.steps(rows), self.wanted.interval(rows)
        if interval > steps and self.wanted.eval_interval:
            logger.warning(
                "`--eval-interval %d` is more than the %d steps of the run: its last checkpoint "
                "alone is validated",
                *(interval, steps),
            )
        return self.wanted.flags(self.task, data, rows, self.seed, self.directory)

    def _is_trained(self) -> bool:
        return self._ending().partition(":")[0] in {"completed", "stopped early"}

    def _stop_status(self) -> int:
        """Return the exit status of a run that saved and ended early: of a signal, if there was."""
        name = self._ending().removeprefix("received ")
        numbers = {signal.Signals(number).name: number for number in END_SIGNALS}
        return end_status(numbers[name]) if name in numbers else 1

    def _ending(self) -> str:
        """Return how training ended, as `summary.json` has it; empty if it does not say."""
        try:
            summary = json.loads(read_bounded_file(self.directory / "summary.json", _MAX_BYTES))
            return str(summary["status"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""

    def _scores(self) -> dict[str, Any]:
        """Score every validated checkpoint, and the best one on the test."""
        # Training may divide the model; its scores are computed by one process.
        alone = dataclasses.replace(
            self.section,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            nproc_per_node=None,
            seq_length=None,
        )
        plan = plan_processes(alone, self.plugins)
        own = TokenizerSettings()  # the run's copy
        checkpoints = self._checkpoints()
        scored: list[tuple[int, Path, PartScore]] = []
        with runtime_of(alone, checkpoints[-1][1], plan, self.plugins, self.settings) as runtime:
            for step, checkpoint in checkpoints:
                head = head_of(alone, checkpoint, runtime, self.plugins, own)
                part = score_part(alone, head, self.task, self.data.valid)
                scored.append((step, checkpoint, part))
                name = self.task.metrics[0]
                logger.info("step %d: %s %.4f", step, name, part.metrics[name].value)
            step, checkpoint, valid = max(
                scored, key=lambda one: (_main(self.task, one[2]), -one[0])
            )
            test = None
            if self.data.test:
                head = head_of(alone, checkpoint, runtime, self.plugins, own)
                test = score_part(alone, head, self.task, self.data.test)
        self._write_examples(checkpoint, [valid, *([test] if test else [])])
        return {
            "settings": self.wanted.values(),
            "seed": self.seed,
            "step": step,
            "checkpoint": str(checkpoint),
            "validations": {
                str(number): metrics_record(part.metrics) for number, _, part in scored
            },
            "valid": part_record(self.task, valid),
            "test": part_record(self.task, test) if test else None,
        }

    def _checkpoints(self) -> list[tuple[int, Path]]:
        """Return step and directory of the checkpoints that were validated, and of the last one."""
        from lmcore.checkpoint import survey

        found = sorted((one.iteration, path) for path, one in survey(self.directory).readable)
        if not found:
            raise RunError(
                f"`{self.directory}` has no checkpoint",
                hint="leave options that change where checkpoints are saved out",
            )
        config: Any = survey(self.directory).newest()[1].meta.get("config")
        try:
            interval = int(config["config"]["training"]["eval_interval"])
        except (KeyError, TypeError, ValueError):
            interval = 1
        kept = [one for one in found if one[0] % max(1, interval) == 0]
        return kept if found[-1] in kept else [*kept, found[-1]]

    def _write_examples(self, checkpoint: Path, parts: Sequence[PartScore]) -> None:
        with AtomicFile(self.directory / EXAMPLES_NAME) as stream:
            for part in parts:
                for line in example_lines(checkpoint, self.task, part):
                    stream.write(line.encode())

    def _keep(self, step: int) -> None:
        """Remove the checkpoints of other steps: of the best one, the run can be used."""
        from lmcore.checkpoint import survey
        from lmcore.checkpoint.layout import LATEST_NAME

        try:
            found = survey(self.directory)
        except LmcoreError:
            return
        if not any(one.iteration == step for _, one in found.readable):
            return
        write_atomically(found.path / LATEST_NAME, f"{step}\n".encode())
        for path, manifest in found.readable:
            if manifest.iteration != step:
                hidden = hidden_path(path, "deleted")
                path.rename(hidden)
                shutil.rmtree(hidden)


def _main(task: TunedTask, part: PartScore) -> float:
    value = part.metrics[task.metrics[0]].value
    return -math.inf if math.isnan(value) else value  # NaN: the predictions are constant
