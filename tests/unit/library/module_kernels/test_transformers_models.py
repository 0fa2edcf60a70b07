"""Kernels under models of `transformers`, where that package is installed."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from suite.selection import peer
from torch.nn import functional

from lmcore.base.errors import LmcoreError
from lmcore.library.module_kernels import use_kernels
from lmcore.library.module_kernels.vocabulary_loss import LazyLogits

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

OPS = (
    "attention", "rms_norm", "layer_norm", "bias_gelu", "swiglu", "rotary_embedding",
    "linear_cross_entropy",
)  # fmt: skip
IDS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
LABELS = IDS.masked_fill(torch.arange(12) < 3, -100)
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "vocab_size": 96, "n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 3,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def make(family: str, **options: Any) -> Any:
    """Return a small causal model with random weights, in training mode."""
    transformers = peer("transformers")
    torch.manual_seed(0)
    if family == "GPT2":
        config = transformers.GPT2Config(**GPT2 | options)
        return transformers.GPT2LMHeadModel(config).train()
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def step(model: Any, **inputs: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return loss and gradients."""
    model.zero_grad()
    loss = model(IDS, **{"labels": LABELS, **inputs}).loss
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def assert_near(before: Any, after: Any) -> None:
    """Compare two steps: the losses to 1e-5, gradients relative to the largest of all."""
    torch.testing.assert_close(before[0], after[0], rtol=1e-6, atol=1e-5)
    largest = max(float(grad.abs().max()) for grad in before[1])
    for left, right in zip(before[1], after[1], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6 * largest)


@pytest.mark.parametrize(
    "family, ops",
    [
        ("GPT2", {"bias_gelu": 2, "layer_norm": 5, "attention": 2, "linear_cross_entropy": 1}),
        (
            "Llama",
            {
                "swiglu": 2, "rms_norm": 5, "attention": 2, "rotary_embedding": 4,
                "linear_cross_entropy": 1,
            },
        ),
    ],
)  # fmt: skip
def test_a_step_is_the_models_own(counted_runtime, family, ops):
    """Losses and gradients are near; every kernel is called; `undo` gives the same bits."""
    model, runtime = make(family), counted_runtime(*OPS)
    before, names = step(model), list(model.state_dict())
    config = model.config.to_dict()
    report = use_kernels(model, runtime)
    runtime.calls.clear()
    assert_near(before, step(model))
    assert runtime.calls == ops
    assert not report.own_calls
    assert list(model.state_dict()) == names
    report.undo()
    loss, grads = step(model)
    assert torch.equal(loss, before[0])
    assert all(map(torch.equal, grads, before[1]))
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert runtime.calls == ops


def test_the_cpu_plugins_kernels(counted_runtime):
    """The losses of both families with the kernels of the CPU plugin."""
    kernels = pytest.importorskip("lmcore_cpu.kernels", reason="needs the CPU plugin").KERNELS
    for family in ("GPT2", "Llama"):
        runtime, model = counted_runtime(), make(family)
        runtime.ops.register(kernels)
        before = step(model)
        report = use_kernels(model, runtime, linear=True)
        assert_near(before, step(model))
        kernels_by_part = {row.part: row.kernel for row in report.replaced}
        assert kernels_by_part[f"{family}Attention"] == "blocked"


@pytest.mark.parametrize("autocast", [False, True])
def test_dropout_draws_the_models_own_numbers(counted_runtime, autocast):
    """GPT-2 with its dropout everywhere has the loss of the model's own random numbers."""
    kernels = pytest.importorskip("lmcore_cpu.kernels", reason="needs the CPU plugin").KERNELS
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.3}
    runtime, model = counted_runtime(), make("GPT2", **rates)
    runtime.ops.register(kernels)

    def seeded_step():
        torch.manual_seed(3)
        with torch.autocast("cpu", enabled=autocast):
            return step(model)

    before = seeded_step()
    report = use_kernels(model, runtime)
    after = seeded_step()
    assert {row.part: row.kernel for row in report.replaced}["GPT2Attention"] == "blocked"
    if autocast:
        torch.testing.assert_close(before[0], after[0], rtol=2e-3, atol=2e-3)
    else:
        assert_near(before, after)
    report.undo()
    assert all(map(torch.equal, seeded_step()[1], before[1]))


BERT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4}  # fmt: skip
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0}  # fmt: skip


@pytest.mark.parametrize(
    "name, config, replaced, kept",
    [
        (
            "BertForMaskedLM",
            BERT,
            {"BertSelfAttention"},
            {"loss of BertForMaskedLM": "not the library's `ForCausalLMLoss`"},
        ),
        (
            "T5ForConditionalGeneration",
            T5,
            {"T5LayerNorm", "T5Attention", "loss of T5ForConditionalGeneration"},
            {"T5DenseActDense": "not GELU in its tanh form"},
        ),
    ],
)
def test_other_families(counted_runtime, name, config, replaced, kept):
    """A step of an encoder and of an encoder-decoder is its own, and the report names each part."""
    transformers = pytest.importorskip("transformers", reason="`tox -e peers` installs it")
    kernels = pytest.importorskip("lmcore_cpu.kernels", reason="needs the CPU plugin").KERNELS
    config_class = getattr(transformers, name.partition("For")[0] + "Config")
    torch.manual_seed(0)
    model, runtime = getattr(transformers, name)(config_class(**config)).train(), counted_runtime()
    runtime.ops.register(kernels)

    def loss_and_gradients():
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(IDS, labels=LABELS).loss
        loss.backward()
        grads = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        return loss.detach(), grads

    before = loss_and_gradients()
    report = use_kernels(model, runtime)
    assert_near(before, loss_and_gradients())
    assert {row.part for row in report.replaced} == replaced
    reasons = {row.part: row.reason for row in report.kept}
    assert all(text in reasons[part] for part, text in kept.items())
    if name.startswith("T5"):
        assert report.own_calls == {"attention: with `position_bias`": 6}
    report.undo()
    after = loss_and_gradients()
    assert torch.equal(after[0], before[0])
    assert all(map(torch.equal, after[1], before[1]))


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_pickling_is_refused(counted_runtime, family):
    """With the way out; the weights are saved as ever, and after `undo` the model is."""
    model = make(family)
    before = step(model)
    report = use_kernels(model, counted_runtime(*OPS))
    for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(LmcoreError, match="a model with kernels cannot be pickled") as error:
            save(model)
        assert "state_dict" in error.value.hint
    pickle.dumps(model.state_dict())
    report.undo()
    assert torch.equal(step(pickle.loads(pickle.dumps(model)))[0], before[0])


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_a_compiled_model_is_the_models_own(counted_runtime, family):
    """The compiler gets the modules' own code, without a break of the graph."""
    model, runtime = make(family), counted_runtime(*OPS)
    before = step(model)
    use_kernels(model, runtime)
    runtime.calls.clear()
    torch.compiler.reset()
    loss = torch.compile(model, backend="eager", fullgraph=True)(IDS, labels=LABELS).loss
    torch.testing.assert_close(loss.detach(), before[0], rtol=1e-6, atol=1e-6)
    assert not runtime.calls
    assert_near(before, step(model))
    assert runtime.calls


def test_another_attention_chosen_later(counted_runtime):
    """The user's choice takes the kernel out, and stays at `undo`."""
    model, runtime = make("Llama"), counted_runtime(*OPS)
    before = step(model)
    report = use_kernels(model, runtime)
    model.set_attn_implementation("eager")
    runtime.calls.clear()
    assert_near(before, step(model))
    assert "attention" not in runtime.calls
    report.undo()
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_masked(counted_runtime, family, side):
    """The kernel gets the mask, True for what is hidden."""
    model, runtime = make(family), counted_runtime(*OPS)
    mask = torch.ones_like(IDS)
    mask[0, : 3 if side == "left" else None] = 0
    mask[0, 8:] = int(side == "left")
    labels = LABELS.masked_fill(mask == 0, -100)
    before = step(model, attention_mask=mask, labels=labels)
    report = use_kernels(model, runtime)
    runtime.calls.clear()
    assert_near(before, step(model, attention_mask=mask, labels=labels))
    assert runtime.calls["attention"] == 2
    assert not report.own_calls


def test_a_sliding_window_is_left_to_the_library(counted_runtime):
    """The op has none; the report counts the calls."""
    model, runtime = make("Mistral", sliding_window=4), counted_runtime(*OPS)
    before = step(model)
    report = use_kernels(model, runtime)
    runtime.calls.clear()
    assert_near(before, step(model))
    assert "attention" not in runtime.calls
    assert report.own_calls == {"attention: with `sliding_window`": 2}
    assert "attention: with `sliding_window`" in str(report)


def test_eager_attention_is_kept(counted_runtime):
    """The user asked for it, perhaps for the attention weights."""
    model = make("Llama", attn_implementation="eager")
    report = use_kernels(model, counted_runtime(*OPS))
    reasons = {row.part: row.reason for row in report.kept}
    assert "implementation is `eager`" in reasons["LlamaAttention"]


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_generation(counted_runtime, family):
    """Greedy text is the same, with the cache, padding and several samples."""
    model, runtime = make(family).eval(), counted_runtime(*OPS)
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    before = model.generate(IDS, **options)
    use_kernels(model, runtime)
    runtime.calls.clear()
    assert torch.equal(before, model.generate(IDS, **options))
    assert runtime.calls["attention"] == 2 * 6


def test_gradient_checkpointing(counted_runtime):
    """The recomputed forward pass calls the kernels again."""
    model, runtime = make("Llama"), counted_runtime(*OPS)
    before = step(model)
    model.gradient_checkpointing_enable()
    use_kernels(model, runtime)
    runtime.calls.clear()
    assert_near(before, step(model))
    assert runtime.calls["swiglu"] == 4


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_a_saved_model_is_plain(counted_runtime, family, tmp_path):
    """`save_pretrained` writes the same files, and they load without kernels."""
    model = make(family)
    before = step(model)
    model.save_pretrained(tmp_path / "before")
    use_kernels(model, counted_runtime(*OPS))
    model.save_pretrained(tmp_path / "after")
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "after" / path.name).read_bytes(), path.name
    loaded = type(model).from_pretrained(tmp_path / "after")
    assert torch.equal(step(loaded.train())[0], before[0])


def test_logits_are_right_if_they_are_read(counted_runtime):
    """They are computed once, and gradients flow through them as well."""
    model = make("GPT2")
    plain = model(IDS, labels=LABELS)
    (plain.loss + plain.logits.square().mean()).backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    use_kernels(model, counted_runtime(*OPS))
    model.zero_grad()
    out = model(IDS, labels=LABELS)
    assert isinstance(out.logits, LazyLogits)
    assert out.logits.logits is None
    assert out.logits.shape == (2, 12, 96)
    assert out.logits.dtype == torch.float32
    assert out.logits.logits is None  # shape and dtype need no numbers
    (out.loss + out.logits.square().mean()).backward()
    for left, right in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(left, right.grad, rtol=1e-4, atol=1e-6)
    wanted = plain.logits.detach()
    torch.testing.assert_close(out.logits.detach(), wanted)
    torch.testing.assert_close(out["logits"][:, -1].argmax(-1), wanted[:, -1].argmax(-1))
    torch.testing.assert_close(torch.tensor(out.logits.tolist()), wanted)
    torch.testing.assert_close(torch.from_numpy(out.logits.numpy(force=True)), wanted)
    torch.testing.assert_close(out.to_tuple()[1].detach(), wanted)
    torch.testing.assert_close(pickle.loads(pickle.dumps(out.logits.detach())), wanted)
    assert "tensor(" in repr(out.logits)
    own = functional.cross_entropy(out.logits[:, :-1].reshape(-1, 96), LABELS[:, 1:].reshape(-1))
    torch.testing.assert_close(own, out.loss)


def test_logits_after_a_change_of_the_weights_are_refused(counted_runtime):
    """They would be wrong; logits that were read before stay."""
    model = make("GPT2")
    use_kernels(model, counted_runtime(*OPS))
    read, unread = model(IDS, labels=LABELS), model(IDS, labels=LABELS)
    wanted = read.logits.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert torch.equal(read.logits.detach(), wanted)
    with pytest.raises(RuntimeError, match="the weights have changed since"):
        unread.logits.sum()
    model.lm_head.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="the weights were freed since"):
        unread.logits.sum()


def test_without_labels_or_training_logits_are_plain(counted_runtime):
    """Somebody will read them, or wants no gradient."""
    model = make("GPT2")
    use_kernels(model, counted_runtime(*OPS))
    assert type(model(IDS).logits) is torch.Tensor
    with torch.no_grad():
        assert type(model(IDS, labels=LABELS).logits) is torch.Tensor
    assert type(model.eval()(IDS, labels=LABELS).logits) is torch.Tensor


def test_the_fused_loss_can_be_left_out(counted_runtime):
    """With `fused_loss=False` the logits are always plain."""
    model = make("GPT2")
    report = use_kernels(model, counted_runtime(*OPS), fused_loss=False)
    assert type(model(IDS, labels=LABELS).logits) is torch.Tensor
    assert ("loss of GPT2LMHeadModel", "`fused_loss=False`") in [
        (row.part, row.reason) for row in report.kept
    ]


@pytest.mark.parametrize("items", [None, 40, torch.tensor(40)])
def test_the_loss_has_the_librarys_arguments(counted_runtime, items):
    """The number of items over accumulated batches, and labels that are shifted already."""
    options = {} if items is None else {"num_items_in_batch": items}
    shifted = functional.pad(LABELS, (0, 1), value=-100)[:, 1:].contiguous()
    model = make("Llama")
    cases = [
        options,
        {**options, "shift_labels": shifted},
        {**options, "labels": IDS, "ignore_index": int(IDS[0, 3])},
    ]
    before = [step(model, **case) for case in cases]
    use_kernels(model, counted_runtime(*OPS))
    for case, expected in zip(cases, before, strict=True):
        assert_near(expected, step(model, **case))


def test_labels_that_are_all_ignored(counted_runtime):
    """The mean over no token is NaN, as in the library, and its gradients are 0."""
    model = make("Llama")
    for fused in (False, True):
        if fused:
            use_kernels(model, counted_runtime(*OPS))
        loss = model(IDS, labels=torch.full_like(IDS, -100)).loss
        assert loss.isnan()
        loss.backward()
        assert not any(each.grad.any() for each in model.parameters() if each.grad is not None)


def test_a_model_that_changes_its_logits(counted_runtime):
    """Gemma 2 caps them: the loss is of the capped logits, and the report says so."""
    model = make("Gemma2", head_dim=8)
    before = step(model)
    report = use_kernels(model, counted_runtime(*OPS))
    assert_near(before, step(model))
    assert report.own_calls["loss: the model changes the logits before the loss"] == 1


def test_a_copy_computes_with_its_own_weights(counted_runtime):
    """A copy of a model with kernels, as an average of weights needs it."""
    model = make("Llama")
    report = use_kernels(model, counted_runtime(*OPS))
    other = copy.deepcopy(model)
    before = step(other)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert float(before[0]) != float(step(model)[0])
    report.undo()
    assert_near(before, step(other))


def test_two_models_of_a_class_are_apart(counted_runtime):
    """Kernels in the one are not in others, also if they are made from the same configuration."""
    first, runtime = make("Llama"), counted_runtime(*OPS)
    config = first.config
    second = type(first)(config).train()
    use_kernels(first, runtime)
    third = type(first)(config).train()
    runtime.calls.clear()
    step(second)
    step(third)
    assert not runtime.calls
    report = use_kernels(third, runtime)
    assert "LlamaAttention" in {row.part for row in report.replaced}


def test_another_dtype(counted_runtime):
    """After a move to bfloat16 the model computes in it."""
    model = make("Llama").bfloat16()
    before = model(IDS, labels=LABELS).loss
    model = make("Llama")
    use_kernels(model, counted_runtime(*OPS))
    after = model.bfloat16()(IDS, labels=LABELS).loss
    torch.testing.assert_close(before.float(), after.float(), rtol=2e-2, atol=2e-2)


def test_autocast(counted_runtime):
    """Under autocast loss and gradients are near its own."""
    model = make("Llama")
    with torch.autocast("cpu", torch.bfloat16):
        before = model(IDS, labels=LABELS)
        use_kernels(model, counted_runtime(*OPS))
        after = model(IDS, labels=LABELS)
    assert before.logits.dtype == after.logits.dtype
    torch.testing.assert_close(before.loss, after.loss, rtol=2e-2, atol=2e-2)
    after.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_head_in_another_dtype(counted_runtime):
    """Its loss is the library's, and the report names the dtypes."""
    model, runtime = make("Llama"), counted_runtime(*OPS)
    report = use_kernels(model, runtime)
    model.lm_head.bfloat16()
    runtime.calls.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(IDS, labels=LABELS).loss.isfinite()
    assert not runtime.calls["linear_cross_entropy"]
    assert report.own_calls["loss: torch.float32 and a weight in torch.bfloat16"] == 1


def test_a_model_without_a_vocabulary_head(counted_runtime):
    """The body alone has no loss."""
    model = make("Llama").model
    before = model(IDS).last_hidden_state
    report = use_kernels(model, counted_runtime(*OPS))
    assert "linear_cross_entropy" not in {row.op for row in report.replaced}
    torch.testing.assert_close(before, model(IDS).last_hidden_state, rtol=1e-4, atol=1e-5)


def test_a_model_within_a_module(counted_runtime):
    """The model of a user's own class that holds one of `transformers` gets all kernels."""

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make("Llama")

        def forward(self, *args: Any, **options: Any) -> Any:
            return self.inner(*args, **options)

    model, runtime = Wrapper(), counted_runtime(*OPS)
    before = step(model)
    report = use_kernels(model, runtime)
    assert {row.op for row in report.replaced} == {
        "swiglu", "rms_norm", "attention", "rotary_embedding", "linear_cross_entropy",
    }  # fmt: skip
    assert_near(before, step(model))
    report.undo()
    assert torch.equal(step(model)[0], before[0])


def test_the_model_is_freed(counted_runtime):
    """Neither the registry nor the report's functions keep it in memory."""
    model = make("Llama")
    head = weakref.ref(model.lm_head)
    report = use_kernels(model, counted_runtime(*OPS))
    report.undo()
    del model, report
    gc.collect()
    assert head() is None
