"""One step: accumulation, the rate it uses, and numbers that are not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from step_gradients import StepGradients

from lmcore.data.loading.loader import BatchLoader
from lmcore.families.gpt.family import GPT
from lmcore.train.diagnose.non_finite import (
    NonFiniteError,
    check_weights,
    non_finite,
    non_finite_after_update,
)
from lmcore.train.step import TrainStep
from lmcore.train.token_mean import mean_loss


def loader(plan: Any, corpus: Any, state: Any) -> BatchLoader:
    return BatchLoader(
        corpus.train,
        micro_batch_size=plan.config.training.micro_batch_size,
        consumed_samples=state.consumed_samples,
    )


@pytest.fixture
def one_step(make_plan: Any, make_datasets: Any, make_state: Any, runtime: Any) -> Any:
    """Takes so many steps with these flags; returns state, results and the last gradients."""

    def take(flags: str, steps: int = 1, change: Any = None) -> Any:
        plan = make_plan(flags)
        state = make_state(plan)
        if change is not None:
            change(state)
        step = TrainStep(state, plan, runtime)
        with loader(plan, make_datasets(plan), state) as batches:
            results = [step(batches).result() for _ in range(steps - 1)]
            kept = StepGradients(state)
            results.append(step(batches).result())
        return state, results, kept.of_step()

    return take


@pytest.mark.parametrize("micro", [4, 2, 1])
def test_accumulation(one_step: Any, micro: int) -> None:
    """A global batch of 8 gives one loss, norm and gradient, in however many pieces it is run."""
    whole = one_step("--global-batch-size 8 --micro-batch-size 8 --clip-grad 0")
    parts = one_step(f"--global-batch-size 8 --micro-batch-size {micro} --clip-grad 0")
    assert parts[1][0].loss == pytest.approx(whole[1][0].loss, rel=1e-6)
    assert parts[1][0].grad_norm == pytest.approx(whole[1][0].grad_norm, rel=1e-5)
    for name, gradient in whole[2].items():
        torch.testing.assert_close(parts[2][name], gradient, rtol=1e-4, atol=1e-7)
    assert (
        parts[0].counters()
        == whole[0].counters()
        == {
            "iteration": 1,
            "consumed_samples": 8,
            "consumed_tokens": 8 * 16,
            "scheduled_samples": 8,
            "skipped_iterations": 0,
        }
    )


@pytest.mark.parametrize("micro", [4, 2, 1])
def test_accumulation_sees_the_same_samples(
    make_plan: Any, make_datasets: Any, make_state: Any, micro: int
) -> None:
    """The micro-batches of a step, put together, are the whole batch in the same order."""

    def first_steps(size: int) -> torch.Tensor:
        plan = make_plan(f"--global-batch-size 8 --micro-batch-size {size}")
        with loader(plan, make_datasets(plan), make_state(plan)) as batches:
            return torch.cat([next(batches)["tokens_BS"] for _ in range(24 // size)])

    assert torch.equal(first_steps(micro), first_steps(8))


def test_loss_and_gradients_against_autograd(
    make_plan: Any, make_datasets: Any, make_state: Any, one_step: Any
) -> None:
    """The step's loss and gradients match a plain mean over all tokens of the batch."""
    flags = "--global-batch-size 8 --micro-batch-size 2 --clip-grad 0"
    _, (result,), grads = one_step(flags)
    plan = make_plan(flags)
    state = make_state(plan)
    with loader(plan, make_datasets(plan), state) as batches:
        parts = [next(batches) for _ in range(4)]
    tokens = torch.cat([one["tokens_BS"] for one in parts])
    targets = torch.cat([one["targets_BS"] for one in parts])
    logits = state.model.logits(state.model(tokens))[..., :257]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), targets.flatten())
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in state.model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-7)
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in state.model.parameters()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)


def test_uncounted_tokens(make_plan: Any, make_datasets: Any, make_state: Any) -> None:
    """The loss is the mean over counted tokens; a batch without any has a loss of zero."""
    plan = make_plan("")
    state = make_state(plan)
    with loader(plan, make_datasets(plan), state) as batches:
        batch = next(batches)
    device = torch.device("cpu")
    mask = torch.zeros_like(batch["loss_weight_BS"])
    mask[1, 3:7] = 1.0
    counted = batch | {"loss_weight_BS": mask}
    some = mean_loss(state.model.loss, counted, GPT, device)
    logits = state.model.logits(state.model(batch["tokens_BS"]))[1, 3:7, :257]
    wanted = torch.nn.functional.cross_entropy(logits, batch["targets_BS"][1, 3:7])
    torch.testing.assert_close(some, wanted)
    none = batch | {"loss_weight_BS": torch.zeros_like(mask)}
    assert mean_loss(state.model.loss, none, GPT, device).item() == 0.0


@pytest.mark.parametrize("flags", ["", "--untie-embeddings-and-output-weights"])
def test_rows_that_pad_the_vocabulary_do_not_count(one_step: Any, flags: str) -> None:
    """Loss and gradients are the same for any number of them; their own gradients are zero."""
    flags = f"{flags} --clip-grad 0 --make-vocab-size-divisible-by"
    (_, (none,), exact), (_, (many,), padded) = (one_step(f"{flags} {n}") for n in (1, 100))
    assert many.loss == pytest.approx(none.loss, rel=1e-6)
    assert many.grad_norm == pytest.approx(none.grad_norm, rel=1e-6)
    for name, gradient in exact.items():
        torch.testing.assert_close(padded[name][: len(gradient)], gradient, rtol=1e-5, atol=1e-7)
        assert not padded[name][len(gradient) :].any()


def test_megatrons_loss_counts_rows_that_pad_the_vocabulary(one_step: Any) -> None:
    """With the flag they are in the softmax, and get gradients."""
    flags = "--include-padding-in-loss --make-vocab-size-divisible-by 100"
    state, (found,), grads = one_step(flags)
    assert grads["token_embedding.weight"][257:].any()
    _, (other,), _ = one_step("--make-vocab-size-divisible-by 100")
    assert found.loss > other.loss + 0.1
    assert state.model.token_embedding.weight.shape[0] == 300


def test_clipping(one_step: Any) -> None:
    """The reported norm is the one before clipping; the gradients are scaled to the limit."""
    _, (result,), grads = one_step("--clip-grad 0.25")
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    assert result.grad_norm > 0.25
    assert norm == pytest.approx(0.25, rel=1e-4)


def test_rate_is_the_one_used(one_step: Any, make_plan: Any, make_state: Any) -> None:
    """A step uses and reports the rate of the samples consumed after it: the first is not dead."""
    flags = "--lr 1e-2 --lr-warmup-iters 4 --lr-decay-style constant --weight-decay 0"
    before = make_state(make_plan(flags))
    _, results, _ = one_step(flags, steps=5)
    assert [one.learning_rate for one in results] == pytest.approx(
        [0.0025, 0.005, 0.0075, 0.01, 0.01]
    )
    first, _, _ = one_step(flags, steps=1)
    moved = (first.model.token_embedding.weight - before.model.token_embedding.weight).abs().max()
    # Adam's first step moves a weight by the rate, less what epsilon takes from tiny gradients.
    assert moved.item() == pytest.approx(0.0025, rel=1e-2)


def test_infinite_weight(one_step: Any, make_plan: Any, weights: Any) -> None:
    """A weight of infinity stops the step: loss, place and weight are named, nothing is updated."""
    seen = {}

    def spoil(state: Any) -> None:
        with torch.no_grad():
            state.model.blocks["1"].feed_forward.up.weight[0, 0] = math.inf
        seen["state"], seen["before"] = state, weights(state)

    with pytest.raises(NonFiniteError) as caught:
        one_step("--global-batch-size 8 --micro-batch-size 4", change=spoil)
    error = caught.value
    assert error.exit_status == 1
    assert error.what in {f"the loss is {bad} at step 1, samples 0 to 7" for bad in ("nan", "inf")}
    assert "micro-batch 1 of 2" in str(error.why)
    assert "`blocks.1.feed_forward.up.weight`" in str(error.why)
    assert "`--lr`" in str(error.hint)
    for name, tensor in seen["state"].tensors().items():
        assert torch.equal(tensor, seen["before"][name]), name
    assert seen["state"].iteration == 0


def test_infinite_gradient(one_step: Any, monkeypatch: pytest.MonkeyPatch, runtime: Any) -> None:
    """A finite loss with a gradient of infinity stops as well, and names the parameter."""

    def spoil(state: Any) -> None:
        state.model.final_norm.bias.register_hook(lambda grad: grad * math.inf)

    with pytest.raises(NonFiniteError, match="the gradient norm is") as caught:
        one_step("", change=spoil)
    assert "the loss is finite" in str(caught.value.why)
    assert "`final_norm.bias`" in str(caught.value.why)


def test_later_micro_batch(one_step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The micro-batch at fault is the first one whose loss is not finite."""
    calls = []

    def spoil(state: Any) -> None:
        real = state.model.loss

        def loss(**batch: Any) -> Any:
            calls.append(1)
            return real(**batch) * (math.nan if len(calls) >= 3 else 1.0)

        state.model.loss = loss

    with pytest.raises(NonFiniteError, match="micro-batch 3 of 4"):
        one_step("--global-batch-size 8 --micro-batch-size 2", change=spoil)


@pytest.mark.parametrize("error", [non_finite, non_finite_after_update])
def test_several_losses(make_plan: Any, make_state: Any, error: Any) -> None:
    """Of a family with several losses, a micro-batch has a vector of them."""
    losses = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.inf])]
    found = error(make_state(make_plan("")), 8, losses, math.inf, math.nan)
    assert found.what == "the loss is inf at step 1, samples 0 to 7"
    assert "micro-batch 2 of 2" in found.why


def test_large_weights_are_finite(make_plan: Any, make_state: Any) -> None:
    """Weights whose sum is infinite are finite themselves."""
    state = make_state(make_plan(""))
    with torch.no_grad():
        state.model.token_embedding.weight.fill_(3e38)
        assert math.isinf(state.model.token_embedding.weight.sum())
    check_weights(state)


def test_check_weights(make_plan: Any, make_state: Any) -> None:
    """Weights that are not finite are named, four of them; finite ones pass."""
    state = make_state(make_plan(""))
    check_weights(state)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.view(-1)[-1] = math.nan
    state.iteration = 7
    with pytest.raises(NonFiniteError, match=r"after step 7: `token_embedding\.weight`") as caught:
        check_weights(state)
    assert " and " in caught.value.what
    assert caught.value.what.endswith("more")
