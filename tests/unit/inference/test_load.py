"""A trained model comes back from its run directory, or is refused before memory is taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcore.base.errors import CheckpointError, ConfigError, DataError, RunError
from lmcore.checkpoint import find_checkpoint, read_manifest, save_checkpoint
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.data.tokenizer.bpe_files import byte_alphabet
from lmcore.families.build import op_binding
from lmcore.families.gpt.model import GPT
from lmcore.inference.load import LoadedModel, load_model, load_weights
from lmcore.model.shape import ModelShape
from lmcore.runtime.runtime import Runtime

VALUES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "ffn_hidden_size": 40,
    "max_position_embeddings": 32,
    "padded_vocab_size": 384,
    "layernorm_epsilon": 1e-5,
    "init_method_std": 0.3,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def saved_again(
    run_directory: Path, runtime: Runtime, *, shape: dict[str, Any] | None = None, **tensors: Any
) -> Path:
    """Save a checkpoint like the run's with another shape or other tensors (None: without it)."""
    saved = find_checkpoint(run_directory)
    model = load_weights(saved, read_manifest(saved), runtime)
    values = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    values |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in values.items() if tensor is not None}
    target = run_directory / "again"
    save_checkpoint(target, 1, kept, {}, model_shape=shape or VALUES)
    return target


class TestLoad:
    """Loaded models and tokenizers."""

    def test_weights_larger_than_the_memory(
        self, run_directory: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A model is refused if the host has a byte less than its weights."""
        expected = GPT(ModelShape(**VALUES), op_binding(runtime))
        size = 4 * sum(one.numel() for one in expected.parameters())
        monkeypatch.setattr("lmcore.inference.load.memory_of_process", lambda _device: size)
        load_model(run_directory, runtime)
        monkeypatch.setattr("lmcore.inference.load.memory_of_process", lambda _device: size - 1)
        with pytest.raises(RunError, match="does not fit in the memory of this host"):
            load_model(run_directory, runtime)

    @pytest.mark.parametrize("inside", [".", "checkpoints", "checkpoints/iter_0000005"])
    def test_weights(self, run_directory: Path, runtime: Runtime, inside: str) -> None:
        """A run directory, its checkpoints and one iteration give the weights bit for bit."""
        loaded = load_model(run_directory / inside, runtime)
        expected = GPT(loaded.model.shape, op_binding(runtime), masked=True)
        expected.initialize(7)
        saved = find_checkpoint(run_directory / inside)
        weights = load_weights(saved, read_manifest(saved), runtime)
        for name, parameter in expected.named_parameters():
            assert parameter.equal(weights.get_parameter(name)), name
        tokens_BS = torch.arange(10).view(2, 5)
        with torch.inference_mode():
            logits_BSV = loaded.model.logits(loaded.model(tokens_BS))
            expected_BSV = expected.eval().logits(expected(tokens_BS))
        torch.testing.assert_close(logits_BSV, expected_BSV, rtol=1e-4, atol=1e-4)
        assert isinstance(loaded, LoadedModel)
        assert isinstance(loaded.model, GPT)
        assert not loaded.model.training
        assert loaded.num_parameters == expected.parameter_count()
        assert loaded.tokenizer.name == "ByteTokenizer"
        assert loaded.checkpoint.name == "iter_0000005"

    def test_relative_path(
        self, run_directory: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An iteration named from inside `checkpoints` still finds the run's tokenizer."""
        target = saved_again(run_directory, runtime)
        monkeypatch.chdir(target)
        loaded = load_model(Path("iter_0000001"), runtime)
        assert loaded.tokenizer.name == "ByteTokenizer"

    def test_bundled_tokenizer_needs_no_directory(
        self, run_directory: Path, runtime: Runtime, tmp_path: Path
    ) -> None:
        """A copied iteration whose tokenizer needs no files loads alone."""
        source = find_checkpoint(run_directory)
        shutil.copytree(source, tmp_path / "elsewhere" / "x" / source.name)
        loaded = load_model(tmp_path / "elsewhere" / "x" / source.name, runtime)
        assert loaded.tokenizer.name == "ByteTokenizer"

    def test_tokenizer_can_be_named(self, run_directory: Path, runtime: Runtime) -> None:
        """A tokenizer that is named is taken where it is the one of the run."""
        shutil.rmtree(run_directory / "tokenizer")
        choice = TokenizerSettings("ByteTokenizer")
        assert load_model(run_directory, runtime, choice=choice).tokenizer.name == "ByteTokenizer"


class TestRefused:
    """Errors name what does not fit."""

    def test_nothing_there(self, tmp_path: Path, runtime: Runtime) -> None:
        """A directory without a checkpoint is an error."""
        with pytest.raises(CheckpointError, match="no checkpoint in"):
            load_model(tmp_path, runtime)

    def test_other_tokenizer(self, run_directory: Path, runtime: Runtime) -> None:
        """A tokenizer that the run was not trained with is refused."""
        with pytest.raises(ConfigError, match="is not the tokenizer of"):
            load_model(
                run_directory, runtime, choice=TokenizerSettings("NullTokenizer", vocab_size=9)
            )

    def test_exchanged_tokenizer(self, run_directory: Path, runtime: Runtime) -> None:
        """A run whose tokenizer directory is another run's is refused."""
        record = run_directory / "tokenizer" / "tokenizer.json"
        values = json.loads(record.read_text(encoding="utf-8"))
        values["type"] = "NullTokenizer"
        values["vocab_size"] = 256
        record.write_text(json.dumps(values), encoding="utf-8")
        with pytest.raises(DataError, match="is not the one that was saved"):
            load_model(run_directory, runtime)

    def test_no_tokenizer(self, run_directory: Path, runtime: Runtime) -> None:
        """A checkpoint that says nothing of a tokenizer asks for one."""
        target = saved_again(run_directory, runtime)
        shutil.rmtree(run_directory / "tokenizer")
        with pytest.raises(ConfigError, match="has no tokenizer"):
            load_model(target, runtime)
        with pytest.raises(ConfigError, match="does not record its tokenizer"):
            load_model(target, runtime, choice=TokenizerSettings(vocab_file="vocab.json"))

    def test_too_large_a_vocabulary(
        self, run_directory: Path, runtime: Runtime, tmp_path: Path
    ) -> None:
        """A tokenizer with more ids than the model has rows is refused."""
        target = saved_again(run_directory, runtime)
        tokens = [*byte_alphabet(), *(f"<{i}>" for i in range(200))]
        vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
        vocab.write_text(json.dumps({t: i for i, t in enumerate(tokens)}), encoding="utf-8")
        merges.write_text("", encoding="utf-8")
        choice = TokenizerSettings("GPT2BPETokenizer", str(vocab), str(merges))
        with pytest.raises(ConfigError, match="has 456 ids; the model"):
            load_model(target, runtime, choice=choice)

    @pytest.mark.parametrize(
        "tensors,expected",
        [
            ({"model__final_norm__bias": None}, "the checkpoint lacks it"),
            ({"model__final_norm__bias": torch.zeros(25)}, r"the checkpoint has \[25\]"),
            ({"model__extra": torch.zeros(3)}, "`model.extra` does not belong"),
        ],
    )
    def test_other_tensors(
        self, run_directory: Path, runtime: Runtime, tensors: dict[str, Any], expected: str
    ) -> None:
        """A weight that is missing, of another shape or unknown is named."""
        target = saved_again(run_directory, runtime, **tensors)
        with pytest.raises(CheckpointError, match="do not fit its shape") as caught:
            load_model(target, runtime)
        assert caught.match(expected)

    def test_huge_shape_takes_no_memory(self, run_directory: Path, runtime: Runtime) -> None:
        """A shape of many terabytes that its tensors do not have is refused at once."""
        shape = VALUES | {"hidden_size": 2**21, "num_attention_heads": 2, "ffn_hidden_size": 2**23}
        target = saved_again(run_directory, runtime, shape=shape)
        with pytest.raises(CheckpointError, match="do not fit its shape"):
            load_model(target, runtime)

    def test_altered_weights(self, run_directory: Path, runtime: Runtime) -> None:
        """One changed byte of the weights is noticed."""
        (file,) = find_checkpoint(run_directory).glob("*.distcp")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="is damaged"):
            load_model(run_directory, runtime)

    def test_damaged_newest(
        self, run_directory: Path, runtime: Runtime, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The older checkpoint is taken, with a warning that names the damaged one."""
        older = find_checkpoint(run_directory)
        shutil.copytree(older, older.with_name("iter_9999999"))
        with caplog.at_level("WARNING", logger="lmcore"):
            assert load_model(run_directory, runtime).checkpoint == older
        assert "`iter_9999999`" in caplog.text
        assert "passed over" in caplog.text


def test_another_kind_of_model(run_directory: Path, runtime: Runtime) -> None:
    """A Llama is built from its manifest."""
    saved = ModelShape(
        **{**VALUES, "num_attention_heads": 5},
        head_dim=6,
        num_query_groups=1,
        normalization="RMSNorm",
        swiglu=True,
        position_embedding_type="rope",
        rotary_percent=0.7,
        rotary_base=500,
        rope_scaling_factor=4.0,
        untie_embeddings_and_output_weights=True,
        add_bias_linear=False,
        add_qkv_bias=True,
    )
    model = GPT(saved, op_binding(runtime))
    model.initialize(3)
    tensors = {f"model.{name}": one.detach() for name, one in model.named_parameters()}
    described = {"describe": ByteTokenizer().describe()}
    save_checkpoint(
        run_directory / "llama" / "checkpoints",
        1,
        tensors,
        {"tokenizer": described},
        model_shape=saved.to_dict(),
    )
    loaded = load_model(run_directory / "llama", runtime).model
    assert loaded.shape == saved
    tokens = torch.tensor([[5, 3, 200, 7]])
    with torch.no_grad():
        # Some libraries round in another way where a weight has another address.
        torch.testing.assert_close(loaded(tokens), model.eval()(tokens), rtol=1e-4, atol=1e-5)


def test_manifest_of_the_fixture(run_directory: Path) -> None:
    """The run that these tests load is of the shape that they expect."""
    manifest = read_manifest(find_checkpoint(run_directory))
    assert dict(manifest.model_shape) == VALUES
    assert manifest.meta["tokenizer"]["describe"] == ByteTokenizer().describe()
