"""Tests of `lmcore checkpoint convert`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_models import T5, MemoryState
from model_states import GPT2, RandomState, same_state

from lmcore.cli.checkpoint.convert import _format_names
from lmcore.cli.main import main
from lmcore.conversion.huggingface.read import HuggingFaceState
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.state import ADAM, WEIGHT, Progress, TokenizerNote, notes_beside
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.model.checkpoint_format import formats


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    state = RandomState(GPT2)
    state.vocab_size = 257
    write_huggingface(state, directory, ByteTokenizer())
    return directory


def test_a_downloaded_model_generates(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Directly and after its conversion, with the same text."""
    run = tmp_path / "run"
    assert main(["checkpoint", "convert", str(model), str(run), "--to", "lmcore"]) == 0
    printed = capsys.readouterr().out
    assert f"next: lmcore generate --load {run}" in printed
    texts = []
    for directory in (model, run):
        command = ["generate", "--load", str(directory), "--prompt", "ab", "--greedy"]
        assert main([*command, "--tokens", "12", "--device", "cpu", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_weights_only(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The state of the optimizer is left out, and the printed line says so."""
    trained, run = tmp_path / "trained", tmp_path / "weights"
    command = ["train", "--load", str(model), "--train-iters", "1", "--seq-length", "8"]
    sizes = ["--micro-batch-size", "1", "--global-batch-size", "1", "--eval-iters", "0"]
    assert main([*command, *sizes, "--device", "cpu", "--save", str(trained)]) == 0
    assert LmcoreState(trained).kinds == (WEIGHT, *ADAM)
    command = ["checkpoint", "convert", str(trained), str(run), "--to", "lmcore", "--json"]
    assert main([*command, "--weights-only"]) == 0
    assert LmcoreState(run).kinds == (WEIGHT,)
    same_state(LmcoreState(run), LmcoreState(trained))


def test_the_next_command_of_a_run_without_a_tokenizer_names_its_option(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()
    run = tmp_path / "run"
    assert main(["checkpoint", "convert", str(model), str(run), "--to", "lmcore"]) == 0
    expected = f"next: lmcore generate --load {run} --tokenizer-type TYPE --prompt TEXT"
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    "recorded, flags",
    [
        ("GPT2BPETokenizer", "GPT2BPETokenizer --vocab-file FILE --merge-file FILE"),
        ("Llama2Tokenizer", "Llama2Tokenizer --tokenizer-model FILE"),
        ("HFTokenizer", "HFTokenizer --tokenizer-name-or-path PATH"),
        ("NullTokenizer", "NullTokenizer --vocab-size N"),
        ("TikTokenizer", "TYPE"),
    ],
)
def test_the_next_commands_name_the_recorded_tokenizer(
    recorded: str, flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the options that its type needs; a run whose steps are all done needs more of them."""
    state = RandomState(GPT2, (WEIGHT, *ADAM))
    for name in state.parameters:
        state.tensors[name, "exp_avg_sq"].abs_()
    state.tokenizer_type, state.settings = recorded, {"train_iters": 7}
    state.progress = Progress(7, 56, 7)
    write_megatron(state, tmp_path / "meg", None)
    run = tmp_path / "run"
    assert main(["checkpoint", "convert", str(tmp_path / "meg"), str(run), "--to", "lmcore"]) == 0
    printed = capsys.readouterr().out
    assert f"next: lmcore generate --load {run} --tokenizer-type {flags} --prompt TEXT" in printed
    assert f"      lmcore train --continue {run} --tokenizer-type {flags} " in printed
    assert " --train-iters N --data-path PREFIX\n      (data of `lmcore data prepare`" in printed


def test_the_next_command_of_a_t5_names_its_sentinels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `--vocab-extra-ids` its prompts would have none."""
    state = MemoryState(T5, vocab_size=20)
    state.tokenizer_type = "SentencePieceTokenizer"
    write_megatron(state, tmp_path / "meg", None)
    run = tmp_path / "run"
    assert main(["checkpoint", "convert", str(tmp_path / "meg"), str(run), "--to", "lmcore"]) == 0
    flags = "--tokenizer-type SentencePieceTokenizer --tokenizer-model FILE --vocab-extra-ids N"
    printed = capsys.readouterr().out
    assert f"next: lmcore generate --load {run} {flags} --prompt TEXT" in printed
    assert main(["generate", "--load", str(run), "--prompt", "a"]) == 2
    assert "its files, `--vocab-extra-ids N` for its sentinels" in capsys.readouterr().err


def test_json_and_errors(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["checkpoint", "convert", str(model), str(tmp_path / "out")]
    assert main([*command, "--to", "huggingface", "--dtype", "bfloat16", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["source"], record["target"]) == ("Hugging Face", "Hugging Face")
    assert main([*command, "--to", "lmcore"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*command, "--to", "lmcore", "--dtype", "float16"]) == 2
    assert "keeps weights in float32" in capsys.readouterr().err
    assert main([*command, "--to", "onnx"]) == 2
    assert "`huggingface`" in capsys.readouterr().err
    assert main(["checkpoint", "convret"]) == 2
    assert "convert" in capsys.readouterr().err
    assert main(["checkpoint"]) == 0
    assert "convert" in capsys.readouterr().out


def test_a_run_goes_to_megatron_and_back(model: Path, tmp_path: Path) -> None:
    """Through a layout of several ranks, with the same weights; a wrong layout is a usage error."""
    there, back = tmp_path / "megatron", tmp_path / "back"
    command = ["checkpoint", "convert", str(model), str(there), "--to", "megatron"]
    assert main([*command, "--tensor-model-parallel-size", "2"]) == 2
    stages = ["--pipeline-model-parallel-size", "2"]
    assert main([*command, *stages, "--megatron-names", "legacy"]) == 0
    assert len(list(there.glob("release/mp_rank_00_00*/model_optim_rng.pt"))) == 2
    assert main(["checkpoint", "convert", str(there), str(back), "--to", "huggingface"]) == 0
    same_state(HuggingFaceState(back), HuggingFaceState(model))


def test_options_of_another_format(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["checkpoint", "convert", str(model), str(tmp_path / "out"), "--to"]
    for words in (
        ["huggingface", "--tensor-model-parallel-size", "2"],
        ["huggingface", "--megatron-names", "core"],
        ["megatron", "--max-file-size-gb", "1"],
    ):
        assert main([*command, *words]) == 2
        assert f"`{words[1]}` has no effect with `--to {words[0]}`" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["checkpoint", "convert", str(model), "--to", "lmcore"]) == 2
    assert "missing argument `target`" in capsys.readouterr().err


def test_without_a_tokenizer(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A note says that there is none; another program's name of one is no news beside a choice."""
    (model / "tokenizer.json").unlink()
    command = ["checkpoint", "convert", str(model)]
    assert main([*command, str(tmp_path / "hf"), "--to", "huggingface"]) == 0
    assert "no tokenizer files are written" in capsys.readouterr().out
    notes = [TokenizerNote("its tokenizer, `X`, is not part of the checkpoint"), "other"]
    assert notes_beside(notes, None) == notes
    assert notes_beside(notes, ByteTokenizer()) == ["other"]


def test_more_tokens_than_rows(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A `<pad>` that was added to the tokenizer alone is refused."""
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 257, "content": "<pad>"})
    path.write_text(json.dumps(content))
    command = ["checkpoint", "convert", str(model), str(tmp_path / "out"), "--to", "lmcore"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "has 258 ids; the model" in said
    assert "`model.resize_token_embeddings(258)`" in said


def test_flags_of_the_conversion_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A published command of `checkpoint_util.py` divides Megatron's files, another joins them.

    One line names the directories; the files have the layout of the flags, and equal weights.
    """
    one, two, back = tmp_path / "one", tmp_path / "two", tmp_path / "back"
    state = RandomState(replace(GPT2, num_attention_heads=4, num_query_groups=4, head_dim=6))
    write_megatron(state, one, None)
    tool = ["--model-type", "GPT", "--loader", "megatron", "--saver", "megatron"]
    tool += ["--load-dir", str(one), "--save-dir", str(two), "--megatron-path", "/none"]
    tool += ["--target-tensor-parallel-size", "2", "--target_pipeline_parallel_size=2"]
    assert main(["checkpoint", "convert", *tool]) == 0
    err = capsys.readouterr().err
    assert err.count(f"`--load-dir {one}` -> SOURCE, `--save-dir {two}` -> TARGET") == 1
    assert "warning" not in err
    ranks = sorted(path.parent.name for path in two.glob("*/mp_rank_*/*.pt"))
    assert ranks == [f"mp_rank_0{tensor}_00{stage}" for tensor in (0, 1) for stage in (0, 1)]
    assert main(["checkpoint", "convert", "--load-dir", str(two), "--save-dir", str(back)]) == 0
    assert [path.parent.name for path in back.glob("*/mp_rank_*/*.pt")] == ["mp_rank_00"]
    run = tmp_path / "run"
    assert main(["checkpoint", "convert", str(back), str(run), "--to", "lmcore"]) == 0
    same_state(LmcoreState(run), state)


def test_the_help_does_not_depend_on_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the package of a plugin's format also where the plugin is here."""
    monkeypatch.setitem(formats(), "megatron-deepspeed", formats()["megatron"])
    assert "megatron-deepspeed (of `lmcore-deepspeed`)" in _format_names()
    assert "megatron-deepspeed" not in _format_names()
