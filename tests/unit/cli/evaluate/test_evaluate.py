"""`lmcore evaluate`, from flags to the table."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcore.base.errors import CheckpointError, ConfigError, DataError
from lmcore.base.signals import TerminatedError
from lmcore.checkpoint import save_checkpoint
from lmcore.cli.evaluate import run
from lmcore.contract import OP_SPECS, OpTable
from lmcore.conversion.convert import convert
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.data.tokenizer.saved import save_tokenizer
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.family import parameter_shapes
from lmcore.model.shape import ModelShape

SHAPE = ModelShape(2, 24, 3, 40, 64, 384, init_method_std=0.3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with byte models of random weights, and files of tasks."""
    directory = tmp_path_factory.mktemp("evaluate")
    for seed in (3, 4):
        model = GPT(SHAPE, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
        model.initialize(seed)
        tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
        path = directory / f"run-{seed}"
        save_checkpoint(path / "checkpoints", 5, tensors, {}, model_shape=SHAPE.to_dict())
        save_tokenizer(ByteTokenizer(), path / "tokenizer")
    rows = [
        {"query": f"Is it {number}?", "choices": ["yes", "no", "maybe"], "gold": number % 3}
        for number in range(9)
    ]
    (directory / "openbook_qa.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    ends = "".join(json.dumps({"text": f"It is a dog {one}"}) + "\n" for one in range(5))
    (directory / "lambada_test.jsonl").write_text(ends)
    (directory / "book.txt").write_text("All is well that ends well. " * 20)
    return directory


def call(runs: Path, *flags: str, checkpoints: tuple[str, ...] = ("run-3",)) -> int:
    named = [str(runs / one) for one in checkpoints]
    return run([*named, "--device", "cpu", "--precision", "fp32", *flags])


def test_table_of_two_checkpoints(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--task", "openbookqa,lambada", "--task-data", str(runs)]
    flags += ["--text", str(runs / "book.txt")]
    assert call(runs, *flags, checkpoints=("run-3", "run-4")) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["task", "examples", "metric", str(runs / "run-3"), str(runs / "run-4")]
    metrics = [row.split()[0:3:2] for row in rows]
    assert metrics == [
        *(["openbookqa", "acc_norm"], ["openbookqa", "acc"]),
        *(["lambada", "acc"], ["lambada", "perplexity"]),
        *(["text", "loss"], ["text", "token_perplexity"]),
        *(["text", "word_perplexity"], ["text", "bits_per_byte"]),
    ]
    assert rows[0].split()[1] == "9"
    assert rows[0].count("±") == 2


def test_a_checkpoint_twice(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither result is lost."""
    flags = ["--task", "lambada", "--task-data", str(runs), "--json"]
    assert call(runs, *flags, checkpoints=("run-3", "run-4", "run-3")) == 0
    found = json.loads(capsys.readouterr().out)
    first, other, again = found
    assert again == f"{first} (2)"
    assert found[first]["lambada"]["metrics"] == found[again]["lambada"]["metrics"]
    assert found[first]["lambada"]["metrics"] != found[other]["lambada"]["metrics"]


def test_a_wrong_example_is_found_before_the_first_pass(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer of the second task is too long: nothing of the first is computed."""
    from lmcore.evaluation.likelihood import Likelihoods

    row = {"query": "Is it?", "choices": ["yes", "n" * 80], "gold": 0}
    (tmp_path / "openbook_qa.jsonl").write_text(json.dumps(row))
    monkeypatch.setattr(Likelihoods, "compute", None)
    files = ("--task-data", str(runs), f"openbookqa={tmp_path / 'openbook_qa.jsonl'}")
    with pytest.raises(DataError, match="example 1 of the task `openbookqa`: an answer has 81"):
        call(runs, "--task", "lambada,openbookqa", *files)


def test_records_of_texts(runs: Path, tmp_path: Path) -> None:
    """A text has its windows; of a long one there is the file, not the text."""
    path = tmp_path / "a.jsonl"
    assert call(runs, "--text", str(runs / "book.txt"), "--examples", str(path)) == 0
    (record,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (record["file"], record["words"]) == (str(runs / "book.txt"), 120)
    assert sum(record["tokens"]) == record["bytes"] == (runs / "book.txt").stat().st_size
    assert len(record["logprobs"]) == 9


def test_files_of_results(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--task", "openbookqa", "--task-data", f"openbookqa={runs / 'openbook_qa.jsonl'}"]
    flags += ["--output", str(tmp_path / "a.json"), "--examples", str(tmp_path / "a.jsonl")]
    assert call(runs, *flags, "--json", "--limit", "6") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "a.json").read_text())
    result = printed[str(runs / "run-3")]["openbookqa"]
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert (result["examples"], len(lines)) == (6, 6)
    assert [line["gold"] for line in lines] == [0, 1, 2, 0, 1, 2]
    right = [line["logprobs"].index(max(line["logprobs"])) == line["gold"] for line in lines]
    assert result["metrics"]["acc"]["value"] == pytest.approx(sum(right) / 6)


def test_a_stopped_evaluation_continues(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run computes the rest alone, and has the results of one without a stop."""
    from lmcore.evaluation import likelihood

    flags = ["--task", "openbookqa,lambada", "--task-data", str(runs), "--batch-tokens", "64"]
    assert call(runs, *flags, "--output", str(tmp_path / "whole.json")) == 0
    assert not list(tmp_path.glob("*.part"))
    # Smaller passes than in the first run change rounding alone.
    monkeypatch.setattr(likelihood, "BLOCK", 64)
    computed = likelihood.Likelihoods._after_contexts
    passes = []

    def stop_at_the_third(self: object, *arguments: object) -> object:
        passes.append(1)
        if len(passes) == 3:
            raise KeyboardInterrupt
        return computed(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(likelihood.Likelihoods, "_after_contexts", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        call(runs, *flags, "--output", str(tmp_path / "a.json"))
    assert (tmp_path / "a.json.part").exists()
    assert call(runs, *flags, "--output", str(tmp_path / "a.json")) == 0
    assert not list(tmp_path.glob("*.part"))
    values = []
    for name in ("whole.json", "a.json"):
        (found,) = json.loads((tmp_path / name).read_text()).values()
        values.append({task: one["metrics"] for task, one in found.items()})
    whole, continued = values
    for task, metrics in whole.items():
        for name, metric in metrics.items():
            assert continued[task][name]["value"] == pytest.approx(metric["value"], rel=1e-5)


def test_perplexity_by_hand(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Windows of 64 tokens that move on by 16, against one plain pass for each."""
    from lmcore.checkpoint import find_checkpoint, load_checkpoint

    assert call(runs, "--text", str(runs / "book.txt"), "--stride", "16", "--json") == 0
    found = json.loads(capsys.readouterr().out)[str(runs / "run-3")]["text"]["metrics"]
    model = GPT(SHAPE, OpBinding(OpTable(OP_SPECS), "cpu", "float32")).eval()
    model.initialize(3)
    assert find_checkpoint(runs / "run-3") is not None
    assert load_checkpoint is not None
    tokenizer = ByteTokenizer()
    tokens = [tokenizer.eod, *tokenizer.encode((runs / "book.txt").read_text())]
    total, end = 0.0, 0
    while end < len(tokens) - 1:
        before, end = end, min(max(end + 16, 64), len(tokens) - 1)
        inputs = torch.tensor([tokens[max(0, end - 64) : end]])
        with torch.no_grad():
            logits = model.logits(model(inputs)[0])[before - end :, :257]
        targets = torch.tensor(tokens[before + 1 : end + 1])
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    assert found["loss"]["value"] == pytest.approx(total / (len(tokens) - 1), rel=1e-5)
    expected = math.exp(total / (len(tokens) - 1))
    assert found["token_perplexity"]["value"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("lambada", "", "has no examples of the task `lambada`"),
        ("openbookqa", '{"a": 1}\n', "line 1 of .* has no field"),
        ("text", '{"a": 1}\n', "line 1 of .* has no field"),
        ("text", "", "has no examples of the task `text`"),
    ],
)
def test_wrong_files_are_found_before_a_model_is_loaded(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: str,
    message: str,
) -> None:
    from lmcore.cli import evaluate

    path = tmp_path / "a.jsonl"
    path.write_text(content)
    monkeypatch.setattr(evaluate, "started_runtime", None)
    flags = ["--task", name, "--task-data", f"{name}={path}"]
    with pytest.raises(DataError, match=message):
        call(runs, *(["--text", str(path)] if name == "text" else flags))


@pytest.mark.parametrize("flag", ["--stride", "--seq-length"])
def test_positions_are_compared_before_a_model_is_loaded(
    runs: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    """A second checkpoint is compared before the first one is scored."""
    from lmcore.cli import evaluate

    monkeypatch.setattr(evaluate, "started_runtime", None)
    with pytest.raises(ConfigError, match="more than the model's 64 positions"):
        call(runs, "--text", str(runs / "book.txt"), flag, "65", checkpoints=("run-3", "run-4"))


@pytest.mark.parametrize("foreign", [False, True], ids=["run", "megatron"])
def test_a_missing_tokenizer_is_found_before_a_model_is_loaded(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: bool
) -> None:
    """A second checkpoint without one would end the command after hours with the first."""
    from lmcore.cli import evaluate

    other = tmp_path / "run"
    shutil.copytree(runs / "run-4", other, ignore=shutil.ignore_patterns("tokenizer"))
    if foreign:
        other = tmp_path / "megatron"
        convert(tmp_path / "run", other, "megatron")
    monkeypatch.setattr(evaluate, "started_runtime", None)
    with pytest.raises(ConfigError, match=f"`{other}` has no tokenizer"):
        call(runs, "--text", str(runs / "book.txt"), checkpoints=("run-3", str(other)))


def test_list_of_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--list"]) == 0
    assert "hellaswag" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags,message",
    [
        ([], "needs a task, a text, or a data set"),
        (["--task", "openbook"], "there is no task `openbook`"),
        (["--task", "lambada"], "the task `lambada` needs `--task-data DIR`"),
        (["--task", "lambada", "--task-data", "piqa=x"], "is for no task of `--task`"),
        (["--task", "lambada", "--task-data", "a", "b"], "gives two places"),
    ],
)
def test_wrong_flags(runs: Path, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(runs, *flags)


def test_wrong_outputs(runs: Path, tmp_path: Path) -> None:
    flags = ["--text", str(runs / "book.txt")]
    with pytest.raises(ConfigError, match=r"`--output .*: no such directory"):
        call(runs, *flags, "--output", str(tmp_path / "nothing" / "a.json"))
    same = str(tmp_path / "a")
    with pytest.raises(ConfigError, match="name the same file"):
        call(runs, *flags, "--output", same, "--examples", same)
    with pytest.raises(DataError, match="there is no file"):
        call(runs, "--text", str(tmp_path / "nothing.txt"))


def test_a_metric_misspelt(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from lmcore.evaluation.task import Task\n"
        "MINE = Task('mine', 'Mine.', ('mine.jsonl',), list, ('acc_nrm',), 'me')\n"
    )
    with pytest.raises(ConfigError, match="has no metric `acc_nrm`") as caught:
        call(runs, "--task", str(tmp_path / "own.py"), "--task-data", str(tmp_path))
    assert "`acc_norm`" in str(caught.value.hint)


def test_a_metric_of_other_examples(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a Python task it is found with the first example, before any pass."""
    from lmcore.evaluation.likelihood import Likelihoods

    (tmp_path / "own.py").write_text(
        "from lmcore.evaluation.task import Continued, Task\n"
        "def ends(path):\n    yield Continued('It is', ' so')\n"
        "MINE = Task('mine', 'Mine.', ('mine.jsonl',), ends, ('acc', 'acc_norm'), 'me')\n"
    )
    (tmp_path / "mine.jsonl").touch()
    monkeypatch.setattr(Likelihoods, "compute", None)
    with pytest.raises(ConfigError, match="has the metric `acc_norm`") as caught:
        call(runs, "--task", str(tmp_path / "own.py"), "--task-data", str(tmp_path))
    assert "texts with their ends" in str(caught.value.why)
    assert "`acc`, `perplexity`, `loss`" in str(caught.value.hint)


def test_texts_without_words(
    runs: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Their perplexity of a word is undefined, and a line says so."""
    (tmp_path / "a.jsonl").write_text('{"text": "\\n\\n"}\n')
    assert call(runs, "--text", str(tmp_path / "a.jsonl"), "--json") == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    assert found["text"]["metrics"]["word_perplexity"]["value"] is None
    assert found["text"]["metrics"]["loss"]["value"] > 0
    assert "`word_perplexity` of `text` is undefined" in caplog.text


def test_an_error_says_what_is_kept(runs: Path, tmp_path: Path) -> None:
    """An error before the first pass leaves no file; after it, the command continues."""
    path = tmp_path / "a.json"
    flags = ["--text", str(tmp_path / "a.jsonl"), "--output", str(path)]
    flags += ["--task", "lambada", "--task-data", str(runs)]
    (tmp_path / "a.jsonl").write_text('{"a": 1}')
    with pytest.raises(DataError) as caught:
        call(runs, *flags)
    assert not hasattr(caught.value, "__notes__")
    assert not list(tmp_path.glob("*.part"))
    (tmp_path / "a.jsonl").write_text('{"text": "It is."}\n{"a": 1}')
    with pytest.raises(DataError) as caught:
        call(runs, *flags)
    assert caught.value.__notes__ == [
        f"the same command continues, with the results in `{path}.part`"
    ]


def test_a_model_with_an_encoder_is_refused_before_its_tokenizer(
    runs: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "decoder_num_layers": 2,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "t5_feed_forward": "gelu",
        "t5_scaled_attention": True,
        "t5_scaled_head": False,
        "t5_head_bias": True,
    }
    further = tuple(sorted(settings.items()))
    own = ModelShape(2, 24, 3, 40, 64, 384, model_family="t5", further=further)
    tensors = {f"model.{n}": torch.zeros(size) for n, size in parameter_shapes(own).items()}
    save_checkpoint(tmp_path / "t5/checkpoints", 5, tensors, {}, model_shape=own.to_dict())
    with pytest.raises(ConfigError, match="has an encoder"):
        call(runs, "--text", str(runs / "book.txt"), checkpoints=(str(tmp_path / "t5"),))


def test_the_files_of_tasks_are_said(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert call(runs, "--task", "lambada", "--task-data", str(runs)) == 0
    assert f"lambada: `{runs / 'lambada_test.jsonl'}`" in caplog.text


def test_replicas_are_in_the_hint_of_a_wrong_number(runs: Path) -> None:
    flags = ["--tensor-model-parallel-size", "2", "--nproc-per-node", "3"]
    with pytest.raises(ConfigError, match="contradicts") as caught:
        call(runs, "--text", str(runs / "book.txt"), *flags)
    assert "a multiple of it for replicas" in str(caught.value.hint)


def test_nothing_to_evaluate() -> None:
    with pytest.raises(ConfigError, match="needs a checkpoint"):
        run(["--text", "a.txt"])


def test_wrong_files(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no file of the task `hellaswag`"):
        call(runs, "--task", "hellaswag", "--task-data", str(tmp_path))
    with pytest.raises(CheckpointError, match="is a file, not a checkpoint"):
        call(runs, "--text", str(runs / "book.txt"), checkpoints=("book.txt",))
    with pytest.raises(ConfigError, match="more than the model's 64 positions"):
        call(runs, "--text", str(runs / "book.txt"), "--stride", "65")


def test_results_are_replaced_and_other_files_are_not(runs: Path, tmp_path: Path) -> None:
    flags = ["--task", "openbookqa", "--task-data", str(runs), "--limit", "1"]
    output = tmp_path / "a.json"
    for limit in ("1", "2"):
        assert call(runs, *flags[:-1], limit, "--output", str(output)) == 0
        (found,) = json.loads(output.read_text()).values()
        assert found["openbookqa"]["examples"] == int(limit)
    for content in ("notes", "{}", '{"a": {"b": 1}}', "[]"):
        output.write_text(content)
        with pytest.raises(ConfigError, match="has no results of `lmcore evaluate`"):
            call(runs, *flags, "--output", str(output))
        assert output.read_text() == content


def test_a_masked_model_is_not_scored(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lmcore.cli import evaluate
    from lmcore.inference.load import NoTextError

    def refuse(*_arguments: object, **_options: object) -> None:
        raise NoTextError("the BERT model of `a` cannot generate text", why="it fills masks")

    monkeypatch.setattr(evaluate, "loaded_model", refuse)
    with pytest.raises(CheckpointError, match="the BERT model of `a` cannot be scored"):
        call(runs, "--text", str(runs / "book.txt"))


def test_a_masked_model_is_refused_before_another_is_scored(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcore.cli import evaluate

    own = {"bert_binary_head": True, "bert_gelu": "erf", "bert_post_norm": False}
    further = tuple(sorted({**own, "bert_token_types": 2}.items()))
    shape = ModelShape(2, 24, 3, 40, 64, 384, model_family="bert", further=further).to_dict()
    bert = tmp_path / "bert"
    save_checkpoint(bert / "checkpoints", 5, {"a": torch.zeros(1)}, {}, model_shape=shape)
    monkeypatch.setattr(evaluate, "loaded_model", None)
    with pytest.raises(CheckpointError, match=r"the BERT model of .* cannot be scored") as caught:
        call(runs, "--text", str(runs / "book.txt"), checkpoints=("run-3", str(bert)))
    assert "--finetune" in str(caught.value.hint)
    assert caught.value.exit_status == 2, "the checkpoint does not fit the command"


@pytest.mark.parametrize(
    "flags,note",
    [
        ([], "nothing is kept; with `--output FILE` the same command continues"),
        (["--output", "a.json"], "the same command continues, with the results in `a.json.part`"),
    ],
)
def test_an_interrupt_says_what_is_kept(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    note: str,
) -> None:
    from lmcore.cli import evaluate

    def interrupt(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "loaded_model", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        call(runs, "--text", str(runs / "book.txt"), *flags)
    assert caught.value.__notes__ == [note]


def test_tasks_of_a_file_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(
        "from lmcore.evaluation.task import Task\n"
        "MINE = Task('mine', 'Mine.', ('mine.jsonl',), list, ('acc',), 'me')\n"
    )
    assert run(["--list", "--task", str(tmp_path / "own.py")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["mine", "Mine."],
        ["acc;", "files:", "mine.jsonl,", "of", "me"],
    ]


def test_a_task_misspelt_with_its_data(runs: Path) -> None:
    flags = ["--task", "lambada", "--task-data", "lambda=a.jsonl"]
    with pytest.raises(ConfigError, match="is for no task of `--task`") as caught:
        call(runs, *flags)
    assert "did you mean `lambada`" in str(caught.value.hint)


def test_a_termination_leaves_no_hidden_file(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler ends a job by SIGTERM: what is kept is said, as at Ctrl-C."""
    from lmcore.cli import evaluate

    def terminate(*_arguments: object, **_options: object) -> None:
        assert len(list(tmp_path.iterdir())) == 2
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(evaluate, "loaded_model", terminate)
    given = ["--output", str(tmp_path / "a.json"), "--examples", str(tmp_path / "b.jsonl")]
    with pytest.raises(TerminatedError) as caught:
        call(runs, "--text", str(runs / "book.txt"), *given)
    assert caught.value.code == 143
    assert "the same command continues" in caught.value.__notes__[0]
    assert not list(tmp_path.iterdir())  # there was no result yet
