"""`lmcore generate`, from flags to text."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from suite.selection import peer

from lmcore.base.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    LmcoreError,
    RunError,
    printable,
)
from lmcore.checkpoint import save_checkpoint
from lmcore.cli.generate import run
from lmcore.contract import OP_SPECS, OpTable
from lmcore.data.tokenizer import ByteTokenizer, NullTokenizer
from lmcore.data.tokenizer.saved import save_tokenizer
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.generation.request import Request
from lmcore.generation.text import sampler
from lmcore.model.shape import ModelShape

SHAPE = ModelShape(2, 24, 3, 40, 32, 384, init_method_std=0.3)


@pytest.fixture(autouse=True)
def same_threads():
    """`--num-threads` holds for the process; put it back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run with a byte model of random weights."""
    directory = tmp_path_factory.mktemp("run")
    model = GPT(SHAPE, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    model.initialize(3)
    with torch.no_grad():
        # Letters, for a text that can be read in a failure.
        model.token_embedding.weight[97:123] *= 2.0
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    save_checkpoint(directory / "checkpoints", 5, tensors, {}, model_shape=SHAPE.to_dict())
    save_tokenizer(ByteTokenizer(), directory / "tokenizer")
    return str(directory)


@pytest.fixture
def generate(run_directory: str, capsys: pytest.CaptureFixture[str]):
    """Runs the command on the run and returns its output."""

    def call(*flags: str) -> str:
        capsys.readouterr()
        precision = (
            [] if {"--precision", "--bf16", "--fp16"} & {*flags} else ["--precision", "fp32"]
        )
        argv = ["--load", run_directory, "--device", "cpu", *precision, *flags]
        assert run(argv) == 0
        return capsys.readouterr().out

    return call


def records(output: str) -> list[dict]:
    """Return the JSON objects of some lines."""
    return [json.loads(line) for line in output.splitlines()]


class TestOutput:
    """Printed output."""

    def test_plain_and_json_agree(self, generate) -> None:
        """Plain output is the prompt and the text that `--json` has."""
        (record,) = records(generate("--prompt", "ab", "--tokens", "6", "--json"))
        assert record["prompt"] == "ab"
        assert len(record["tokens"]) == 6
        assert record["finished"] is False
        assert record["seed"] == 1234
        assert record["text"] == ByteTokenizer().decode(record["tokens"])
        assert generate("--prompt", "ab", "--tokens", "6") == "ab" + record["text"] + "\n"

    def test_seed(self, generate) -> None:
        """The same seed prints the same, another seed something else."""
        flags = ["--prompt", "ab", "--tokens", "12", "--json"]
        first, again, other = (generate(*flags, "--seed", seed) for seed in ("5", "5", "6"))
        assert first == again
        assert records(first)[0]["tokens"] != records(other)[0]["tokens"]

    def test_sample_alone(self, generate) -> None:
        """Each of several samples is what its seed gives alone, in batches of any size."""
        flags = ["--prompt", "ab", "--tokens", "8", "--json"]
        several = generate(*flags, "--seed", "5", "--num-samples", "5", "--micro-batch-size", "2")
        found = records(several)
        assert [record["seed"] for record in found] == [5, 6, 7, 8, 9]
        for record in found:
            assert records(generate(*flags, "--seed", str(record["seed"]))) == [record]
        assert len({tuple(record["tokens"]) for record in found}) > 1

    def test_requests_are_made_as_needed(self, generate, monkeypatch) -> None:
        """Many samples need no memory for the later ones when the first ones begin."""
        request = Mock(side_effect=Request)
        monkeypatch.setattr(sampler, "Request", request)
        monkeypatch.setattr(sampler.ContinuousBatch, "run", Mock(side_effect=InterruptedError))
        with pytest.raises(InterruptedError):
            generate("--prompt", "ab", "--tokens", "2", "--num-samples", "1000")
        assert request.call_count == 16  # those that run, and as many that wait

    def test_prompts_of_all_lengths_together(self, generate, tmp_path) -> None:
        """Each sample of many is the one of its prompt and seed alone."""
        file = tmp_path / "prompts"
        file.write_text("\n".join("x" * (5 * n % 17 + 1) for n in range(9)))
        flags = ["--tokens", "9", "--json", "--sample-input-file"]
        together = records(generate(*flags, str(file), "--micro-batch-size", "4"))
        for record in together:
            alone = ["--prompt", record["prompt"], "--seed", str(record["seed"])]
            assert records(generate("--tokens", "9", "--json", *alone)) == [record]
        assert [record["seed"] for record in together] == list(range(1234, 1243))

    def test_stop_texts(self, generate) -> None:
        """The text ends before the first of them, with and without a cache."""
        flags = ["--prompt", "ab", "--tokens", "20", "--greedy", "--json"]
        (whole,) = records(generate(*flags))
        stop = whole["text"][4:6]
        cut = whole["text"].index(stop)
        for cache in ((), ("--no-cache",)):
            (found,) = records(generate(*flags, *cache, "--stop", "never there", stop))
            assert found["text"] == whole["text"][:cut]
            assert found["finished"]

    def test_logprobs(self, generate) -> None:
        """The most probable token of greedy text is the chosen one."""
        flags = ["--prompt", "ab", "--tokens", "4", "--greedy", "--json", "--logprobs"]
        (record,) = records(generate(*flags, "2"))
        assert [one["id"] for one in record["logprobs"]] == record["tokens"]
        for one in record["logprobs"]:
            first, second = one["top"]
            assert {key: one[key] for key in first} == first
            assert 0 >= first["logprob"] >= second["logprob"]
        (record,) = records(generate(*flags, "0"))
        assert all(one["top"] == [] for one in record["logprobs"])

    def test_penalties(self, generate) -> None:
        """A large penalty forbids to repeat a token."""
        flags = ["--prompt", "ab", "--tokens", "20", "--greedy", "--json"]
        (free,) = records(generate(*flags))
        assert len(set(free["tokens"])) < 20
        (record,) = records(generate(*flags, "--repetition-penalty", "10"))
        assert len(set(record["tokens"])) > len(set(free["tokens"]))

    def test_decaying_top_p(self, generate) -> None:
        """The text becomes greedy after its first token, unless a bound holds the decay back."""
        flags = ["--tokens", "8", "--json", "--temperature", "3", "--seed", "3"]
        decay = ["--top-p", "1", "--top-p-decay", "1e-9"]
        (fast,) = records(generate("--prompt", "ab", *flags, *decay))
        first, *rest = fast["tokens"]
        prompt = "ab" + ByteTokenizer().decode([first])
        (greedy,) = records(generate("--prompt", prompt, "--tokens", "7", "--json", "--greedy"))
        assert rest == greedy["tokens"]
        (bound,) = records(generate("--prompt", "ab", *flags, *decay, "--top-p-bound", "1"))
        (free,) = records(generate("--prompt", "ab", *flags, "--top-p", "1"))
        assert bound["tokens"] == free["tokens"] != fast["tokens"]

    def test_megatrons_length(self, generate, tmp_path, caplog) -> None:
        """`--out-seq-length` counts tokens after the prompt, as far as there are positions."""
        file = tmp_path / "prompts"
        file.write_text("x\n" + "y" * 30)
        flags = ["--sample-input-file", str(file), "--out-seq-length", "12", "--json", "--greedy"]
        first, second = records(generate(*flags))
        assert len(first["tokens"]) == 12 or first["finished"]
        assert len(second["tokens"]) == 3 or second["finished"]
        assert (
            "the model has 32 positions: after the longest prompt 3 tokens at most are generated, "
            "not the 12 of `--out-seq-length`"
        ) in caplog.text
        caplog.clear()
        generate("--prompt", "x", "--out-seq-length", "12")
        assert "positions" not in caplog.text

    def test_beam_search(self, generate) -> None:
        """The best texts, by their scores; one beam is greedy text."""
        flags = ["--prompt", "ab", "--tokens", "6", "--json"]
        found = records(generate(*flags, "--beam-width", "4", "--num-samples", "3"))
        scores = [record["score"] for record in found]
        assert len({record["text"] for record in found}) == 3
        assert not any("seed" in record for record in found)
        assert scores == sorted(scores, reverse=True)
        (greedy,) = records(generate(*flags, "--greedy"))
        (single,) = records(generate(*flags, "--beam-width", "1"))
        assert single["text"] == greedy["text"]

    @pytest.mark.peer
    def test_json_schema(self, generate, tmp_path, caplog) -> None:
        """The text is JSON of the schema, though the model would write anything."""
        peer("llguidance")
        file = tmp_path / "schema.json"
        file.write_text('{"enum": ["yes", [true]]}')
        flags = ["--prompt", "ab", "--json", "--json-schema", str(file), "--num-samples", "4"]
        for record in records(generate(*flags)):
            assert json.loads(record["text"]) in ("yes", [True])
            assert record["finished"]
        assert "the limit of tokens" not in caplog.text
        generate(*flags, "--tokens", "2")
        assert "4 of 4 texts stopped at the limit of tokens" in caplog.text

    def test_ops(self, generate) -> None:
        """`--ops` selects kernels, and `--strict-ops` refuses the core's own."""
        flags = ["--prompt", "ab", "--tokens", "3", "--greedy", "--ops"]
        with pytest.raises(ConfigError, match="no such kernel"):
            generate(*flags, "linear=nothing")
        with pytest.raises(LmcoreError, match="reference"):
            generate(*flags, "linear=reference", "--strict-ops")
        assert generate(*flags, "linear=reference").startswith("ab")

    def test_megatrons_precision(self, generate) -> None:
        """`--bf16` is the precision."""
        flags = ["--prompt", "ab", "--tokens", "9", "--json"]
        assert generate(*flags, "--bf16") == generate(*flags, "--precision", "bf16")

    def test_no_cache(self, generate) -> None:
        """`--no-cache`, and Megatron's name of it, change nothing but the time."""
        flags = ["--prompt", "ab", "--tokens", "12", "--greedy", "--json"]
        assert generate(*flags) == generate(*flags, "--no-cache") == generate(*flags, "--recompute")

    def test_flags_of_the_training_command(self, generate, run_directory, tmp_path) -> None:
        """A script's flags of a training run and of generation are understood together."""
        output = tmp_path / "samples.json"
        gpt_arguments = """
            --num-layers 2 --hidden-size 24 --num-attention-heads 3 --seq-length 1024
            --max-position-embeddings 32 --micro-batch-size 4 --global-batch-size 8
            --rampup-batch-size 2 2 1_000 --lr 0.00015 --train-iters 500000
            --lr-decay-iters 320000 --lr-decay-style cosine --lr-warmup-fraction .01 --fp16
            --log-interval 10 --save-interval 500 --eval-interval 100 --checkpoint-activations
            --save nowhere --data-path nothing --tensorboard-queue-size 5
            --log-timers-to-tensorboard --deepspeed --deepspeed_config none.json --zero-stage 1
            --deepspeed-activation-checkpointing --tensor-model-parallel-size 2 --local_rank 0
            --no-load-optim --no-masked-softmax-fusion
        """
        script = "--out-seq-length 40 --temperature 1.0 --num-samples 2 --top_p 0.9 --recompute"
        generate(
            *gpt_arguments.split(),
            "--load",
            run_directory,
            *script.split(),
            "--genfile",
            str(output),
        )
        found = records(output.read_text())
        assert len(found) == 2
        again = ["--tokens", "32", "--top-p", "0.9", "--num-samples", "2", "--json", "--no-cache"]
        expected = records(generate(*again, "--fp16"))
        assert [one["text"] for one in found] == [one["text"] for one in expected]

    def test_flags_of_another_model(self, generate) -> None:
        """Flags of the model that contradict the checkpoint are errors, all at once."""
        with pytest.raises(ConfigError) as caught:
            generate("--num-layers", "99", "--use-rotary-position-embeddings", "--hidden-size=24")
        (other,) = caught.value.others
        assert caught.value.what == "`--num-layers 99` contradicts the checkpoint"
        assert caught.value.why == "its model has 2 as `num_layers`"
        assert other.what == "`--position-embedding-type rope` contradicts the checkpoint"

    def test_greedy(self, generate) -> None:
        """Greedy text has no chance in it; flags with their default values change nothing."""
        flags = ["--prompt", "ab", "--tokens", "12"]
        greedy = generate(*flags, "--greedy", "--temperature", "1", "--seed", "1234")
        for seed in ("1", "2"):
            assert generate(*flags, "--top-k", "1", "--seed", seed) == greedy

    @pytest.mark.parametrize(
        "seed, same", [(2**63 - 1, -1), (-(2**63), 0), (123456789012345678, 123456789012345678)]
    )
    def test_seeds_of_64_bits(self, generate, seed: int, same: int) -> None:
        """Every seed that the server takes is one; as there, a negative one counts from the end."""
        flags = ["--prompt", "ab", "--tokens", "9", "--num-samples", "2", "--json", "--seed"]
        found = records(generate(*flags, str(seed)))
        assert found == records(generate(*flags, str(same)))
        assert found[1]["seed"] == (seed + 1) % 2**63

    def test_default_tokens_fit(self, generate) -> None:
        """Without `--tokens` a small model writes as far as it has positions."""
        (record,) = records(generate("--prompt", "x" * 30, "--json"))
        assert len(record["tokens"]) == 3 or record["finished"]

    def test_precision(self, generate) -> None:
        """bf16 writes as many tokens; its rounding shows in the logits, not in the form."""
        flags = ["--prompt", "ab", "--tokens", "4", "--greedy", "--json"]
        (half,) = records(generate(*flags, "--precision", "bf16"))
        (full,) = records(generate(*flags))
        assert len(half["tokens"]) == len(full["tokens"]) == 4

    def test_grows_on_a_terminal(self, generate, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a terminal the text comes in pieces, and joined they are what a pipe gets."""
        expected = generate("--prompt", "é", "--tokens", "12")
        writes: list[str] = []

        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

            def write(self, text: str) -> int:
                writes.append(text)
                return super().write(text)

        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Terminal())
            generate("--prompt", "é", "--tokens", "12")
        assert writes[0] == "\x1b[1mé\x1b[0m"
        assert len([text for text in writes if text]) > 5
        assert "é" + "".join(writes[1:]) == printable(expected)


class TestPrompts:
    """Sources of prompts."""

    def test_sources_agree(self, generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Text, file, standard input and a line give the same."""
        path = tmp_path / "prompt.txt"
        path.write_text("für\n", encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("für\n".encode())))
        flags = ["--tokens", "5", "--json"]
        outputs = {
            generate(*flags, "--prompt", "für"),
            generate(*flags, "--prompt", "-"),
            generate(*flags, "--prompt-file", str(path)),
            generate(*flags, "--sample-input-file", str(path)),
        }
        assert len(outputs) == 1

    def test_empty_prompt_starts_a_document(self, generate) -> None:
        """No prompt and an empty one start behind the end of a document."""
        flags = ["--tokens", "5", "--json"]
        assert generate(*flags) == generate(*flags, "--prompt", "")

    def test_every_line_is_used(self, generate, tmp_path: Path) -> None:
        """Each line of the input file gives a line of the output file, in order."""
        source, target = tmp_path / "in.txt", tmp_path / "out.jsonl"
        source.write_text("one\n\nthird line\n", encoding="utf-8")
        flags = ["--sample-input-file", str(source), "--tokens", "4", "--micro-batch-size", "2"]
        assert generate(*flags, "--sample-output-file", str(target)) == ""
        found = records(target.read_text(encoding="utf-8"))
        assert [record["text"][:3] for record in found][::2] == ["one", "thi"]
        # The empty prompt is one token, that of a document's start.
        assert [record["length"] for record in found if not record["finished"]] == [7, 5, 14]
        assert generate(*flags, "--genfile", str(target)) == ""
        assert records(target.read_text(encoding="utf-8")) == found


class TestBadInput:
    """Wrong flags and prompts: they are named, and nothing is generated."""

    @pytest.mark.parametrize(
        "flags,expected",
        [
            (["--prompt", "a", "--prompt-file", "b"], "exclude each other"),
            (["--top-k", "2", "--top-p", "0.5"], "exclude each other"),
            (["--temperature", "0"], "use `--greedy`"),
            (["--tokens", "0"], "out of range"),
            (["--num-threads", "99999"], "out of range"),
            (["--prompt-file", "/nowhere/prompt.txt"], "cannot read the prompt file"),
            (["--json", "--sample-output-file", "x"], "exclude each other"),
            (["--sample-output-file", "/nowhere/x"], "no such directory"),
            (["--out-seq-length", "7", "--tokens", "7"], "exclude each other"),
            (["--logprobs", "2"], "needs `--json`"),
            (["--logprobs", "21", "--json"], "21"),
            (["--stop", ""], "the value is empty"),
            (["--min-p", "2"], "2"),
            (["--beam-width", "2", "--top-k", "5"], "`--top-k` cannot be used"),
            (["--beam-width", "2", "--no-cache"], "cannot be used"),
            (["--beam-width", "2", "--stop", "e"], "why: beam search does not support it"),
            (
                ["--greedy", "--temperature", "0.5"],
                "`--temperature` cannot be used with `--greedy`",
            ),
            (["--greedy", "--min-p", "0.5"], "`--min-p` cannot be used"),
            (["--greedy", "--seed", "5"], "`--seed` cannot be used"),
            (["--greedy", "--num-samples", "2"], "`--num-samples` cannot be used"),
            (["--seed", str(2**63)], "<= 9223372036854775807"),
            (["--json-schema", "/nowhere/s.json"], "`/nowhere/s.json` of `--json-schema`"),
            (["--beam-width", "2", "--num-samples", "3"], "is more than"),
            (["--length-penalty", "nan", "--beam-width", "2"], "nan"),
            (["--length-penalty", "2"], "`--length-penalty` needs `--beam-width`"),
            (["--beam-width", "2", "--seed", "5"], "`--seed` cannot be used"),
            (["--top-p-decay", "0.5"], "`--top-p-decay` needs `--top-p`"),
            (["--top-p", "0.9", "--top-p-bound", "0.5"], "needs `--top-p-decay`"),
            (["--top-p", "0.4", "--top-p-decay", "0.5", "--top-p-bound", "0.5"], "out of range"),
            (["--repetition-penalty", "0"], "out of range"),
            (["--promt", "x"], "unknown flag `--promt`"),
            (["--prompt", "x" * 33], "has 33 tokens, too many"),
            (["--prompt", "x" * 30, "--tokens", "4"], "leaves no room for 4 more"),
            (["--prompt", "\udcff"], "is not UTF-8"),
            (["--vocab-file", "nope", "--merge-file", "m"], "cannot read `--vocab-file nope`"),
            (["--precision", "fp9"], "does not offer it"),
        ],
    )
    def test_flags(self, run_directory: str, flags: list[str], expected: str) -> None:
        """A wrong flag or prompt is a usage error that says what."""
        base = ["--load", run_directory, "--device", "cpu"]
        with pytest.raises(ConfigError) as caught:
            run([*base, *flags])
        assert expected in caught.value.render()

    @pytest.mark.parametrize(
        "flags, expected",
        [
            (["--prompt", "x" * 33], "has 33 tokens, too many"),
            (["--prompt", "x" * 30, "--tokens", "4"], "leaves no room for 4 more"),
            (["--prompt", "\udcff"], "is not UTF-8"),
            (["--retro-neighbors", "{folder}/n.jsonl", "--prompt", "x"], "it reads no neighbours"),
            (["--json-schema", "{folder}/s.json", "--prompt", "x"], "schema cannot be used"),
            (["--chat"], "has no chat template"),
            (["--chat", "--chat-template", "{folder}/bad.jinja"], "is no valid template"),
            (
                ["--chat", "--chat-template", "{folder}/t.jinja", "--system-prompt", "x" * 33],
                "`--system-prompt` has 33 tokens, too many",
            ),
        ],
    )
    def test_refused_before_weights_are_read(
        self,
        run_directory: str,
        flags: list[str],
        expected: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """An error of settings or tokenizer costs no loading of a large model."""
        if "--json-schema" in flags:
            peer("llguidance")
        (tmp_path / "n.jsonl").write_text('["a"]\n')
        (tmp_path / "s.json").write_text('{"type": "nonesuch"}')
        (tmp_path / "bad.jinja").write_text("{% if %}")
        (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        monkeypatch.setattr("lmcore.inference.load.allocate", Mock(side_effect=AssertionError))
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
        with pytest.raises(ConfigError) as caught:
            run(
                [
                    *("--load", run_directory, "--device", "cpu"),
                    *(flag.format(folder=tmp_path) for flag in flags),
                ]
            )
        assert expected in caught.value.render()

    def test_load_is_required(self) -> None:
        """Without `--load` there is no model."""
        with pytest.raises(ConfigError, match="`--load` is required"):
            run(["--prompt", "x"])

    def test_no_checkpoint(self, tmp_path: Path) -> None:
        """A directory without a checkpoint is named."""
        with pytest.raises(CheckpointError, match="no checkpoint in"):
            run(["--load", str(tmp_path)])

    def test_unknown_device(self, run_directory: str) -> None:
        """A device that no plugin brings is an error."""
        with pytest.raises(DeviceError):
            run(["--load", run_directory, "--device", "abacus"])

    @pytest.mark.parametrize("batch", ["1", "4"])
    def test_the_memory_ends(
        self, run_directory: str, monkeypatch: pytest.MonkeyPatch, batch: str
    ) -> None:
        """The error names flags to change, in every phase; other errors are not changed."""
        raised: list[Exception] = [torch.OutOfMemoryError("tried to allocate 9 GiB\nmore")]

        def embed(*_arguments: object, **_options: object) -> None:
            raise raised[0]

        monkeypatch.setattr(GPT, "embed", embed)
        argv = ["--load", run_directory, "--device", "cpu", "--prompt", "x", "--tokens", "2"]
        argv += ["--micro-batch-size", batch]
        with pytest.raises(RunError) as caught:
            run(argv)
        assert caught.value.what == "out of memory while generating text"
        assert caught.value.why == "tried to allocate 9 GiB"
        assert ("`--micro-batch-size` (it is 4)" in str(caught.value.hint)) == (batch == "4")
        raised[0] = RuntimeError("something else")
        with pytest.raises(RuntimeError, match="something else"):
            run(argv)

    def test_long_line_before_the_first_sample(self, run_directory: str, tmp_path: Path) -> None:
        """A prompt that does not fit stops before any sample, its line is named."""
        source, target = tmp_path / "in.txt", tmp_path / "out.jsonl"
        source.write_text("short\n" + "x" * 40 + "\n", encoding="utf-8")
        argv = ["--load", run_directory, "--device", "cpu", "--sample-input-file", str(source)]
        with pytest.raises(ConfigError, match="prompt 2 has 40 tokens"):
            run([*argv, "--sample-output-file", str(target)])
        assert list(tmp_path.iterdir()) == [source]

    def test_loads_no_torch(self, tmp_path: Path) -> None:
        """A wrong flag and a missing checkpoint are found before torch is loaded."""
        for argv in (["--temperature", "0"], ["--load", str(tmp_path)], ["--help"]):
            code = (
                "import sys; from lmcore.cli.main import main; "
                f"main(['generate', *{argv!r}]); sys.exit('torch' in sys.modules)"
            )
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
            assert done.returncode == 0, done.stderr


def test_numbers_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of bare ids reads and writes ids, and its text follows its prompt."""
    model = GPT(SHAPE, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    model.initialize(3)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    save_checkpoint(tmp_path / "checkpoints", 5, tensors, {}, model_shape=SHAPE.to_dict())
    save_tokenizer(NullTokenizer(300), tmp_path / "tokenizer")
    flags = ["--load", str(tmp_path), "--device", "cpu", "--prompt", "7 8", "--tokens", "3"]
    assert run([*flags, "--json"]) == 0
    (record,) = records(capsys.readouterr().out)
    assert record["text"].split() == [str(token) for token in record["tokens"]]
    with pytest.raises(ConfigError, match="`x` is not a token id"):
        run([*flags[:4], "--prompt", "x"])
    assert run(flags) == 0
    assert capsys.readouterr().out.split()[:2] == ["7", "8"]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights(
    run_directory: str, generate, capsys: pytest.CaptureFixture[str], quantization: str
) -> None:
    """Text is generated in bf16 without a choice, with about the probabilities of the model."""
    flags = ["--prompt", "ab", "--tokens", "6", "--json", "--logprobs", "0", "--greedy"]
    (expected,) = records(generate(*flags))
    argv = ["--load", run_directory, "--device", "cpu", *flags, "--quantization", quantization]
    assert run(argv) == 0
    (found,) = records(capsys.readouterr().out)
    assert len(found["tokens"]) == 6
    first, other = found["logprobs"][0], expected["logprobs"][0]
    assert first["id"] == other["id"]
    assert first["logprob"] == pytest.approx(other["logprob"], abs=0.2)
    assert first["logprob"] != other["logprob"]


class TestProcesses:
    """Processes of a model that is divided; `tests/distributed` starts some."""

    def test_fewer_devices(self, generate, monkeypatch) -> None:
        """One process loads the whole model, and a warning names the way to start them."""
        warnings: list[str] = []
        monkeypatch.setattr(
            "lmcore.cli.loading.logger.warning",
            lambda text, *given: warnings.append(text % given),
        )
        flags = ["--prompt", "ab", "--tokens", "9"]
        expected = generate(*flags)
        assert not warnings
        assert generate(*flags, "--tensor-model-parallel-size", "3") == expected
        (warning,) = warnings
        assert "`--nproc-per-node 3` starts them all the same" in warning

    @pytest.mark.parametrize("given", ["1", "4"])
    def test_another_launcher(self, generate, monkeypatch, given: str) -> None:
        """A launcher has to start as many processes as the model has parts."""
        for name, value in {"WORLD_SIZE": given, "LOCAL_WORLD_SIZE": given}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("LOCAL_RANK", "0")
        with pytest.raises(ConfigError, match=f"a launcher started {given} of the 2 processes"):
            generate("--prompt", "ab", "--pipeline-model-parallel-size", "2")

    def test_several_of_one_process(self, generate, monkeypatch) -> None:
        """Two tasks of srun do not generate the same twice."""
        for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"):
            monkeypatch.setenv(name, "2")
        for name in ("PROCID", "LOCALID", "NODEID"):
            monkeypatch.setenv(f"SLURM_{name}", "0")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            monkeypatch.setenv(name, "")  # set by the command, and undone
        with pytest.raises(ConfigError, match="this process is one of 2"):
            generate("--prompt", "ab")

    def test_contradiction(self, generate) -> None:
        """The number of processes is the product of the sizes."""
        with pytest.raises(ConfigError, match="`--nproc-per-node 2` contradicts"):
            generate("--prompt", "ab", "--nproc-per-node", "2")
