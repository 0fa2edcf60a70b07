"""A run's state in a checkpoint, and what must agree for a run to continue."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcore.base.errors import CheckpointError, ConfigError
from lmcore.checkpoint import find_checkpoint, read_manifest
from lmcore.config.derived.layout import ParallelLayout
from lmcore.contract import PendingCopy, host_copy_stager
from lmcore.data.loading.loader import BatchLoader
from lmcore.optim.loss_scale import DynamicLossScale
from lmcore.train.diagnose.non_finite import NonFiniteError
from lmcore.train.resume import restore as restoring
from lmcore.train.resume import schedule
from lmcore.train.resume.restore import draws_alike, restore
from lmcore.train.resume.save import take_snapshot
from lmcore.train.state import TrainState
from lmcore.train.step import TrainStep

BASE = "--lr 1e-2 --lr-decay-iters 20 --hidden-dropout 0.1"


@pytest.fixture
def trained(
    make_plan: Any,
    make_state: Any,
    make_datasets: Any,
    runtime: Any,
    tokenizer: Any,
    tmp_path: Path,
) -> Any:
    """A run of three steps, saved with these flags added: state, order and directory."""

    def make(flags: str = "") -> tuple[TrainState, str, Path]:
        plan = make_plan(f"{BASE} {flags}")
        state, corpus = make_state(plan), make_datasets(plan)
        step = TrainStep(state, plan, runtime)
        with BatchLoader(corpus.train, micro_batch_size=4) as batches:
            for _ in range(3):
                step(batches).result()
        order = corpus.order
        folder = tmp_path / "run/checkpoints"
        take_snapshot(state, plan, runtime, tokenizer, directory=folder, order=order).write()
        return state, order, tmp_path / "run"

    return make


@pytest.fixture
def resume(make_plan: Any, make_state: Any, runtime: Any) -> Any:
    """Restores into a fresh state."""

    def go_on(folder: Path, order: str, flags: str = "", base: str = BASE) -> Any:
        plan = make_plan(f"{base} {flags} --load {folder}")
        state = make_state(plan)
        return state, restore(state, plan, runtime, order=order)

    return go_on


def test_a_loss_scale_goes_on(trained: Any, resume: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale, its counts and the schedule come back; without the optimizer they begin again."""
    create, scales = TrainState.create, iter([1024.0, 2.0, 4.0])

    def with_scale(*args: Any) -> TrainState:
        state = create(*args)
        state.loss_scale = DynamicLossScale(next(scales), window=5)
        if state.loss_scale.value == 1024.0:  # the one that is saved
            state.skipped_iterations, state.scheduled_samples = 7, 100
        return state

    monkeypatch.setattr(TrainState, "create", with_scale)
    _, order, folder = trained()
    after, _ = resume(folder, order)
    assert after.loss_scale.state() == {"value": 1024.0, "good_steps": 3, "tolerance": 2}
    assert (after.skipped_iterations, after.scheduled_samples) == (7, 112)
    anew, _ = resume(folder, order, "--no-load-optim")
    assert anew.loss_scale == DynamicLossScale(4.0, window=5)
    assert (anew.skipped_iterations, anew.scheduled_samples) == (7, 112)


def test_a_checkpoint_without_skipped_steps(make_plan: Any, make_state: Any) -> None:
    """Counters without skipped steps mean that the run skipped none."""
    state = make_state(make_plan(""))
    state.set_counters({"iteration": 3, "consumed_samples": 12, "consumed_tokens": 192})
    assert (state.iteration, state.scheduled_samples, state.skipped_iterations) == (3, 12, 0)


def test_round_trip(trained: Any, resume: Any, weights: Any) -> None:
    """Weights, moments, counts and the next random numbers come back bit for bit."""
    before, order, folder = trained()
    drawn = torch.rand(5)
    after, checkpoint = resume(folder, order)
    assert checkpoint == folder / "checkpoints/iter_0000003"
    wanted, found = weights(before), weights(after)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert found["optimizer.step.final_norm.bias"].item() == 3
    assert after.counters() == before.counters()
    assert after.counters()["consumed_tokens"] == 3 * 4 * 16
    assert torch.equal(torch.rand(5), drawn)


def test_metadata(trained: Any, tokenizer: Any) -> None:
    """The manifest has counters, schedule, data order, settings and tokenizer."""
    _, order, folder = trained()
    text = (folder / "checkpoints/iter_0000003/manifest.json").read_text()
    meta = json.loads(text)["meta"]
    assert meta["counters"]["iteration"] == 3
    assert meta["schedule"]["highest"] == 1e-2
    assert meta["data_order"] == order
    assert meta["config"]["config"]["optimizer"]["lr"] == 1e-2
    assert meta["tokenizer"]["fingerprint"] == tokenizer.fingerprint()


def test_nothing_to_load(make_plan: Any, make_state: Any, runtime: Any) -> None:
    """Without `--load` nothing is restored."""
    plan = make_plan("")
    assert restore(make_state(plan), plan, runtime, order="x") is None


def test_changed_schedule(trained: Any, resume: Any) -> None:
    """Another schedule is an error that names each field that differs, with both values."""
    _, order, folder = trained()
    base = "--lr 2e-2 --lr-decay-iters 30 --hidden-dropout 0.1"
    with pytest.raises(ConfigError, match="schedule is not the checkpoint's") as caught:
        resume(folder, order, base=base)
    first, *choices = str(caught.value.why).splitlines()
    assert first == (
        "`lr`: checkpoint 0.01, this run 0.02; `lr_warmup_samples`: checkpoint 4, this run 6; "
        "`lr_decay_samples`: checkpoint 80, this run 120"
    )
    for name, choice in zip(("extend", "keep", "restart"), choices, strict=True):
        assert choice.startswith(f"`{name}` is ")
        assert "at the next step" in choice
        assert f"--schedule {name}" in str(caught.value.hint)
    assert "--lr-decay-iters" in str(caught.value.hint)


def test_numbers_of_a_changed_schedule() -> None:
    """Rounding errors are not shown, but differences that are as small."""
    assert schedule._rounded(1.2000000000000002, 2.4000000000000004) == ["1.2", "2.4"]
    assert schedule._rounded(1.2000000000000002, 1.2) == ["1.2000000000000002", "1.2"]
    assert schedule._rounded("linear", 126_953_125) == ["linear", "126953125"]


def test_schedule_of_the_checkpoint(
    trained: Any, resume: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """`--use-checkpoint-opt-param-scheduler` takes the checkpoint's rates, and names them."""
    caplog.set_level("INFO", logger="lmcore.train.resume.schedule")
    before, order, folder = trained()
    flag = "--use-checkpoint-opt-param-scheduler"
    after, _ = resume(folder, order, flag, base="--lr 2e-2 --lr-decay-style linear")
    assert after.schedule == before.schedule
    assert after.iteration == 3
    assert "`lr_decay_style` linear -> cosine" in caplog.text


def test_schedule_of_this_run(trained: Any, resume: Any) -> None:
    """`--override-opt-param-scheduler` continues with this run's rates."""
    _, order, folder = trained()
    flag = "--override-opt-param-scheduler"
    after, _ = resume(folder, order, flag, base="--lr 2e-2 --lr-decay-style linear")
    assert (after.schedule.highest, after.schedule.style) == (2e-2, "linear")
    assert after.iteration == 3


def test_changed_order(trained: Any, resume: Any) -> None:
    """Samples in another order are an error, unless `--override-data-order` takes them."""
    _, order, folder = trained()
    with pytest.raises(ConfigError, match="in another order than the checkpoint's") as caught:
        resume(folder, "0" * 32)
    assert "--override-data-order" in str(caught.value.hint)
    after, _ = resume(folder, "0" * 32, "--override-data-order")
    assert after.iteration == 3
    assert resume(folder, order)[0].iteration == 3


def test_orders(make_plan: Any, make_datasets: Any) -> None:
    """The fingerprint changes with seed, length, split and sample length, and with nothing else."""

    def of(flags: str) -> str:
        return make_datasets(make_plan(flags)).order

    same = of("")
    assert of("--lr 1 --micro-batch-size 2 --global-batch-size 4") == same
    assert of("--train-iters 9") == same  # still within one epoch: the same samples
    others = [
        of(flags)
        for flags in ("--seed 2", "--seq-length 8", "--split 50,50,0", "--train-iters 2000")
    ]
    assert len({same, *others}) == 5


def test_finetune(trained: Any, resume: Any, weights: Any, make_plan: Any) -> None:
    """`--finetune` takes the weights and nothing else: no guard applies."""
    before, _, folder = trained()
    after, checkpoint = resume(folder, "another order", "--finetune", base="--lr 5e-5")
    assert checkpoint is not None
    wanted, found = weights(before), weights(after)
    for name, tensor in found.items():
        if name.startswith("model."):
            assert torch.equal(tensor, wanted[name]), name
        else:
            assert not tensor.any(), name
    assert set(after.counters().values()) == {0}
    assert after.schedule.highest == 5e-5


def test_without_optimizer(trained: Any, resume: Any, weights: Any) -> None:
    """`--no-load-optim` leaves the moments at zero and continues at the step."""
    before, order, folder = trained()
    after, _ = resume(folder, order, "--no-load-optim")
    assert after.iteration == 3
    assert not weights(after)["optimizer.exp_avg.final_norm.bias"].any()
    assert torch.equal(after.model.final_norm.bias, before.model.final_norm.bias)


def test_without_random_states(trained: Any, resume: Any) -> None:
    """`--no-load-rng` keeps the random numbers of the fresh run."""
    _, order, folder = trained()
    resume(folder, order)
    restored = torch.rand(5)
    resume(folder, order, "--no-load-rng")
    torch_after = torch.rand(5)
    torch.manual_seed(1234)
    assert torch.equal(torch_after, torch.rand(5))
    assert not torch.equal(torch_after, restored)


def test_saved_without_optimizer(trained: Any, resume: Any) -> None:
    """A checkpoint without optimizer state names the flag that continues without it."""
    _, order, folder = trained("--no-save-optim")
    with pytest.raises(CheckpointError, match="no optimizer state") as caught:
        resume(folder, order)
    assert "--no-load-optim" in str(caught.value.hint)
    assert caught.value.exit_status == 2
    assert resume(folder, order, "--no-load-optim")[0].iteration == 3


def test_saved_without_random_states(trained: Any, resume: Any) -> None:
    """A checkpoint without random states names the flag that continues without them."""
    _, order, folder = trained("--no-save-rng")
    with pytest.raises(CheckpointError, match="no random states") as caught:
        resume(folder, order)
    assert "--no-load-rng" in str(caught.value.hint)
    assert caught.value.exit_status == 2
    assert resume(folder, order, "--no-load-rng")[0].iteration == 3


def test_streams_of_random_numbers(trained: Any, resume: Any, runtime: Any) -> None:
    """A stream continues at the checkpoint's state; one that the checkpoint lacks is an error."""
    try:
        runtime.rng.add("experts", 3)
        _, order, folder = trained()
        with runtime.rng.fork("experts"):
            first = torch.rand(4)
        resume(folder, order)
        with runtime.rng.fork("experts"):
            assert torch.equal(torch.rand(4), first)
        runtime.rng.add("others", 4)
        with pytest.raises(CheckpointError, match="no random states") as caught:
            resume(folder, order)
        assert "--no-load-rng" in str(caught.value.hint)
    finally:
        runtime.rng.set_states({})


def test_other_shape(trained: Any, resume: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of another shape is named, number by number, before any tensor is read."""
    _, order, folder = trained()

    def refuse(*args: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(restoring, "load_checkpoint", refuse)
    with pytest.raises(CheckpointError) as caught:
        resume(folder, order, "--num-layers 3 --hidden-size 24")
    text = caught.value.render()
    for part in ("num_layers", "2", "3", "hidden_size", "16", "24"):
        assert part in text, text


def test_other_dropout(trained: Any, resume: Any) -> None:
    """Dropout is no part of the shape: a run may continue with another one."""
    _, order, folder = trained()
    after, _ = resume(folder, order, base="--lr 1e-2 --lr-decay-iters 20 --hidden-dropout 0")
    assert after.iteration == 3
    assert after.model.shape.hidden_dropout == 0


def test_a_manifest_of_another_program(
    trained: Any, resume: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights without a word on the run that made them: an error, but with `--finetune`."""
    _, order, folder = trained()
    monkeypatch.setattr(
        "lmcore.checkpoint.layout.read_manifest",
        lambda path: dataclasses.replace(read_manifest(path), meta={"config": "none"}),
    )
    with pytest.raises(CheckpointError, match="no run can continue") as caught:
        resume(folder, order)
    assert "`meta.data_order`" in str(caught.value.why)
    state, _ = resume(folder, order, "--finetune")
    assert state.iteration == 0


def test_load_nowhere(resume: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`--load` without a checkpoint stops, or starts from initial weights if that is asked for."""
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (tmp_path / "absent", empty):
        with pytest.raises(CheckpointError):
            resume(folder, "x")
        with caplog.at_level(logging.WARNING):
            state, checkpoint = resume(folder, "x", "--no-exit-on-missing-checkpoint")
        assert checkpoint is None
        assert state.iteration == 0
        assert "starting from initial weights" in caplog.records[-1].message


def test_first_start(resume: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One command can start and restart a run: `--load` of an empty `--save` starts a run."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    assert resume(folder, "x", f"--save {folder}")[1] is None
    assert "starting from initial weights" in caplog.records[-1].message


@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/iter_0000003"])
def test_damaged_is_not_missing(trained: Any, resume: Any, name: str) -> None:
    """A damaged checkpoint never makes a run start from initial weights, whatever the flags say."""
    _, order, folder = trained()
    (folder / "checkpoints/iter_0000003/manifest.json").unlink()
    for flags in ("--no-exit-on-missing-checkpoint", f"--save {folder / name}"):
        with pytest.raises(CheckpointError):
            resume(folder / name, order, flags)


def test_weights_that_are_not_finite(
    trained: Any, make_plan: Any, runtime: Any, tokenizer: Any
) -> None:
    """Weights of NaN are not saved, and no older checkpoint gives way to them."""
    state, order, folder = trained()
    with torch.no_grad():
        state.model.final_norm.bias[0] = torch.nan
    state.iteration = 4
    with pytest.raises(NonFiniteError, match=r"`final_norm\.bias`"):
        take_snapshot(
            state,
            make_plan("--keep-last 1"),
            runtime,
            tokenizer,
            directory=folder / "checkpoints",
            order=order,
        )
    kept = [path.name for path in (folder / "checkpoints").glob("iter_*")]
    assert kept == ["iter_0000003"]


def test_weights_that_are_not_finite_in_the_background(
    trained: Any, make_plan: Any, runtime: Any, tokenizer: Any
) -> None:
    """With `--async-save` the thread that writes finds them; nothing is saved or deleted."""
    state, order, folder = trained()
    state.iteration = 4
    with torch.no_grad():
        state.model.final_norm.bias[0] = torch.nan
        state.model.token_embedding.weight[-1, -1] = torch.inf
    snapshot = take_snapshot(
        state,
        make_plan("--keep-last 1 --async-save"),
        runtime,
        tokenizer,
        directory=folder / "checkpoints",
        order=order,
    )
    named = r"after step 4: `final_norm\.bias`, `token_embedding\.weight`\n"
    with pytest.raises(NonFiniteError, match=named):
        snapshot.write()
    assert [path.name for path in folder.glob("checkpoints/*iter_*")] == ["iter_0000003"]


def test_a_copy_that_fails(trained: Any, make_plan: Any, runtime: Any, tokenizer: Any) -> None:
    """A snapshot whose tensors cannot be copied says so when written; nothing is published."""
    state, order, folder = trained()
    state.iteration = 4

    def begin(tensors: Any) -> PendingCopy:
        def fail() -> None:
            raise RuntimeError("the device is gone\nand a trace")

        return PendingCopy({name: one.clone() for name, one in tensors.items()}, finish=fail)

    plain = host_copy_stager()
    snapshot = take_snapshot(
        state,
        make_plan("--async-save"),
        dataclasses.replace(runtime, stager=dataclasses.replace(plain, begin=begin)),
        tokenizer,
        directory=folder / "checkpoints",
        order=order,
    )
    with pytest.raises(CheckpointError, match="could not save the checkpoint of iteration 4") as of:
        snapshot.write()
    assert of.value.why == "its tensors could not be copied to the host: the device is gone"
    assert [path.name for path in folder.glob("checkpoints/*iter_*")] == ["iter_0000003"]


def test_what_is_copied_later(trained: Any, make_plan: Any, runtime: Any, tokenizer: Any) -> None:
    """Random states are copied at once; of counts of steps the copy has begun.

    Weights and moments are not copied: AdamW's next step writes the new ones to other memory.
    """
    state, order, folder = trained()
    later: list[str] = []

    def begin(tensors: Any) -> PendingCopy:
        later.extend(tensors)
        return PendingCopy({name: one.clone() for name, one in tensors.items()})

    plain = host_copy_stager()
    for flags in ("", "--async-save"):
        copy = take_snapshot(
            state,
            make_plan(flags),
            dataclasses.replace(runtime, stager=dataclasses.replace(plain, begin=begin)),
            tokenizer,
            directory=folder / "checkpoints",
            order=order,
        ).copy
        assert bool(later) is bool(flags)
    names = copy.tensors.keys()
    released = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
    assert names - set(later) == {name for name in names if name.startswith(("rng.", *released))}
    assert all(name.startswith("optimizer.step.") for name in later)
    live = state.tensors()
    for name in names:
        same = name in live and copy.tensors[name].data_ptr() == live[name].data_ptr()
        assert same is name.startswith(released)


@pytest.mark.parametrize("multiple, rows", [(64, 320), (300, 300), (257, 257)])
def test_other_padding(
    trained: Any,
    resume: Any,
    weights: Any,
    caplog: pytest.LogCaptureFixture,
    multiple: int,
    rows: int,
) -> None:
    """Rows of tokens come back, rows of padding begin again or are left out, and a line says so."""
    before, order, folder = trained()
    assert before.parallel.shape.padded_vocab_size == 264
    flags = f"--make-vocab-size-divisible-by {multiple}"
    with caplog.at_level(logging.INFO):
        after, _ = resume(folder, order, flags)
    assert after.iteration == 3
    assert f"padded to {rows} rows, in the checkpoint to 264" in caplog.text
    assert caplog.text.count("; losses do not include them") == 1
    assert "keeps the checkpoint's" not in caplog.text
    wanted, found = weights(before), weights(after)
    fresh, _ = resume(folder, order, f"{flags} --no-load-optim")
    for name, tensor in wanted.items():
        if not name.endswith(".token_embedding.weight") or not tensor.shape:
            assert torch.equal(found[name], tensor), name
            continue
        assert found[name].shape[0] == rows
        assert torch.equal(found[name][:257], tensor[:257])
        if rows > 264:
            assert torch.equal(found[name][:264], tensor)
            new = weights(fresh)[name][264:]
            assert torch.equal(found[name][264:], new)
            assert not new.any(), "rows that only pad the vocabulary begin as zeros"


def test_other_padding_in_the_loss(
    trained: Any, resume: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Losses that include rows of padding change with their number, which is a warning."""
    _, order, folder = trained("--include-padding-in-loss")
    flags = "--include-padding-in-loss --make-vocab-size-divisible-by 64"
    with caplog.at_level(logging.WARNING):
        resume(folder, order, flags)
    assert "losses change, as the softmax includes all rows" in caplog.text
    assert "`--make-vocab-size-divisible-by 264` keeps the checkpoint's" in caplog.text


def test_other_vocabulary(trained: Any, resume: Any) -> None:
    """Another number of tokens is another model; what would keep the rows is named."""
    _, order, folder = trained()
    with pytest.raises(CheckpointError, match="of another model") as caught:
        resume(folder, order, "--vocab-size 260 --make-vocab-size-divisible-by 32")
    assert caught.value.why == "padded_vocab_size: checkpoint 264, model 288"
    assert caught.value.hint == "`--make-vocab-size-divisible-by 264` keeps the checkpoint's"
    with pytest.raises(CheckpointError, match="of another model") as caught:
        resume(folder, order, "--vocab-size 500")
    assert "give the model options" in str(caught.value.hint)


def test_layout_of_random_states(trained: Any) -> None:
    """They belong to processes that do the same; one without a record divided the samples."""
    folder = trained()[2]
    manifest = read_manifest(find_checkpoint(folder))

    def saved(layout: ParallelLayout | None, more: int = 0) -> Any:
        meta = {name: one for name, one in manifest.meta.items() if name != "layout"}
        if layout is not None:
            meta["layout"] = dataclasses.asdict(layout)
        states = {f"rng.rank{rank}.host": manifest.tensors["rng.host"] for rank in range(1, more)}
        return dataclasses.replace(manifest, meta=meta, tensors={**manifest.tensors, **states})

    one, four = ParallelLayout(), ParallelLayout(data=4)
    assert draws_alike(manifest, one)
    assert not draws_alike(manifest, four)
    assert draws_alike(saved(None), one)
    assert draws_alike(saved(None, 4), four)
    assert not draws_alike(saved(None, 4), ParallelLayout(data=2, tensor=2))
    for other in (
        ParallelLayout(data=2, context=2),
        ParallelLayout(tensor=4),
        ParallelLayout(tensor=4, sequence=True),
        ParallelLayout(pipeline=4),
        ParallelLayout(pipeline=4, schedule="gpipe"),
        ParallelLayout(pipeline=2, data=2, stages_per_process=2),
    ):
        assert draws_alike(saved(other), other)
        assert not draws_alike(saved(other), four)
    assert draws_alike(saved(four), ParallelLayout(data=4, zero_stage=3, replicas=2))


def test_random_numbers_of_another_layout(
    trained: Any, resume: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are drawn from seed and step, not loaded, and a line says so."""
    _, order, folder = trained()
    resume(folder, order)
    loaded = torch.rand(5)
    monkeypatch.setattr(
        restoring, "_saved_layout", lambda manifest: ParallelLayout(tensor=2, data=2)
    )
    with caplog.at_level(logging.INFO):
        resume(folder, order)
    anew = torch.rand(5)
    assert "the checkpoint's layout is tensor 2 x data 2" in caplog.text
    resume(folder, order)
    assert torch.equal(torch.rand(5), anew)
    resume(folder, order, "--no-load-rng")
    fresh = torch.rand(5)
    assert not torch.equal(anew, loaded)
    assert not torch.equal(anew, fresh)
