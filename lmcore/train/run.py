"""A whole run, from its plan to its summary; every part is passed to the next.

This is the place to see how the framework's parts go together.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.checkpoint import WritePlanner, warm_up
from lmcore.config.model_math import num_query_groups
from lmcore.data.tokenizer.saved import save_tokenizer
from lmcore.errors import RunError
from lmcore.model.shape import ModelShape
from lmcore.parallel.pipeline_split import stages_in_words
from lmcore.plugin import run_end, run_start
from lmcore.runtime.process.consistency import check_equal, check_kernels
from lmcore.runtime.process.store import Rendezvous, join_processes
from lmcore.runtime.runtime import start_runtime
from lmcore.train.compilation import compiles_blocks
from lmcore.train.datasets import open_corpus
from lmcore.train.diagnose.out_of_memory import out_of_memory_explained
from lmcore.train.engine import open_engine
from lmcore.train.exit_conditions import ExitConditions
from lmcore.train.loop import Outcome, Reporter, failure_status, train
from lmcore.train.report.display import duration, open_display
from lmcore.train.report.metrics import MetricsFile, TensorBoard
from lmcore.train.report.profiler import Profile
from lmcore.train.report.run_directory import RunDirectory
from lmcore.train.report.sample import Sample, take_sample, whole_model
from lmcore.train.report.startup_clock import PhaseClock
from lmcore.train.resume.restore import restore
from lmcore.train.resume.saved_data import saved_data
from lmcore.train.resume.saver import Saver
from lmcore.train.resume.snapshot import Snapshot, data_order, take_snapshot
from lmcore.train.state import seed_everything

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.config.section.model import ModelSection
    from lmcore.data.prepare.named_text import NamedText
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.plugin import PluginSet, Selection
    from lmcore.runtime.launch.rank import RankInfo
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.datasets import Corpus
    from lmcore.train.engine import Engine, Step
    from lmcore.train.report.display import Display
    from lmcore.train.state import TrainState

__all__ = ["RunResult", "run_training"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """What a run leaves.

    Attributes:
        directory: The run directory.
        status: "completed", or why it ended early.
        summary: The content of `summary.json`.
        sample: Text from the trained model, if one was asked for.
    """

    directory: Path
    status: str
    summary: dict[str, Any]
    sample: Sample | None


def run_training(
    plan: RunPlan,
    tokenizer: Tokenizer,
    plugins: PluginSet,
    selection: Selection,
    rank: RankInfo,
    clock: PhaseClock | None = None,
    *,
    texts: Mapping[str, NamedText] | None = None,
) -> RunResult:
    """Train as *plan* says, and leave a run directory.

    Args:
        plan: The resolved configuration.
        tokenizer: Of the data.
        plugins: The plugins that the launcher found.
        selection: The launcher's choice of device.
        rank: This process's place.
        clock: Has measured the start so far; None begins here.
        texts: The texts that the plan names, by name; None: only the bundled one.

    Raises:
        LmcoreError: Whatever the user can mend.  Once training has begun `summary.json` says so
            too; before that nothing in the directory is changed.
    """
    config = plan.config
    with contextlib.ExitStack() as stack:
        rendezvous = _join(plan, rank, stack)
        run = _run_directory(plan, rank, rendezvous)
        if rank.rank == 0:
            stack.callback(run.remove_if_empty)
        display = open_display(config.logging.progress if rank.rank == 0 else "none")
        stack.callback(display.close)
        with start_runtime(config, plugins, selection, rank, rendezvous) as runtime:
            clock = clock or PhaseClock()
            clock.mark("device")
            return _Session(plan, tokenizer, plugins, runtime, run, display, clock, texts).run()


def _join(plan: RunPlan, rank: RankInfo, stack: contextlib.ExitStack) -> Rendezvous | None:
    """Find the other processes of the run, and stop unless all were given the same settings."""
    if rank.world_size == 1:
        return None
    timeout = plan.config.parallel.distributed_timeout_minutes * 60
    rendezvous = stack.enter_context(join_processes(rank, timeout=timeout))
    check_equal(
        rendezvous,
        "their settings",
        plan.settings,
        hint="give all processes the same flags and files",
    )
    return rendezvous


def _run_directory(plan: RunPlan, rank: RankInfo, rendezvous: Rendezvous | None) -> RunDirectory:
    """Make the directory of the run; rank 0 does, and tells the others its path."""
    asked = plan.config.checkpoint
    run = None
    if rank.rank == 0:
        run = RunDirectory.create(
            asked.save, plan.config.logging.name, load=None if asked.finetune else asked.load
        )
    if rendezvous is None:
        assert run is not None  # the only process is rank 0
        return run
    paths = rendezvous.gather(str(run.path) if run else None, "the run directory")
    return RunDirectory(Path(paths[0]))


@dataclass(frozen=True)
class _Session:
    plan: RunPlan
    tokenizer: Tokenizer
    plugins: PluginSet
    runtime: Runtime
    directory: RunDirectory
    display: Display
    clock: PhaseClock
    texts: Mapping[str, NamedText] | None

    def run(self) -> RunResult:
        plan, runtime, run = self.plan, self.runtime, self.directory
        began = time.monotonic()
        processes = runtime.processes
        alone = processes.rendezvous.first_process("the data") if processes else nullcontext()
        with alone:  # what rank 0 has prepared, the others find
            corpus = open_corpus(plan, self.tokenizer, run.data, self.texts, saved_data(plan))
        order = data_order(corpus.train)
        self.clock.mark("data")
        seed_everything(plan.config.training.seed, runtime, plan.layout)
        profile = Profile(
            plan.config.profile,
            run.profile,
            device_type=runtime.device.type,
            rank=runtime.rank.rank,
            say=self.display.say,
        )
        with out_of_memory_explained(plan, runtime), contextlib.ExitStack() as stack:
            with runtime.ops.bind_all():
                engine = stack.enter_context(open_engine(plan, runtime, profile.profiler_range))
            return self._run(engine, corpus, order, began, profile)

    def _run(
        self, engine: Engine, corpus: Corpus, order: str, began: float, profile: Profile
    ) -> RunResult:
        """Load, train, and leave what a run leaves."""
        plan, runtime, run, state = self.plan, self.runtime, self.directory, engine.state
        if runtime.processes is not None:
            check_kernels(runtime.processes.rendezvous, runtime.ops, parts=plan.layout.pipeline > 1)
        planner = WritePlanner(runtime.processes.rendezvous if runtime.processes else None)
        loaded = restore(state, plan, runtime, order=order, planner=planner)
        if loaded is None and plan.config.checkpoint.load:
            state.parallel.initialize(plan.config.training.seed)
        engine.begin()
        self._describe_run(engine)
        self._announce(corpus, state, loaded)
        facts = self._facts()
        run_start(self.plugins, runtime.selection, facts)
        self.clock.mark("model")
        status = "failed"
        try:
            with out_of_memory_explained(plan, runtime, state, run.checkpoints):
                outcome = self._train(state, engine.step, corpus, order, planner, profile)
            status = outcome.reason or "completed"
        except BaseException as error:
            status = failure_status(error)
            self._write_failure(state, status)
            raise
        finally:
            self.display.close()
            run_end(
                self.plugins,
                runtime.selection,
                facts | {"status": status, "iteration": state.iteration},
            )
        summary = self._summary(state, outcome, status, time.monotonic() - began)
        if not self._leads:
            return RunResult(run.path, status, summary, None)
        run.write_json("summary.json", summary)
        sample = None
        if outcome.reason is None:  # whoever ends a run early wants it to end
            sample = self._sample(engine, corpus, outcome.checkpoint or loaded)
        if sample is not None:
            summary["sample"] = {"prompt": sample.prompt, "text": sample.text}
            run.write_json("summary.json", summary)
        return RunResult(run.path, status, summary, sample)

    def _sample(self, engine: Engine, corpus: Corpus, checkpoint: Path | None) -> Sample | None:
        """Return text from the model, of which this process may hold a part only."""
        plan, runtime, tokenizer = self.plan, self.runtime, self.tokenizer
        if not engine.divided:
            with engine.state.weights_for_use():
                return take_sample(engine.state.model, corpus, plan, runtime, tokenizer)
        if plan.config.training.sample_tokens == 0 or checkpoint is None:
            return None
        model = whole_model(checkpoint, runtime)
        return take_sample(model, corpus, plan, runtime, tokenizer) if model else None

    @property
    def _leads(self) -> bool:
        """Whether this process is the one that writes."""
        return self.runtime.rank.rank == 0

    def _write_failure(self, state: TrainState, status: str) -> None:
        if not self._leads:
            return
        try:
            self.directory.write_json("summary.json", {"status": status, **state.counters()})
        except RunError as error:  # the failure itself matters more
            logger.warning("%s", error)

    def _train(
        self,
        state: TrainState,
        step: Step,
        corpus: Corpus,
        order: str,
        planner: WritePlanner,
        profile: Profile,
    ) -> Outcome:
        plan, run, settings = self.plan, self.directory, self.plan.config.logging
        tensorboard = None
        if settings.tensorboard and self._leads:
            where = Path(settings.tensorboard_dir or run.path / "tensorboard")
            tensorboard = TensorBoard(where, settings)

        def snapshot() -> Snapshot:
            return take_snapshot(
                state,
                plan,
                self.runtime,
                self.tokenizer,
                directory=run.checkpoints,
                order=order,
                data=corpus.record(state.consumed_samples),
                planner=planner,
            )

        try:
            with (
                self._metrics_file(state) as metrics,
                ExitConditions(plan.config.training) as exits,
                Saver(snapshot, background=plan.config.checkpoint.async_save) as saver,
                profile,
            ):
                return train(
                    state,
                    step,
                    corpus,
                    plan,
                    self.runtime,
                    reporter=Reporter(plan, self.runtime, self.display, metrics, tensorboard),
                    exits=exits,
                    saver=saver,
                    profile=profile,
                    after_first_step=self._after_first_step,
                )
        finally:
            if tensorboard is not None:
                tensorboard.close()

    def _metrics_file(self, state: TrainState) -> AbstractContextManager[MetricsFile | None]:
        if not self._leads:
            return nullcontext()
        return MetricsFile(self.directory.metrics, after_step=state.iteration)

    def _after_first_step(self) -> None:
        """Import what a save needs while the run goes on: it takes about a second.

        Not before the first step, which may import the same modules to compile.
        """
        self.clock.mark("first_step")
        if compiles_blocks(self.plan, self.runtime.device):
            took = self.clock.seconds["first_step"]
            self.display.say(f"compile   the first step took {took:.1f} s, compiling included")
        # No daemon: where a run ends at once, Python would end the thread within torch's C++, which
        # aborts the process.
        threading.Thread(target=warm_up, name="lmcore-import", daemon=False).start()

    def _describe_run(self, engine: Engine) -> None:
        """Write what is known before the first step."""
        if not self._leads:
            return
        run = self.directory
        run.write_text("config.yaml", self.plan.to_yaml())
        run.write_json("environment.json", self.runtime.environment())
        run.write_json("kernels.json", self.runtime.ops.to_dict())
        for name, content in engine.records.items():
            run.write_json(name, content)
        # That of a run that failed before it saved anything gives way to the corrected one.
        save_tokenizer(self.tokenizer, run.tokenizer, replace=not run.has_checkpoints())

    def _facts(self) -> dict[str, Any]:
        """Return what plugins hear of the run."""
        return {
            "directory": str(self.directory.path),
            "rank": self.runtime.rank.rank,
            "world_size": self.runtime.rank.world_size,
            "plan": self.plan.to_dict(),
        }

    def _announce(self, corpus: Corpus, state: TrainState, loaded: Path | None) -> None:
        plan, model, say = self.plan, self.plan.config.model, self.display.say
        device = self.runtime.device
        processes = self.runtime.processes
        many = f", {plan.world_size} processes over {processes.backend.name}" if processes else ""
        say(f"device    {device.name} ({device.type}){many}")
        if processes:
            say(f"layout    {plan.layout.words}")
        if plan.layout.pipeline > 1:
            say(f"stages    {stages_in_words(model.num_layers, plan.layout)}")
        say(f"precision {self.runtime.precision.words}")
        if self.runtime.recompute.name != "none":
            say(f"recompute {self.runtime.recompute.name}: {self.runtime.recompute.summary}")
        if compiles_blocks(plan, device):
            asked = plan.config.training.compile
            why = "" if asked else ", as it pays on this device (`--no-compile`: it is not)"
            say(f"compile   each block{why}")
        if plan.config.training.step_graph:
            say("graph     forward and backward of a micro-batch, recorded once and played again")
        say(
            f"model     {ModelShape.from_plan(plan).family}, {plan.parameter_count:,} parameters: "
            f"{model.num_layers} layers, hidden {model.hidden_size}, {_heads(model)}, vocabulary "
            f"{plan.vocab_size} padded to {plan.padded_vocab_size}"
        )
        say(
            f"data      {corpus.title}: {corpus.token_count:,} tokens, {self.tokenizer.name}, "
            f"{corpus.document_count:,} documents"
        )
        sizes = plan.batch_sizes
        growing = f"{sizes.start} to " if sizes.ramp_samples else ""
        start = f" from step {state.iteration} of {loaded}" if loaded else ""
        if loaded and plan.config.checkpoint.finetune:
            start = f", from the weights of {loaded}"
        say(
            f"training  {plan.train_iters} steps of {growing}{sizes.final} x "
            f"{model.seq_length} tokens{start}"
        )
        say(f"writing   {self.directory.path}{os.sep}")
        if state.iteration >= plan.train_iters and self._leads:
            logger.warning(
                "nothing is left to train: the checkpoint is of step %d, the run ends at step %d",
                state.iteration,
                plan.train_iters,
            )

    def _summary(
        self,
        state: TrainState,
        outcome: Outcome,
        status: str,
        seconds: float,
    ) -> dict[str, Any]:
        row, memory = outcome.row, self.runtime.device.memory_stats
        typical = statistics.median(outcome.step_ms) if outcome.step_ms else None
        return {
            "status": status,
            **state.counters(),
            "train_iters": self.plan.train_iters,
            "loss": row.loss if row else None,
            "valid_loss": outcome.validation[1].loss if outcome.validation else None,
            "valid_step": outcome.validation[0] if outcome.validation else None,
            "valid_perplexity": outcome.validation[1].perplexity if outcome.validation else None,
            "test_loss": outcome.test.loss if outcome.test else None,
            "test_perplexity": outcome.test.perplexity if outcome.test else None,
            "parameter_count": self.plan.parameter_count,
            "median_step_ms": typical,
            "median_tokens_per_second": statistics.median(outcome.tokens_per_second)
            if outcome.tokens_per_second
            else None,
            "startup_seconds": self.clock.seconds,
            "seconds": seconds,
            "duration": duration(seconds),
            "peak_memory_bytes": memory().peak_allocated if memory else None,
            "checkpoint": str(outcome.checkpoint) if outcome.checkpoint else None,
            "sample": None,
        }


def _heads(model: ModelSection) -> str:
    grouped = f" in {num_query_groups(model)} groups" if model.group_query_attention else ""
    return f"{model.num_attention_heads} heads{grouped}"
