"""Sources in order: defaults < preset < files < flags, each value with where it is from."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
from stand_in_engine import stand_in_for_deepspeed

from lmcore.base.errors import ConfigError
from lmcore.config.load import EXCLUSIVE, load_config
from lmcore.config.section import Config, run_options
from lmcore.config.settings import LoadedConfig, Provenance, UnreadSettingError
from lmcore.config.validate import problems_of, validate


def problems(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(load_config(argv))
    return [one.what for one in [caught.value, *caught.value.others]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a file of settings in the working directory and return its name."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "run.yaml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return name

    return write_file


@pytest.mark.parametrize(
    "name,here",
    [("adamw", "adam"), ("sophiag", "sophia"), ("AdamWScheduleFree", "schedulefree")],
)
def test_optimizers_have_their_names_in_forks_too(name: str, here: str) -> None:
    """`OPT=sophiag` of Argonne's scripts is an optimizer here."""
    assert load_config(["--optimizer", name], announce=False).value("optimizer") == here


def test_problems_of_the_settings_come_with_unsupported_flags() -> None:
    """Flags that are refused do not hide what is wrong with the settings."""
    with pytest.raises(ConfigError) as caught:
        validate(load_config(["--epochs", "3", "--min-lr", "1"]))
    found = [one.what for one in [caught.value, *caught.value.others]]
    assert found[0] == "`--epochs 3` is not supported"
    assert found[1].startswith("`--min-lr 1` exceeds ")
    assert len(found) == 2


@pytest.mark.parametrize(
    "line,found",
    [
        ("--lr -1 --hidden-size 65", ["`--lr -1`: out of", "`--hidden-size 65` is not divisible"]),
        ("wrong.yaml --min-lr 1", ["wrong.yaml:2: `seed: x`", "`--min-lr 1` exceeds"]),
        ("--seed x --epochs 3", ["`--epochs 3` is not", "`--seed x`: expected"]),
        ("--bogus 1 --min-lr 1", ["unknown flag `--bogus`", "`--min-lr 1` exceeds"]),
        (
            "--seed x --engine deepspeed --tensor-model-parallel-size 8",
            ["`--seed x`", "`--tensor-model-parallel-size 8` cannot", "`num_attention_heads: 4`"],
        ),
    ],
)
def test_all_problems_come_in_one_round(
    write, monkeypatch: pytest.MonkeyPatch, line: str, found: list[str]
) -> None:
    """A value that cannot be read does not hide what is wrong with the other settings."""
    stand_in_for_deepspeed(monkeypatch)
    write("training:\n  seed: x\n", "wrong.yaml")
    reported = problems(line.split())
    assert [what[: len(start)] for what, start in zip(reported, found, strict=True)] == found


@pytest.mark.parametrize("name", run_options())
def test_a_setting_that_is_unread_is_not_judged(name: str) -> None:
    """No rule takes the default of a setting that could not be read for its value."""
    loaded = load_config([]).without({name})
    assert problems_of(loaded, world_size=2) == []
    with pytest.raises(UnreadSettingError):
        loaded.value(name)
    with pytest.raises(UnreadSettingError):
        loaded.given(name)


@pytest.mark.parametrize("wrong", ["--lrr 2", "--lr two", "missing.yaml"])
def test_settings_that_depend_on_an_unread_one_are_not_checked(wrong: str) -> None:
    """Rules are not applied if a setting has its default because it could not be read."""
    with pytest.raises(ConfigError) as caught:
        validate(load_config([*wrong.split(), "--min-lr", "1"]))
    assert caught.value.others == ()


def test_no_arguments_are_the_defaults() -> None:
    """Without arguments every value is the section's default and says so."""
    loaded = load_config([])
    assert loaded.config == Config()
    assert set(loaded.provenance) == set(run_options())
    assert set(loaded.provenance.values()) == {Provenance("default")}


def test_order_of_sources(write) -> None:
    """A flag beats a file, a file a preset, a preset a default, value by value."""
    path = write("preset: gpt2-124m\nmodel:\n  num_layers: 3\n  hidden_size: 96\n")
    loaded = load_config([path, "--hidden-size", "48"])
    assert loaded.preset == "gpt2-124m"
    assert loaded.files == ("run.yaml",)
    got = {name: (loaded.value(name), str(loaded.provenance[name])) for name in NAMES}
    assert got == {
        "hidden_size": (48, "--hidden-size"),
        "num_layers": (3, "run.yaml:3"),
        "num_attention_heads": (12, "preset: gpt2-124m"),
        "seed": (1234, "default"),
    }


NAMES = ("hidden_size", "num_layers", "num_attention_heads", "seed")


def test_later_file_wins_and_flag_preset_wins(write) -> None:
    """Files apply in the order given; `--preset` replaces a file's preset."""
    first = write("preset: gpt2-124m\nmodel:\n  num_layers: 3\n", "a.yaml")
    second = write("model:\n  num_layers: 5\n", "b.yaml")
    loaded = load_config([first, second, "--preset", "gpt2-345m"])
    assert loaded.value("num_layers") == 5
    assert loaded.value("hidden_size") == 1024
    assert loaded.provenance["num_layers"] == Provenance("file", "b.yaml:2")


def test_yaml_values_are_typed_by_their_option(write) -> None:
    """`lr: 1e-4`, which YAML 1.1 takes for text, is a number; `name: no` is a name."""
    loaded = load_config(
        [
            write(
                "optimizer:\n  lr: 1e-4\nlogging: {name: no, tensorboard: no}\n"
                "data:\n  data_path: [a, b]\n  split: 969,30,1\ntraining:\n  train_iters: 1_000\n"
            )
        ]
    )
    assert loaded.config.optimizer.lr == 1e-4
    assert loaded.config.logging.name == "no"
    assert loaded.config.logging.tensorboard is False
    assert loaded.config.data.data_path == ("a", "b")
    assert loaded.config.data.split == "969,30,1"
    assert loaded.config.training.train_iters == 1000


@pytest.mark.parametrize(
    "text,message,hint",
    [
        ("modle:\n  num_layers: 3\n", "1: unknown section `modle`", "`model`?"),
        ("train:\n  lr: 3\n", "1: unknown section `train`", "did you mean `training`?"),
        ("model:\n  num_layer: 3\n", "2: unknown key `num_layer`", "`num_layers`?"),
        ("training:\n  batch_size: 3\n", "2: unknown key `batch_size`", "`micro_batch_size`"),
        ("training:\n  lr: 3\n", "2: `lr` is not in `training`", "below `optimizer:`"),
        ("training:\n  lrr: 3\n", "2: unknown key `lrr`", "`lr` of `optimizer`?"),
        ("lr: 3\n", "1: `lr` is outside its section", "below `optimizer:`"),
        ("model: 3\n", "1: section `model` holds no settings", "indented"),
        ("model:\n  num_layers: x\n", "2: `num_layers: x`: expected an integer >= 1", None),
        ("model:\n  num_layers: 0\n", "2: `num_layers: 0`: out of range", None),
        (
            "model:\n  num_layers: [1]\n",
            "2: `num_layers: [1]`: must be one integer, got a list",
            "without brackets",
        ),
        (
            "model:\n  num_layers: [1, 2]\n",
            "2: `num_layers: [1, 2]`: must be one integer, got a list",
            None,
        ),
        (
            "logging:\n  name: [a]\n",
            "2: `name: [a]`: must be one text, got a list",
            "without brackets",
        ),
        (
            "preset: [gpt2-124m]\n",
            "1: `preset: [gpt2-124m]`: must be one text, got a list",
            "without brackets",
        ),
        ("model:\n  num_layers:\n", "2: `num_layers: `: `num_layers` cannot be empty", None),
        ("preset: gpt3\n", "1: `preset: gpt3`: unknown choice", "`gpt2-124m`"),
        ("zzz: {}\n", "1: unknown section `zzz`", "`model`"),
    ],
)
def test_file_problems(write, text: str, message: str, hint: str | None) -> None:
    """A wrong file says file, line, what is wrong and what was likely meant."""
    with pytest.raises(ConfigError) as caught:
        load_config([write(text)])
    assert caught.value.what == f"run.yaml:{message}"
    assert caught.value.others == ()
    assert hint is None or hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    "flag,value,what",
    [
        ("--load", "", "the path is empty"),
        ("--save", " ", "the path is empty"),
        ("--data-cache-path", "", "the path is empty"),
        ("--save", "s3://bucket/run", "a URL is not a path"),
        ("--load", "https://huggingface.co/gpt2", "a URL is not a path"),
        ("--load", "x" * 300, r"x{80}\.\.\.`: this path cannot be used"),
        ("--data-path", "/".join(["y" * 200] * 30), "this path cannot be used"),
        ("--save", "d/" * 1500, "this path cannot be used"),
        ("--vocab-file", "a\0b", "a path has no NUL character"),
        ("--save", "~/run", "`~` is not expanded here"),
        ("--data-path", "${DATA}/web", "variables are not expanded here"),
    ],
)
def test_text_that_is_no_path(flag: str, value: str, what: str) -> None:
    """An empty path, which would silently be the default, and what is no path are refused."""
    with pytest.raises(ConfigError, match=what):
        load_config(["--train-iters", "1", flag, value])


@pytest.mark.parametrize(
    "flag",
    [option.flag for option in run_options().values() if option.type is str],
)
def test_empty_text(flag: str) -> None:
    """An empty text, often from an unset variable, is refused, but a prompt may be empty."""
    name = flag.removeprefix("--").replace("-", "_")
    if name == "sample_prompt":
        assert load_config([flag, ""]).value(name) == ""
        return
    with pytest.raises(ConfigError) as caught:
        load_config([flag, ""])
    assert f'`{flag} ""`' in caught.value.what
    assert "is empty" in caught.value.what
    assert "unset" in str(caught.value.hint)
    assert caught.value.others == ()


def test_empty_text_in_a_file(write) -> None:
    """The same in a file, whose key without a value is still the default."""
    with pytest.raises(ConfigError, match='`device: ""`: the value is empty'):
        load_config([write('accelerator:\n  device: ""\n')])
    assert load_config([write("accelerator:\n  device:\n")]).value("device") is None


@pytest.mark.parametrize("flag", ["--load", "--save", "--data-path", "--data-file-list"])
def test_symbolic_links_in_a_circle(flag: str, tmp_path: Path) -> None:
    """A path that leads in a circle is refused with that reason."""
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(ConfigError, match="this path cannot be used") as caught:
        load_config([flag, str(tmp_path / "circle")])
    assert "symbolic links" in str(caught.value.why)


def test_a_directory_that_may_not_be_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path below it is refused, and no later check of the path fails."""

    def refused(_path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(ConfigError, match="this path cannot be used") as caught:
        load_config(["--save", "closed/run"])
    assert caught.value.why == "Permission denied"


def test_infinity_is_out_of_range() -> None:
    """The range of a number says that it must be finite if that is what is wrong."""
    with pytest.raises(ConfigError) as caught:
        load_config(["--lr", "inf"])
    assert "finite" in str(caught.value.why)


def test_empty_sections_are_fine(write) -> None:
    """A section without settings sets nothing."""
    assert load_config([write("model:\ntraining: {}\n")]).config == Config()


def test_all_problems_at_once(write) -> None:
    """Flags, files and preset are all read before anything is reported."""
    path = write("model:\n  num_layer: 3\n  hidden_size: 0\n")
    found = problems([path, "absent.yaml", "--lrr", "1", "--seed", "x", "--preset", "gpt-1b"])
    assert found == [
        "unknown flag `--lrr`",
        "`--seed x`: expected an integer >= 0 and <= 4294967295",
        "`--preset gpt-1b`: unknown choice",
        "run.yaml:2: unknown key `num_layer`",
        "run.yaml:3: `hidden_size: 0`: out of range",
        "cannot read the file `absent.yaml`",
    ]


def test_exclusive_options_replace_each_other_between_sources(write) -> None:
    """A flag's `--train-samples` replaces a file's `train_iters`, a null replaces nothing."""
    path = write("training:\n  train_iters: 5\noptimizer:\n  lr_warmup_samples: 9\n")
    loaded = load_config(["--preset", "gpt2-124m", path, "--train-samples", "64"])
    assert loaded.config.training.train_iters is None
    assert loaded.provenance["train_iters"] == Provenance("default")
    assert loaded.config.optimizer.lr_warmup_fraction is None
    kept = load_config([path, write("training:\n  train_samples: null\n", "b.yaml")])
    assert kept.config.training.train_iters == 5


def test_default_warmup(write) -> None:
    """The default warm-up is shown with its value, and ends with a warm-up in steps or samples."""
    plain = load_config(["--lr", "0.002"])
    assert plain.value("lr_warmup_fraction") == 0.05
    assert plain.provenance["lr_warmup_fraction"] == Provenance("default")
    steps = load_config(["--lr-warmup-iters", "3"])
    assert steps.value("lr_warmup_fraction") is None
    assert str(steps.provenance["lr_warmup_fraction"]) == "derived: lr_warmup_iters is given"
    path = write("optimizer:\n  lr_warmup_iters: 3\n")
    again = load_config([path, "--lr-warmup-fraction", "0.1"])
    assert again.value("lr_warmup_iters") == 0
    assert again.value("lr_warmup_fraction") == 0.1


def test_a_text_and_a_data_set_replace_each_other(write) -> None:
    """A flag's dataset replaces a file's corpus; an empty one in a later file replaces nothing."""
    path = write("data:\n  corpus: shakespeare\n  data_path: []\n")
    assert load_config([path]).value("corpus") == "shakespeare"
    loaded = load_config([path, "--data-path", "a"])
    assert (loaded.value("corpus"), loaded.value("data_path")) == (None, ("a",))
    empty = write("data:\n  data_path: []\n", "b.yaml")
    assert load_config([path, empty]).value("corpus") == "shakespeare"


@pytest.mark.parametrize("flags", ["--data-path none", "empty.yaml"])
def test_a_list_is_emptied(write, flags: str) -> None:
    """`none` on the command line and nothing in a later file empty the list of an earlier file."""
    path = write("data:\n  data_path: [a]\n  valid_data_path: b\n")
    write("data:\n  data_path:\n", "empty.yaml")
    loaded = load_config([path, *flags.split(), "--valid-data-path", "none"])
    assert loaded.value("data_path") == ()
    assert loaded.value("valid_data_path") == ()
    swapped = load_config([path, "--valid-data-path", "none", "--corpus", "shakespeare"])
    assert swapped.config.data.corpus == "shakespeare"
    assert swapped.config.data.data_path == ()


@pytest.mark.parametrize(
    "section,line,expected",
    [
        ("data", "data_path: web", ("conf/web",)),
        (
            "data",
            "data_path: [0.3, web, 0.7, /data/books]",
            ("0.3", "conf/web", "0.7", "/data/books"),
        ),
        (
            "data",
            "train_weighted_split_paths: 't: 1 0:1 web, 2 0:1 /b'",
            ("t: 1 0:1 conf/web, 2 0:1 /b",),
        ),
        ("data", "valid_weighted_split_paths: ['v:', '1', '0:1', web]", ("v: 1 0:1 conf/web",)),
        ("data", "test_weighted_split_paths: 't: web'", ("t: web",)),
        ("data", "data_file_list: list.txt", "conf/list.txt"),
        ("data", "data_cache_path: ../cache", "conf/../cache"),
        ("data", "vocab_file: vocab.json", "conf/vocab.json"),
        ("data", "tokenizer_model: null", None),
        ("checkpoint", "load: runs/a", "conf/runs/a"),
        ("checkpoint", "save: runs/a", "conf/runs/a"),
        ("logging", "tensorboard_dir: tb", "conf/tb"),
        ("logging", "name: gpt", "gpt"),
    ],
)
def test_paths_are_relative_to_their_file(write, section: str, line: str, expected: object) -> None:
    """Relative paths in a file are relative to the file, also between weights and in ranges."""
    Path("conf").mkdir()
    path = write(f"{section}:\n  {line}\n", "conf/run.yaml")
    assert load_config([path]).value(line.partition(":")[0]) == expected


def test_paths_of_a_deepspeed_file(write) -> None:
    """DeepSpeed's file is found beside the file that names it."""
    Path("conf").mkdir()
    write('{"gradient_clipping": 3}', "conf/ds.json")
    path = write("parallel:\n  engine: deepspeed\n  deepspeed_config: ds.json\n", "conf/run.yaml")
    assert load_config([path]).value("clip_grad") == 3


def test_a_path_of_the_working_directory(write, caplog: pytest.LogCaptureFixture) -> None:
    """A path that is there for the working directory only is an error with the path to write."""
    Path("conf").mkdir()
    write("", "web.idx")
    path = write("data:\n  data_path: web\n", "conf/run.yaml")
    with pytest.raises(ConfigError) as caught:
        load_config([path])
    assert caught.value.what == "conf/run.yaml:2: `data_path: web`: there is no `conf/web`"
    assert "write `../web`" in str(caught.value.hint)
    assert load_config([write("data:\n  data_path: ../web\n", "conf/b.yaml")])
    Path("runs").mkdir()
    load_config([write("checkpoint:\n  save: runs\n", "conf/c.yaml")])
    assert caplog.messages == ["conf/c.yaml:2: `save: runs` is `conf/runs`: relative to the file"]


def test_tokenizer_of_vocabulary_and_merges() -> None:
    """Vocabulary and merges without a type are GPT-2's tokenizer, as in Megatron's commands."""
    loaded = load_config(["--vocab-file", "v.json", "--merge-file", "m.txt"])
    assert loaded.config.data.tokenizer_type == "GPT2BPETokenizer"
    assert loaded.provenance["tokenizer_type"].kind == "derived"
    other = load_config(["--vocab", "v", "--merge-file", "m", "--tokenizer-type", "Own"])
    assert other.config.data.tokenizer_type == "Own"


@pytest.mark.parametrize("family", ["bert", "ICT", "t5"])
def test_tokenizer_of_a_vocabulary_alone(family: str) -> None:
    """A vocabulary is WordPiece's where Megatron's script of the family takes it so."""
    loaded = load_config(["--model-family", family, "--vocab-file", "bert-vocab.txt"])
    assert loaded.config.data.tokenizer_type == "BertWordPieceLowerCase"
    assert loaded.provenance["tokenizer_type"].kind == "derived"
    both = ["--model-family", family, "--vocab-file", "v.json", "--merge-file", "m.txt"]
    assert load_config(both).config.data.tokenizer_type == "GPT2BPETokenizer"
    assert load_config(["--vocab-file", "bert-vocab.txt"]).config.data.tokenizer_type is None
    retro = load_config(["--model-family", "retro", "--vocab-file", "v.json"])
    assert retro.config.data.tokenizer_type is None


def test_exclusive_names_exist() -> None:
    """The groups name options that there are."""
    assert {name for group in EXCLUSIVE for name in group} <= set(run_options())


def test_a_switch_that_is_off_excludes_nothing(tmp_path: Path) -> None:
    """Without mock data, the data of a file stays; with it, that is replaced."""
    file = tmp_path / "run.yaml"
    file.write_text("data:\n  corpus: shakespeare\n")
    assert load_config([str(file), "--no-mock-data"]).config.data.corpus == "shakespeare"
    assert load_config([str(file), "--mock-data"]).config.data.corpus is None


def test_megatron_command_is_understood(caplog: pytest.LogCaptureFixture) -> None:
    """Old flags set today's options, are named in one line, no warning, and remain the source."""
    with caplog.at_level(logging.INFO, logger="lmcore"):
        loaded = load_config(["--batch-size", "3", "--warmup", ".01", "--bf16"])
    assert loaded.config.training.micro_batch_size == 3
    assert loaded.config.optimizer.lr_warmup_fraction == 0.01
    assert loaded.config.accelerator.precision == "bf16"
    assert loaded.provenance["precision"] == Provenance("flag", "--bf16")
    record, defaults = caplog.records
    assert (record.levelno, record.message) == (logging.INFO, loaded.notices[0])
    assert (defaults.levelno, defaults.message) == (logging.INFO, loaded.notices[1])
    assert record.message == (
        "3 Megatron flags were translated: `--batch-size 3` -> `--micro-batch-size 3`, "
        "`--warmup .01` -> `--lr-warmup-fraction .01`, `--bf16` -> `--precision bf16`"
    )


def test_old_and_new_name_clash() -> None:
    """An old name and today's are two settings in Megatron: different values are a conflict."""
    assert problems(["--batch-size", "3", "--micro-batch-size", "4"]) == [
        "`--micro-batch-size` is given more than once, with different values"
    ]


def test_the_last_value_of_a_flag_counts(caplog: pytest.LogCaptureFixture) -> None:
    """An override at the end of a launch line counts, and is the source; a line names both."""
    with caplog.at_level(logging.INFO, logger="lmcore"):
        loaded = load_config(["--lr", "1e-3", "--num-layers", "3", "--lr=2e-3"])
    assert loaded.config.optimizer.lr == 2e-3
    assert loaded.shown("lr") == "`--lr 2e-3`"
    (record,) = caplog.records
    assert record.message == (
        "given more than once, the last value counts: `--lr 2e-3` (not `--lr 1e-3`)"
    )


def test_shown_is_what_the_user_wrote(write) -> None:
    """Messages quote the flag, or the file's line, or say that it is the default."""
    loaded: LoadedConfig = load_config([write("model:\n  num_layers: 3\n"), "--lr", "1e-3"])
    assert loaded.shown("lr") == "`--lr 1e-3`"
    assert loaded.shown("num_layers") == "`num_layers: 3` (run.yaml:2)"
    assert loaded.shown("seed") == "`seed: 1234` (the default)"
