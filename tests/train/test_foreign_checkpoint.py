"""Runs that start from another program's checkpoint: the model of its files, in any layout."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_plugin import with_deepspeed
from model_states import GPT2, LLAMA, SHAPES, RandomState

from lmcore.cli.main import main
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.conversion.convert import convert
from lmcore.conversion.formats import WriteOptions, read_state
from lmcore.conversion.huggingface.tokenizer_files import tokenizer_settings
from lmcore.conversion.huggingface.write import write_huggingface
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.native.write import write_lmcore
from lmcore.conversion.state import ADAM, WEIGHT
from lmcore.data.prepare.plain_text import prepare_text
from lmcore.data.tokenizer import ByteTokenizer, GPT2BPETokenizer, Tokenizer, tokenizer_from
from lmcore.data.tokenizer.bpe_files import byte_alphabet

OTHERS = ("megatron-dist", "megatron-deepspeed")
RUN = (
    "--train-iters 2 --global-batch-size 4 --micro-batch-size 2 --num-threads 1 --eval-iters 0"
    " --sample-tokens 0 --log-interval 1 --cpu-peak-seconds 0 --device cpu --lr 1e-3"
)


@pytest.fixture(autouse=True)
def _deepspeed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Adds the format of its plugin."""
    with with_deepspeed(tmp_path_factory, monkeypatch):
        yield


@pytest.fixture(params=[GPT2, LLAMA], ids=["gpt2", "llama"])
def state(request: pytest.FixtureRequest) -> RandomState:
    """Return a model with random weights and the tokens of bytes."""
    found = RandomState(request.param)
    found.vocab_size = 257
    return found


@pytest.fixture
def model(tmp_path: Path, state: RandomState) -> Path:
    """Return a Hugging Face directory of the model."""
    directory = tmp_path / "model"
    directory.mkdir()
    write_huggingface(state, directory, ByteTokenizer())
    return directory


@pytest.fixture
def data(tmp_path: Path, model: Path) -> str:
    """Return the prefix of a dataset of the model's tokens."""
    text = tmp_path / "text.txt"
    text.write_text("Now is the winter of our discontent made glorious summer. " * 40)
    settings = tokenizer_settings(model)
    assert settings is not None
    prepare_text(text, tokenizer_from(settings), tmp_path / "text", document_characters=256)
    return str(tmp_path / "text_text_document")


def losses(directory: Path) -> list[float]:
    rows = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def test_the_run_begins_with_its_weights_in_any_layout(
    tmp_path: Path, model: Path, data: str, state: RandomState
) -> None:
    """The shape and the tokenizer are the checkpoint's; on two ranks the losses are the same."""
    command = ["train", "--load", str(model), "--data-path", data, *RUN.split()]
    found = []
    padded = "--make-vocab-size-divisible-by"
    divided = f"--zero-stage 3 {padded} 4"
    if state.shape == LLAMA:
        divided = f"--tensor-model-parallel-size 2 {padded} 2"
    for name, flags in (("one", f"{padded} 4"), ("two", f"--nproc-per-node 2 {divided}")):
        assert main([*command, *flags.split(), "--save", str(tmp_path / name)]) == 0
        found.append(torch.tensor(losses(tmp_path / name)))
        trained = LmcoreState(tmp_path / name)
        assert trained.vocab_size == 257
        for parameter in state.parameters:
            before, after = state.read(parameter), trained.read(parameter)
            rows = min(len(before), len(after), 257)
            changed = (after[:rows] - before[:rows]).abs().max()
            assert changed < 0.01, parameter  # two steps of Adam
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=0)


@pytest.mark.parametrize("to", ["huggingface", "megatron"])
@pytest.mark.parametrize("name", ["gpt2", "gpt2 untied", "llama", "llama tied, biases"])
def test_a_head_that_is_tied_or_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, to: str
) -> None:
    """A converted model generates the same tokens, and a run that begins with it has its loss."""
    own = RandomState(SHAPES[name])
    own.vocab_size = 257
    data = prepared(tmp_path, ByteTokenizer())
    write_lmcore(own, tmp_path / "run", ByteTokenizer())
    convert(tmp_path / "run", tmp_path / "converted", to)
    made = read_state(tmp_path / "converted")
    assert (made.shape.tied, "output_embedding.weight" in made.parameters) == (
        own.shape.tied,
        not own.shape.tied,
    )
    found = []
    for place in ("run", "converted"):
        load = ["--load", str(tmp_path / place), "--device", "cpu"]
        tokens = [
            "--tokenizer-type",
            "ByteTokenizer",
            "--greedy",
            "--tokens",
            "6",
            "--logprobs",
            "1",
        ]
        assert main(["generate", *load, *tokens, "--prompt", "Now is", "--json"]) == 0
        sample = json.loads(capsys.readouterr().out)
        flags = ["--use-checkpoint-args", "--finetune", "--tokenizer-type", "ByteTokenizer"]
        save = ["--save", str(tmp_path / f"from-{place}"), "--data-path", data]
        assert main(["train", *load, *flags, *RUN.split(), *save]) == 0
        capsys.readouterr()
        found.append((sample, losses(tmp_path / f"from-{place}")))
    (own_sample, own_losses), (sample, begun) = found
    assert sample["tokens"] == own_sample["tokens"]
    logprobs = [[one["logprob"] for one in each["logprobs"]] for each in (sample, own_sample)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert begun == pytest.approx(own_losses, rel=1e-5)


def prepared(tmp_path: Path, tokenizer: Tokenizer) -> str:
    """Return the prefix of a dataset of a tokenizer."""
    text = tmp_path / "text.txt"
    text.write_text("Now is the winter of our discontent. " * 40)
    prepare_text(text, tokenizer, tmp_path / "text", document_characters=256)
    return str(tmp_path / "text_text_document")


def test_data_of_another_tokenizer(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An equal number of ids, for other bytes, is an error that names the options to accept it."""
    vocabulary = {letter: 255 - byte for byte, letter in enumerate(byte_alphabet())}
    files = [str(tmp_path / name) for name in ("vocab.json", "merges.txt")]
    Path(files[0]).write_text(json.dumps({**vocabulary, "<|endoftext|>": 256}))
    Path(files[1]).write_text("#version: 0.2\n")
    data = prepared(tmp_path, GPT2BPETokenizer(*files))
    command = ["train", "--load", str(model), "--data-path", data, *RUN.split()]
    save = ["--save", str(tmp_path / "run")]
    assert main([*command, *save]) == 2
    said = capsys.readouterr().err
    assert "was not prepared with the checkpoint's tokenizer" in said
    named = f"--tokenizer-type GPT2BPETokenizer --vocab-file {files[0]} --merge-file {files[1]}"
    assert f"`{named} --change-tokenizer`" in said
    assert main([*command, *named.split(), *save]) == 2
    said = capsys.readouterr().err
    assert "the tokenizer is not the checkpoint's" in said
    assert "`HuggingFaceTokenizer`" in said
    assert not (tmp_path / "run/checkpoints").exists()
    assert main([*command, *named.split(), "--change-tokenizer", *save]) == 0


def test_data_of_another_type_of_the_same_tokenizer(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each id has the same token: the run takes the data, by either name of the tokenizer."""
    data = prepared(tmp_path, ByteTokenizer())
    command = ["train", "--load", str(model), "--data-path", data, *RUN.split()]
    assert main([*command, "--save", str(tmp_path / "run")]) == 0
    assert "`ByteTokenizer`, whose ids have the same tokens" in capsys.readouterr().err
    assert (tmp_path / "run/tokenizer/pretrained/tokenizer.json").is_file()
    other = ["--tokenizer-type", "ByteTokenizer", "--save", str(tmp_path / "other")]
    assert main([*command, *other]) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "other")


def test_another_shape_is_named(
    tmp_path: Path, model: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--load", str(model), "--data-path", data, *RUN.split()]
    assert main([*command, "--num-layers", "3", "--save", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "num_layers: checkpoint 2, model 3" in said
    assert "hint: leave out the options of the model" in said


def test_more_rows_than_tokens(tmp_path: Path, data: str, state: RandomState) -> None:
    """Rows that the tokenizer has no tokens for are weights too, and are padded for a layout."""
    state.vocab_size = 259
    wide = tmp_path / "wide"
    wide.mkdir()
    write_huggingface(state, wide, ByteTokenizer())
    still = RUN.replace("--lr 1e-3", "--lr 1e-9")
    command = ["train", "--load", str(wide), "--data-path", data, *still.split()]
    for name, divisor, rows in (("same", "1", 259), ("padded", "4", 260)):
        flags = ["--make-vocab-size-divisible-by", divisor, "--save", str(tmp_path / name)]
        assert main([*command, *flags]) == 0
        trained = LmcoreState(tmp_path / name)
        found = trained.read("token_embedding.weight")
        assert (trained.vocab_size, len(found)) == (259, rows)
        torch.testing.assert_close(found[:259], state.read("token_embedding.weight")[:259])


def test_settings_that_contradict_it(
    tmp_path: Path, model: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written, least of all into the directory of the model."""
    before = sorted(model.iterdir())
    command = ["train", "--load", str(model), "--data-path", data, *RUN.split()]
    for flags, reason in (
        (["--no-finetune"], "`--no-finetune` cannot be used"),
        (["--ckpt-step", "3"], "`--ckpt-step 3` cannot be used"),
        (["--save", str(model)], "is the directory of the model to load"),
    ):
        assert main([*command, *flags]) == 2
        assert reason in capsys.readouterr().err
    assert main(["train", "--continue", str(model)]) == 2
    said = capsys.readouterr().err
    assert "it is a model of Hugging Face, not a run of lmcore" in said
    assert f"`--load {model}` begins a run" in said
    assert sorted(model.iterdir()) == before
    save = ["--use-checkpoint-args", "--save", str(tmp_path / "run")]
    assert main([*command, *save]) == 0, "shape and tokenizer are the checkpoint's anyway"
    assert main([*command, *save]) == 2
    said = capsys.readouterr().err
    assert f"`lmcore train --continue {tmp_path / 'run'}` continues the run" in said


@pytest.mark.parametrize(
    "name",
    ["megatron", *(pytest.param(one, marks=pytest.mark.full) for one in OTHERS)],
)
def test_a_run_goes_away_and_back(name: str, tmp_path: Path, train: Any, data_prefix: str) -> None:
    """Its weights, Adam's state, schedule and settings: it continues as if it had not been away."""
    flags = "--train-iters 4 --global-batch-size 4 --precision bf16 --lr-decay-iters 12"
    run = train("run", flags)
    assert run.status == 0, run.err
    half = WriteOptions(dtype=torch.bfloat16)  # beside main parameters in float32
    choice = TokenizerSettings("ByteTokenizer")
    continue_both(run.directory, name, half, choice, ["--data-path", data_prefix])


def continue_both(
    run: Path, name: str, options: WriteOptions, choice: TokenizerSettings, data: list[str]
) -> None:
    """Convert a run of 4 steps to a format and back, and compare 4 more steps with its own."""
    convert(run, run.parent / "away", name, options=options)
    back = run.parent / "back"
    assert convert(run.parent / "away", back, "lmcore", choice=choice).optimizer
    found = []
    for start in (run, back):
        save = run.parent / f"{start.name}-continued"
        command = ["train", "--continue", str(start), "--save", str(save), "--train-iters", "8"]
        flags = "--schedule extend --log-interval 1 --eval-iters 0 --sample-tokens 0"
        assert main([*command, *(data if start == back else []), *flags.split()]) == 0
        found.append(losses(save)[-4:])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "name",
    ["megatron", *(pytest.param(one, marks=pytest.mark.full) for one in OTHERS)],
)
def test_a_run_continues_elsewhere(
    name: str, tmp_path: Path, train: Any, start: Any, finish: Any
) -> None:
    """`--load` of another program's checkpoint continues with the losses of the run itself."""
    flags = "--global-batch-size 4 --precision bf16 --lr-decay-iters 12 --train-iters"
    run = train("run", f"{flags} 4")
    assert run.status == 0, run.err
    half = WriteOptions(dtype=torch.bfloat16)  # beside main parameters in float32
    convert(run.directory, tmp_path / "away", name, options=half)
    own = train("own", f"{flags} 8 --schedule extend --load {run.directory}")
    assert own.status == 0, own.err
    load = f"--load {tmp_path / 'away'} --tokenizer-type ByteTokenizer"
    there = train("there", f"{flags} 8 --schedule extend {load}")
    assert there.status == 0, there.err
    assert [row["step"] for row in there.rows] == [5, 6, 7, 8]
    assert there.curve() == own.curve()
    same = read_state(own.directory), read_state(there.directory)
    for parameter in same[0].parameters:
        for kind in (WEIGHT, *ADAM):
            assert torch.equal(*(one.read(parameter, kind) for one in same))
    two = "--nproc-per-node 2 --zero-stage 2 --micro-batch-size 2"
    divided = finish(start("two", f"{flags} 8 --schedule extend {load} {two}"), "two")
    assert divided.status == 0, divided.err
    expected, found = (torch.tensor(losses(one.directory)) for one in (own, divided))
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, str]:
    """Return a vocabulary of a few words, and the prefix of documents of their sentences."""
    known = [f"w{number}" for number in range(40)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *known]) + "\n")
    lines = [" ".join(known[(7 * n + k * k) % 40] for k in range(4 + n % 3)) for n in range(5)]
    with (tmp_path / "text.jsonl").open("w") as stream:
        for first in range(60):
            text = "\n".join(lines[(first + n) % 5] for n in range(4))
            stream.write(json.dumps({"text": text}) + "\n")
    tokenizer = ["--tokenizer-type", "BertWordPieceLowerCase"]
    tokenizer += ["--vocab-file", str(tmp_path / "vocab.txt")]
    command = ["data", "prepare", "--input", str(tmp_path / "text.jsonl"), "--presplit-sentences"]
    assert main([*command, "--output-prefix", str(tmp_path / "text"), *tokenizer]) == 0
    return str(tmp_path / "vocab.txt"), str(tmp_path / "text_text_sentence")


@pytest.mark.parametrize(
    "name,style,layout",
    [
        ("megatron", "legacy", Layout(1, 2)),
        pytest.param("megatron", "core", Layout(2), marks=pytest.mark.full),
        pytest.param("megatron-dist", "core", Layout(), marks=pytest.mark.full),
    ],
    ids=["rank files before megatron-core", "rank files", "torch_dist"],
)
def test_a_run_of_bert_goes_away_and_back(
    name: str, style: str, layout: Layout, tmp_path: Path, train: Any, words: tuple[str, str]
) -> None:
    """The state of each head is in its place in any format: it continues with the same losses."""
    flags = "--model-family bert --train-iters 4 --global-batch-size 4 --precision bf16"
    run = train("run", f"{flags} --lr-decay-iters 12 --split 8,1,1", words[1])
    assert run.status == 0, run.err
    options = WriteOptions(dtype=torch.bfloat16, style=style, layout=layout)
    choice = TokenizerSettings("BertWordPieceLowerCase", vocab_file=words[0])
    continue_both(run.directory, name, options, choice, ["--data-path", words[1]])


def test_a_run_converted_without_its_optimizer(
    tmp_path: Path, train: Any, data_prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It continues with a new optimizer if an option says so; the error names the option."""
    run = train("run", "--train-iters 2 --global-batch-size 4")
    assert run.status == 0, run.err
    convert(run.directory, tmp_path / "weights", "lmcore", weights_only=True)
    weights = str(tmp_path / "weights")
    command = ["train", "--continue", weights, "--train-iters", "4", "--schedule", "extend"]
    command += ["--data-path", data_prefix, "--log-interval", "1", "--sample-tokens", "0"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "why: it was converted from lmcore, `run`, by `--weights-only`" in said
    assert "`--no-load-optim`" in said
    assert main([*command, "--no-load-optim"]) == 0
    assert len(losses(tmp_path / "weights")) == 2


def test_a_converted_run_without_batch_size_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error works the batch size out; the bundled text is not taken for the run's data."""
    state = RandomState(GPT2, kinds=(WEIGHT, *ADAM))  # 56 samples in 7 steps
    for name in state.parameters:
        state.tensors[name, "exp_avg_sq"].abs_()
    write_lmcore(state, tmp_path / "run", ByteTokenizer())
    command = ["train", "--continue", str(tmp_path / "run"), "--train-iters", "9"]
    command += ["--override-opt-param-scheduler", "--sample-tokens", "0", "--eval-iters", "0"]
    command += ["--device", "cpu", "--log-interval", "1", "--cpu-peak-seconds", "0"]
    command += ["--seq-length", "32"]
    text = ["--corpus", "shakespeare"]
    assert main([*command, *text, "--global-batch-size", "2", "--micro-batch-size", "2"]) == 2
    said = capsys.readouterr().err
    assert "the batch sizes are not the checkpoint's" in said
    assert "its steps had 8 samples if all had as many" in said
    command += ["--global-batch-size", "8", "--micro-batch-size", "8"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "the data of the run is not known" in said
    assert "`--corpus shakespeare`" in said
    assert main([*command, *text]) == 0
    assert "at sample 56 of its own order" in capsys.readouterr().err
    assert len(losses(tmp_path / "run")) == 2


def unnamed(state: RandomState, directory: Path, *, tokenizer_type: str | None) -> Path:
    """Write rank files as Megatron's own, whose arguments lack the number of tokens."""
    state.tokenizer_type, tokens = tokenizer_type, state.vocab_size
    state.vocab_size = None
    write_megatron(state, directory, None, dtype=torch.bfloat16)
    state.vocab_size = tokens
    return directory


@pytest.mark.parametrize("way", ["converted", "continued", "loaded"])
def test_the_number_of_tokens_survives(
    way: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Through Megatron, a run and back: rows of padding never become tokens."""
    state = RandomState(GPT2, kinds=(WEIGHT, *ADAM))
    state.vocab_size = 257
    for name in state.parameters:
        state.tensors[name, "exp_avg_sq"].abs_()
    there = unnamed(state, tmp_path / "there", tokenizer_type="ByteTokenizer")
    back = str(tmp_path / "back")
    convert(there, Path(back), "lmcore")
    own = ["--override-opt-param-scheduler", "--global-batch-size", "8", "--corpus", "shakespeare"]
    start = {
        "converted": ["--load", back, "--use-checkpoint-args", *own],
        "continued": ["--continue", back, *own],
        "loaded": ["--load", str(there), *own],
    }[way]
    flags = RUN.replace("--global-batch-size 4", "").replace("--train-iters 2", "--train-iters 8")
    flags += " --seq-length 16"
    run = tmp_path / "run"
    assert main(["train", *start, *flags.split(), "--save", str(run)]) == 0
    # What the checkpoint does not record is not said to differ from it.
    assert "`eval_iters`" not in capfd.readouterr().err
    text = (run / "config.yaml").read_text()
    assert re.search(r"#   vocab_size: 257\n#   padded_vocab_size: 384\n", text)
    assert re.search(r"\n  make_vocab_size_divisible_by: (128|384) +# checkpoint: ", text)
    assert re.search(r"\n  precision: bf16 +# checkpoint: ", text)
    notes = " ".join(convert(run, tmp_path / "hf", "huggingface").notes)
    assert "127 rows that pad the vocabulary are left out" in notes
    assert json.loads((tmp_path / "hf/config.json").read_text())["vocab_size"] == 257
    notes = " ".join(convert(run, tmp_path / "ds", "megatron-deepspeed").notes)
    assert "the universal checkpoint has 384 rows of the vocabulary" in notes
    convert(run, tmp_path / "again", "megatron")
    assert read_state(tmp_path / "again").vocab_size == 257


def test_a_checkpoint_with_the_name_of_its_tokenizer(
    tmp_path: Path, state: RandomState, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run does not begin with another one, and not with bytes because none was given."""
    there = unnamed(state, tmp_path / "there", tokenizer_type="GPT2BPETokenizer")
    convert(there, tmp_path / "back", "lmcore")
    save = ["--save", str(tmp_path / "run")]
    for start in (["--load", str(there)], ["--load", str(tmp_path / "back"), "--finetune"]):
        assert main(["train", *start, *RUN.split(), *save]) == 2
        said = capfd.readouterr().err
        assert f"`{start[1]}` has no tokenizer" in said
        assert "by `--tokenizer-type GPT2BPETokenizer` and its files" in said
        bytes_of = [*start, "--use-checkpoint-args", "--tokenizer-type", "ByteTokenizer"]
        assert main(["train", *bytes_of, *RUN.split(), "--seq-length", "16", *save]) == 2
        said = capfd.readouterr().err
        assert "checkpoint: `GPT2BPETokenizer`; this run: `ByteTokenizer`" in said
        assert "does not record its tokenizer" not in said
    assert not (tmp_path / "run/checkpoints").exists()
    accepted = ["--change-tokenizer", "--save", str(tmp_path / "other")]
    assert main(["train", *bytes_of, *RUN.split(), "--seq-length", "16", *accepted]) == 0


def test_what_is_taken_is_said(
    tmp_path: Path, state: RandomState, data: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A line names what a run has of the checkpoint and what not, and why."""
    other = RandomState(state.shape, kinds=(WEIGHT, *ADAM))
    for name in other.parameters:
        other.tensors[name, "exp_avg_sq"].abs_()
    write_megatron(other, tmp_path / "megatron", None)
    write_megatron(state, tmp_path / "weights", None)
    own = "--override-opt-param-scheduler --train-iters 8 --global-batch-size 8"
    none = "not taken: optimizer state, step, samples, random states"
    for name, flags, line in (
        ("megatron", own, "taken from `{}`: weights, optimizer state, step 7, 56 samples; "),
        ("megatron", own, "not taken: random states (seeded from seed and step: the checkpoint is"),
        ("megatron", f"{own} --no-load-optim", "{}`: weights, step 7, 56 samples; not taken: "),
        ("megatron", "--finetune", f"{none} (because of `--finetune`): the run begins at step 0"),
        ("weights", "", f"{none} (as with `--finetune`: the checkpoint has no state of an optim"),
    ):
        loaded = ["--load", str(tmp_path / name), "--tokenizer-type", "ByteTokenizer"]
        command = ["train", *loaded, "--data-path", data, *RUN.split(), *flags.split()]
        place = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        assert main([*command, "--save", str(place)]) == 0, capfd.readouterr().err
        said = capfd.readouterr().err
        assert line.format(tmp_path / name) in said
        steps = [
            json.loads(row)["step"] for row in (place / "metrics.jsonl").read_text().splitlines()
        ]
        assert steps == ([8] if "override" in flags else [1, 2])


def test_a_foreign_checkpoint_that_is_finished(
    tmp_path: Path, state: RandomState, data: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fewer steps than the checkpoint has are an error that names its step."""
    write_megatron(RandomState(state.shape, kinds=(WEIGHT, *ADAM)), tmp_path / "megatron", None)
    loaded = ["--load", str(tmp_path / "megatron"), "--tokenizer-type", "ByteTokenizer"]
    save = ["--save", str(tmp_path / "run")]
    assert main(["train", *loaded, "--data-path", data, *RUN.split(), *save]) == 2
    said = capfd.readouterr().err
    assert "the run has done 7 steps already, more than the 2 of `--train-iters 2`" in said


def test_main_parameters_that_are_not_the_models(
    tmp_path: Path, state: RandomState, data: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Training and generation begin with the model's own weights, and a warning says why."""
    other = RandomState(state.shape, kinds=(WEIGHT, *ADAM))
    write_megatron(other, tmp_path / "megatron", None, dtype=torch.bfloat16)
    [path] = (tmp_path / "megatron").rglob("model_optim_rng.pt")
    content = torch.load(path, weights_only=False)
    for tensor in chain(*content["optimizer"]["fp32_from_fp16_params"]):
        tensor.add_(3.0)
    torch.save(content, path)
    loaded = ["--load", str(tmp_path / "megatron"), "--tokenizer-type", "ByteTokenizer"]
    still = RUN.replace("--lr 1e-3", "--lr 1e-9")
    command = ["train", *loaded, "--data-path", data, *still.split()]
    own = "--override-opt-param-scheduler --train-iters 8 --global-batch-size 8"
    assert main([*command, *own.split(), "--save", str(tmp_path / "refused")]) == 1
    assert "add `--finetune` to begin at step 0" in capfd.readouterr().err
    assert main([*command, "--finetune", "--save", str(tmp_path / "run")]) == 0
    said = capfd.readouterr().err
    assert "does not fit the model" in said
    assert "the weights of the model itself are taken" in said
    trained = LmcoreState(tmp_path / "run")
    for name in other.parameters:
        expected = other.read(name).bfloat16().float()
        torch.testing.assert_close(trained.read(name)[: len(expected)], expected)
    assert main(["generate", *loaded, "--prompt", "ab", "--tokens", "4", "--device", "cpu"]) == 0
    assert "the weights of the model itself are taken" in capfd.readouterr().err


def test_weights_of_another_size_than_described(
    tmp_path: Path, model: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that the embedding lacks would keep whatever the memory held."""
    path = model / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vocab_size": 300}))
    command = ["train", "--load", str(model), "--data-path", data, *RUN.split()]
    assert main([*command, "--save", str(tmp_path / "run")]) == 1
    assert "do not fit its `config.json`" in capsys.readouterr().err
