"""`lmcore generate --chat` and `--interactive`, from lines to answers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from lmcore.base.errors import ConfigError
from lmcore.checkpoint import save_checkpoint
from lmcore.cli.generate import run
from lmcore.contract import OP_SPECS, OpTable
from lmcore.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer
from lmcore.data.tokenizer.saved import save_tokenizer
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.generation.chat import conversation
from lmcore.model.shape import ModelShape

POSITIONS = 96
SHAPE = ModelShape(2, 24, 3, 40, POSITIONS, 384, init_method_std=0.3)
TEMPLATE = """\
{% if messages[0].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}
{%- for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"""


def make_run(directory: Path, tokenizer: Tokenizer) -> str:
    """Write a run with a model of random weights."""
    model = GPT(SHAPE, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    model.initialize(3)
    with torch.no_grad():
        model.token_embedding.weight[97:123] *= 2.0
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    save_checkpoint(directory / "checkpoints", 5, tensors, {}, model_shape=SHAPE.to_dict())
    save_tokenizer(tokenizer, directory / "tokenizer")
    return str(directory)


@pytest.fixture(scope="module")
def byte_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of bytes, with a template beside it."""
    directory = tmp_path_factory.mktemp("run")
    (directory / "t.jinja").write_text(TEMPLATE)
    return make_run(directory, ByteTokenizer())


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run with the tokenizer of a chat model, whose turns end with the letter `a` or `e`."""
    folder = tmp_path_factory.mktemp("chat")
    letters = [chr(i) if 33 <= i < 127 else f"<0x{i:02X}>" for i in range(256)]
    library = tokenizers.Tokenizer(models.BPE({one: i for i, one in enumerate(letters)}, []))
    library.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    library.decoder = decoders.Fuse()
    library.add_special_tokens(["<end>"])
    library.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>", "chat_template": TEMPLATE.replace("<a>", "<end>")}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [97, 101]}))
    return make_run(
        folder / "run", build_tokenizer("HFTokenizer", tokenizer_name_or_path=str(folder))
    )


@pytest.fixture
def generate(byte_run: str, capsys: pytest.CaptureFixture[str], monkeypatch):
    """Runs the command with lines of standard input; returns its output and its notes."""

    def call(*flags: str, lines: str = "", load: str = byte_run) -> tuple[str, str]:
        stdin = SimpleNamespace(buffer=io.BytesIO(lines.encode("latin-1")), isatty=lambda: False)
        monkeypatch.setattr("sys.stdin", stdin)
        capsys.readouterr()
        argv = ["--load", load, "--device", "cpu", "--precision", "fp32", *flags]
        assert run(argv) == 0
        found = capsys.readouterr()
        return found.out, found.err

    return call


@pytest.fixture
def chat(generate, byte_run):
    """Runs a conversation of greedy answers of eight tokens."""

    def call(*lines: str, flags: tuple[str, ...] = ("--greedy",)) -> tuple[str, str]:
        file = str(Path(byte_run, "t.jinja"))
        own = ("--chat", "--tokens", "8", "--chat-template", file)
        return generate(*own, *flags, lines="".join(f"{line}\n" for line in lines))

    return call


class TestChat:
    """Conversations from a pipe."""

    def test_history(self, generate, chat) -> None:
        """Each answer is the text that follows the rendered conversation so far."""
        out, err = chat("ab", "c", "/reset", "", "ab")
        first, second, again = out.splitlines()
        assert again == first
        for prompt, answer in (("<u>ab<a>", first), (f"<u>ab<a>{first}<u>c<a>", second)):
            whole, _ = generate("--prompt", prompt, "--tokens", "8", "--greedy")
            assert whole == prompt + answer + "\n"
        assert err.count("(stopped at the limit of 8 tokens)") == 3
        assert "(forgot all messages)" in err

    def test_system_prompt(self, generate, chat) -> None:
        """A system prompt comes first, given by a flag or a command, which forgets the rest."""
        whole, _ = generate("--prompt", "<s>x y<u>ab<a>", "--tokens", "8", "--greedy")
        expected = whole.removeprefix("<s>x y<u>ab<a>")
        assert chat("ab", flags=("--greedy", "--system-prompt", "x y"))[0] == expected
        out, _ = chat("q", "/system x y", "ab", "/exit", "never")
        assert out.splitlines(keepends=True)[1:] == [expected]

    def test_seeds(self, chat) -> None:
        """Each answer has the next seed; sampling options count."""
        one, _ = chat("ab", "/reset", "ab", flags=("--seed", "4"))
        first, second = one.splitlines()
        assert first != second
        assert chat("ab", flags=("--seed", "5"))[0] == second + "\n"
        assert chat("ab", flags=("--seed", "5", "--top-k", "1"))[0] == chat("ab")[0]
        assert chat("ab", flags=("--greedy", "--no-cache"))[0] == chat("ab")[0]

    def test_stop_text(self, chat) -> None:
        """An answer ends before a stop text, without a note."""
        whole, _ = chat("ab")
        cut, err = chat("ab", flags=("--greedy", "--stop", whole[3:5]))
        assert cut == whole[: whole.index(whole[3:5])] + "\n"
        assert "(stopped" not in err

    def test_oldest_messages_are_dropped(self, generate, chat) -> None:
        """A conversation beyond the model's positions continues without its oldest messages."""
        out, err = chat("x" * 40, "y" * 20, "z" * 20)
        assert "(forgot the oldest 2 messages: the conversation does not fit" in err
        _, second, third = out.splitlines()
        prompt = f"<u>{'y' * 20}<a>{second}<u>{'z' * 20}<a>"
        whole, _ = generate("--prompt", prompt, "--tokens", "8", "--greedy")
        assert whole == prompt + third + "\n"

    def test_a_long_message(self, chat) -> None:
        """A message alone may use all positions but one, and no more."""
        out, err = chat("x" * (POSITIONS - 8), flags=("--greedy",))
        assert len(out) == 3 + 1
        assert "(stopped at the last position of the model)" in err
        with pytest.raises(ConfigError, match="the message has 97 tokens, too many for the model"):
            chat("x" * (POSITIONS - 5))

    def test_commands(self, generate, chat) -> None:
        """An unknown command is an error; two slashes begin a message with one."""
        with pytest.raises(ConfigError, match="`/rest` is not a command"):
            chat("/rest")
        whole, _ = generate("--prompt", "<u>/u<a>", "--tokens", "8", "--greedy")
        assert "<u>/u<a>" + chat("//u")[0] == whole

    def test_template_errors(self, generate, chat) -> None:
        """A refused message names the template; a run without one says what to do."""
        with pytest.raises(ConfigError, match=r"the chat template of `.*t.jinja` refuses"):
            chat("refuse")
        with pytest.raises(ConfigError, match=r"`.*` has no chat template") as caught:
            generate("--chat", lines="a\n")
        assert "--chat-template FILE" in caught.value.hint

    def test_lines_that_are_not_utf_8(self, chat) -> None:
        """A line of other bytes is an error."""
        with pytest.raises(ConfigError, match="a line of standard input is not UTF-8"):
            chat("\xff")

    def test_interrupt(self, chat, monkeypatch) -> None:
        """Ctrl-C ends a command that reads a pipe."""

        def interrupted(*_arguments: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(conversation, "generate_with_cache", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chat("a", "b")

    def test_end_of_turn(self, generate, chat_run) -> None:
        """Answers end at the end tokens of the model, and so does text without a conversation."""
        for flags in (("--chat",), ("--interactive",)):
            ended = 0
            out, err = generate(*flags, "--tokens", "30", lines="b\n" * 4, load=chat_run)
            for line in out.splitlines():
                text = line if flags == ("--chat",) else line[1:]
                assert "a" not in text
                assert "e" not in text
                ended += 1
            assert ended == 4
            assert err.count("the limit of") < 4


class TestInteractive:
    """Lines that are continued."""

    def test_lines(self, generate) -> None:
        """Each line is a prompt by itself."""
        flags = ("--tokens", "6", "--greedy")
        out, _ = generate("--interactive", *flags, lines="ab\n\n/exit\r\n")
        expected = [generate("--prompt", line, *flags)[0] for line in ("ab", "/exit")]
        assert out == "".join(expected)


def test_missing_template(byte_run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a template that is missing is named before a model is loaded."""
    monkeypatch.setattr("lmcore.inference.load.load_model", None)
    with pytest.raises(ConfigError, match="cannot read the chat template `missing`"):
        run(["--load", byte_run, "--chat", "--chat-template", "missing"])


@pytest.mark.parametrize(
    "flags,what",
    [
        (("--chat", "--interactive"), "`--chat` and `--interactive` exclude each other"),
        (("--chat", "--prompt", "a"), "`--prompt` cannot be used with `--chat`"),
        (("--interactive", "--json"), "`--json` cannot be used with `--interactive`"),
        (("--chat", "--num-samples", "2"), "`--num-samples` cannot be used with `--chat`"),
        (("--system-prompt", "a"), "`--system-prompt` needs `--chat`"),
        (("--interactive", "--chat-template", "a"), "`--chat-template` needs `--chat`"),
    ],
)
def test_contradictions(flags: tuple[str, ...], what: str) -> None:
    """Options without a meaning are errors, before anything is read."""
    with pytest.raises(ConfigError) as caught:
        run(["--load", "/nowhere", *flags])
    assert caught.value.what == what
