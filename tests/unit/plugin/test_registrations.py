"""Plugins' additions to the command line: options, commands, corpora, tokenizers, engines."""

from __future__ import annotations

import dataclasses
import logging
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError, PluginError
from lmcore.config.load import load_config
from lmcore.config.option import REQUIRED, option
from lmcore.config.validate import problems_of
from lmcore.contract import PluginInfo
from lmcore.contract.tokenizer import Tokenizer
from lmcore.hookspecs import hookimpl
from lmcore.model.checkpoint_format import CheckpointFormat, formats
from lmcore.model.command import Command
from lmcore.model.training_engine import Lack, TrainingEngine, engine_named, engines
from lmcore.plugin import PluginState, discover
from lmcore.plugin.registrations import (
    added_records,
    load_command,
    plugin_commands,
    plugin_corpora,
    plugin_sections,
    plugin_tasks,
    registered_types,
    restore_records,
)


class Point:
    """An entry point that loads an object made by the test."""

    def __init__(self, name, plugin):
        self.name = name
        self.value = f"{name}.plugin"
        self.plugin = plugin
        self.dist = types.SimpleNamespace(name=f"lmcore-{name}", version="1.0")

    def load(self):
        if isinstance(self.plugin, BaseException):
            raise self.plugin
        return self.plugin


def found(hook, *, env=None, **adds):
    """Return plugins by name; each registers by its function, and fails if it is an exception."""
    points = []
    for name, add in adds.items():
        plugin = types.SimpleNamespace(
            lmcore_plugin_info=hookimpl(lambda name=name: PluginInfo(name, ">=1,<2"))
        )
        plugin.lmcore_plugin_info = hookimpl(_info(name))
        setattr(plugin, hook, hookimpl(_adder(add)))
        points.append(Point(name, add if isinstance(add, BaseException) else plugin))
    return discover(env=env or {}, entry_points=points, probe=False)


def _info(name):
    def lmcore_plugin_info():
        return PluginInfo(name, ">=1,<2")

    return lmcore_plugin_info


def _adder(add):
    def hook(registry):
        add(registry)

    return hook


def record(plugins, name):
    return next(one for one in plugins if one.name == name)


def refusal(hook, collect, add):
    """Return what the warning says of a plugin `mine` that registers as *add* does."""
    result = collect(found(hook, mine=add))
    assert not getattr(result, "sections", result)
    failures = getattr(result, "failures", None)
    return failures["mine"] if failures else result.left_out["mine"].reason


# Options


@dataclass(frozen=True)
class Depth:
    """Settings of a depth."""

    depth: int = option(3, "Depth in metres.", minimum=1)
    dry: bool = option(True, "Stay dry.")


def add_depth(registry):
    registry.add(Depth)


def test_a_section_is_known_by_its_plugin():
    """Its options carry the plugin's name, in flags and among all options."""
    sections = plugin_sections(found("lmcore_add_options", mine=add_depth, **{"a-b": add_depth}))
    assert sections.sections == {"mine": Depth, "a-b": Depth}
    flags = {name: one.flag for name, one in sections.options.items()}
    assert flags == {
        "mine_depth": "--mine-depth",
        "mine_dry": "--mine-dry",
        "a_b_depth": "--a-b-depth",
        "a_b_dry": "--a-b-dry",
    }
    assert sections.settings({"mine_depth": 7}) == {"mine": Depth(7), "a-b": Depth()}


def section_of(kind=int, default=3, /, *, frozen=True, help_="Depth.", name="depth", **more):
    fields = {"__annotations__": {name: kind}, name: option(default, help_, **more)}
    return dataclass(frozen=frozen)(type("Made", (), fields))


@dataclass(frozen=True)
class Plain:
    """No option."""

    depth: int = 3


@dataclass(frozen=True)
class Empty:
    """No field."""


@pytest.mark.parametrize(
    "section, why",
    [
        (3, "a section is a dataclass"),
        (object, "a section is a dataclass"),
        (Depth(), "a section is a dataclass"),
        (Plain, "`depth` is not"),
        (Empty, "it has none"),
        (section_of(frozen=False), "a section is frozen"),
        (section_of(int, "x"), "expected an integer"),
        (section_of(int, 0, minimum=1), "out of range"),
        (section_of(str, 5), "not of its type"),
        (section_of(dict, None), "its types cannot be read"),
        (section_of("Nothing", None), "its types cannot be read"),
        (section_of(help_=" "), "`depth` has no help"),
        (section_of(name="Depth"), "`Depth` is not in small letters"),
    ],
)
def test_a_wrong_section_is_refused(section, why):
    """The plugin adds no options, and the reason says what of the section is wrong."""
    reason = refusal("lmcore_add_options", plugin_sections, lambda r: r.add(section))
    assert why in reason
    assert "plugin `mine` (lmcore-mine 1.0)" in reason


def test_an_option_without_default_is_refused():
    """A run can always be started without saying anything about a plugin."""
    section = section_of(int, REQUIRED)
    reason = refusal("lmcore_add_options", plugin_sections, lambda r: r.add(section))
    assert "`depth` has no default" in reason


@pytest.mark.parametrize(
    "plugin, field, owner",
    [
        ("train", "iters", "`--train-iters`, which is taken: it is lmcore's"),
        ("no", "compile", "`--no-compile`, which is taken: it is lmcore's"),
        ("rotary", "interleaved", "`--rotary-interleaved`, which is taken: it is Megatron's"),
        ("model", "depth", "the section `model` is lmcore's own"),
        ("preset", "depth", "the section `preset` is lmcore's own"),
        ("My Plugin", "depth", "small letters, digits and dashes"),
    ],
)
def test_a_flag_that_is_taken_is_refused(plugin, field, owner):
    """Neither the core's flags and sections nor Megatron's can be taken."""
    plugins = found("lmcore_add_options", **{plugin: lambda r: r.add(section_of(name=field))})
    assert owner in plugin_sections(plugins).left_out[plugin].reason


def test_flags_of_two_plugins_that_meet_are_refused():
    """Field `b_c` of `a` and field `c` of `a-b` have one flag; the second plugin is left out."""
    plugins = found(
        "lmcore_add_options",
        a=lambda r: r.add(section_of(name="b_c")),
        **{"a-b": lambda r: r.add(section_of(name="c"))},
    )
    sections = plugin_sections(plugins)
    assert list(sections.sections) == ["a"]
    assert "`--a-b-c`, which is taken: it is plugin `a`" in sections.left_out["a-b"].reason


def test_a_second_section_is_refused():
    """A plugin has one section; one that fails midway adds nothing."""

    def twice(registry):
        registry.add(Depth)
        registry.add(Depth)

    assert "a second section" in refusal("lmcore_add_options", plugin_sections, twice)


def test_disabled_and_failed_plugins_are_distinguished(caplog):
    """A section of a plugin that is off is passed over later, a failed one's is an error."""
    plugins = found(
        "lmcore_add_options",
        env={"LMCORE_PLUGINS": "good,bad,worse"},
        good=add_depth,
        away=add_depth,
        bad=lambda r: 1 / 0,
        worse=ImportError("libx.so"),
    )
    sections = plugin_sections(plugins)
    assert list(sections.sections) == ["good"]
    wanted = {name: one.wanted for name, one in sections.left_out.items()}
    assert wanted == {"away": True, "bad": False, "worse": False}
    assert "ZeroDivisionError" in sections.left_out["bad"].reason
    assert "libx.so" in sections.left_out["worse"].reason
    assert "`bad` (lmcore-bad 1.0) is left out at `lmcore_add_options`" in caplog.text


def test_a_section_may_refuse_its_values():
    """A section's own error is shown unchanged; any other exception names the plugin."""

    def picky(error):
        def check(self):
            raise error

        made = section_of()
        made.__post_init__ = check
        return dataclass(frozen=True)(type("Picky", (made,), {"__post_init__": check}))

    for error, text in ((ConfigError("too deep"), "too deep"), (ValueError("x"), "plugin `mine`")):
        section = picky(error)
        plugins = found("lmcore_add_options", mine=lambda r, section=section: r.add(section))
        with pytest.raises(ConfigError, match=text):
            plugin_sections(plugins).settings()


# Commands


def test_commands_of_plugins():
    """Each command is found by its name, with its plugin."""
    plugins = found(
        "lmcore_add_commands", mine=lambda r: r.add("mine-dig", "pkg.mod:dig", "Dig a hole. ")
    )
    commands = plugin_commands(plugins)
    assert dict(commands) == {"mine-dig": Command("mine-dig", "Dig a hole.", "pkg.mod:dig")}
    assert commands.plugins["mine-dig"].name == "mine"


@pytest.mark.parametrize(
    "arguments, why",
    [
        (("Dig", "a:b", "Dig."), "registers 'Dig' as a command"),
        (("-dig", "a:b", "Dig."), "registers '-dig' as a command"),
        ((3, "a:b", "Dig."), "registers 3 as a command"),
        (("train", "a:b", "Dig."), "the command `train`, which is taken: it is lmcore's"),
        (("dig a hole", "a:b", "Dig."), "registers 'dig a hole' as a command"),
        (("train fast", "a:b", "Dig."), "`train` is taken: it is a command of lmcore"),
        (("dig", "a.b", "Dig."), "`package.module:function`"),
        (("dig", "a b:c", "Dig."), "`package.module:function`"),
        (("dig", None, "Dig."), "`package.module:function`"),
        (("dig", "a:b", ""), "a summary is one line"),
        (("dig", "a:b", "Dig.\nDeep."), "a summary is one line"),
    ],
)
def test_a_wrong_command_is_refused(arguments, why):
    """Malformed or taken: the plugin adds no commands."""
    reason = refusal(
        "lmcore_add_commands",
        lambda plugins: plugin_commands(plugins, {"train": "lmcore"}),
        lambda r: r.add(*arguments),
    )
    assert why in reason


def test_a_command_of_another_plugin_cannot_be_taken():
    """The first in the order of names keeps it, and of the second nothing is kept."""

    def second(registry):
        registry.add("fill", "b:fill", "Fill.")
        registry.add("dig", "b:dig", "Dig.")

    plugins = found("lmcore_add_commands", one=lambda r: r.add("dig", "a:dig", "Dig."), two=second)
    commands = plugin_commands(plugins)
    assert {name: one.load for name, one in commands.items()} == {"dig": "a:dig"}
    assert "it is plugin `one` (lmcore-one 1.0)'s" in commands.failures["two"]
    assert "`two`" in commands.why_missing()


def test_a_word_is_a_command_or_a_group():
    """A plugin cannot make a command of another's group, nor the other way about."""

    def adder(name):
        return lambda registry: registry.add(name, "a:dig", "Dig.")

    for first, second, what in (("dig", "dig deep", "command"), ("dig deep", "dig", "group")):
        plugins = found("lmcore_add_commands", one=adder(first), two=adder(second))
        commands = plugin_commands(plugins)
        assert list(commands) == [first]
        assert f"it is a {what}" in commands.failures["two"]


@pytest.fixture
def digging(monkeypatch):
    """A module `digging` whose attributes are the targets."""
    module = types.ModuleType("digging")
    module.dig = len
    module.forget = lambda argv: None
    module.shovel = "iron"
    monkeypatch.setitem(sys.modules, "digging", module)


def loaded(target):
    plugins = found("lmcore_add_commands", mine=lambda r: r.add("dig", target, "Dig."))
    commands = plugin_commands(plugins)
    return load_command(commands["dig"], commands.plugins["dig"])


@pytest.mark.usefixtures("digging")
def test_a_command_is_called_with_its_arguments():
    """Its exit status is what it returns."""
    assert loaded("digging:dig")(["a", "b"]) == 2


@pytest.mark.usefixtures("digging")
@pytest.mark.parametrize(
    "target, why",
    [
        ("nowhere.at_all:dig", "ModuleNotFoundError: No module named 'nowhere'"),
        ("digging:hole", "AttributeError"),
        ("digging:shovel", "`digging:shovel` is 'iron'"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_an_error(target, why):
    """The message names command, plugin and cause; the status is 1."""
    with pytest.raises(PluginError) as caught:
        loaded(target)
    assert caught.value.what == (
        "command `dig` of plugin `mine` (lmcore-mine 1.0) cannot be loaded"
    )
    assert why in caught.value.why
    assert caught.value.exit_status == 1


@pytest.mark.usefixtures("digging")
def test_a_command_without_a_status_is_an_error():
    """None is not taken for success."""
    with pytest.raises(PluginError, match="returned None"):
        loaded("digging:forget")([])


# Corpora


def test_corpora_of_plugins(tmp_path):
    """A text is found by its name, its path as a `Path`; the file is not looked at yet."""
    path = tmp_path / "none.txt"
    plugins = found("lmcore_add_corpora", mine=lambda r: r.add("holes", str(path), "Of holes."))
    one = plugin_corpora(plugins)["holes"]
    assert (one.path, one.summary) == (path, "Of holes.")


@pytest.mark.parametrize(
    "name, path, why",
    [
        ("../x", "/x", "registers '../x' as a corpus"),
        ("a//b", "/x", "registers 'a//b' as a corpus"),
        ("", "/x", "registers '' as a corpus"),
        ("holes", "holes.txt", "a path is absolute"),
        ("holes", 3, "a path is absolute"),
        ("shakespeare", "/x", "which is taken: it is lmcore's"),
    ],
)
def test_a_wrong_corpus_is_refused(name, path, why):
    """A name that is no file name, a path that depends on the folder, a name that is taken."""
    reason = refusal(
        "lmcore_add_corpora",
        lambda plugins: plugin_corpora(plugins, {"shakespeare": "lmcore"}),
        lambda r: r.add(name, path, "Of holes."),
    )
    assert why in reason


# Tokenizer types


class Words(Tokenizer):
    """One id."""

    name = "Words"
    vocab_size = 2
    eod = 1

    def encode(self, text):
        return [0] * len(text)

    def decode(self, ids):
        return "x" * len(ids)

    def describe(self):
        return {"type": self.name}


def words(**options):
    return Words()


def build(factory, name="Words"):
    plugins = found("lmcore_add_tokenizers", mine=lambda r: r.add(name, factory))
    return registered_types(plugins)[name](vocab_file=None, merge_file=None, vocab_size=None)


def test_types_of_plugins():
    """The factory is called with the options of the command line."""
    assert isinstance(build(words), Words)


@pytest.mark.parametrize(
    "name, factory, why",
    [
        ("ByteTokenizer", words, "which is taken: it is lmcore's"),
        ("my words", words, "registers 'my words' as a tokenizer type"),
        ("Words", "words", "a factory is a function"),
        ("Words", Words, "a factory of other arguments"),
        ("Words", lambda vocab_file, merge_file: Words(), "a factory of other arguments"),
    ],
)
def test_a_wrong_type_is_refused(name, factory, why):
    """A name of lmcore's, or a factory that could not be called."""
    reason = refusal(
        "lmcore_add_tokenizers",
        lambda plugins: registered_types(plugins, {"ByteTokenizer": "lmcore"}),
        lambda r: r.add(name, factory),
    )
    assert why in reason


def variant(**attributes):
    return lambda **options: type("Variant", (Words,), attributes)()


def fails(**options):
    raise OSError("no words")


@pytest.mark.parametrize(
    "factory, why",
    [
        (fails, "raised OSError: no words"),
        (lambda **options: object(), "not a `lmcore.contract.tokenizer.Tokenizer`"),
        (variant(name="Letters"), "calls itself 'Letters'"),
        (variant(vocab_size=0), "`vocab_size` is 0"),
        (variant(vocab_size=None), "`vocab_size` is None"),
        (variant(eod=2), "`eod` is 2, which is no id below 2"),
        (variant(eod="end"), "`eod` is 'end'"),
    ],
)
def test_what_a_factory_makes_is_checked(factory, why):
    """A factory that raises or makes something else is an error that names the plugin."""
    with pytest.raises(PluginError) as caught:
        build(factory)
    assert "`Words` of plugin `mine` (lmcore-mine 1.0)" in caught.value.what
    assert why in caught.value.why


def test_an_error_in_words_passes():
    """A factory's error for the user is raised unchanged."""

    def wants_file(**options):
        raise ConfigError("`Words` needs `--vocab-file`")

    with pytest.raises(ConfigError, match="needs `--vocab-file`"):
        build(wants_file)


# All


@pytest.mark.parametrize(
    "hook, collect",
    [
        ("lmcore_add_options", plugin_sections),
        ("lmcore_add_commands", plugin_commands),
        ("lmcore_add_corpora", plugin_corpora),
        ("lmcore_add_tokenizers", registered_types),
    ],
)
def test_a_plugin_that_raises_takes_nobody_down(hook, collect, caplog):
    """It is warned about with its cause; a plugin that never loaded is a reason too."""
    plugins = found(hook, bad=lambda r: 1 / 0, gone=ImportError("libx.so"), good=lambda r: None)
    with caplog.at_level(logging.WARNING):
        result = collect(plugins)
    assert record(plugins, "gone").state is PluginState.FAILED
    reasons = str(getattr(result, "failures", None) or result.left_out)
    assert "libx.so" in reasons
    assert "ZeroDivisionError: division by zero" in reasons
    assert f"plugin `bad` (lmcore-bad 1.0) is left out at `{hook}`" in caplog.text
    assert "good" not in caplog.text


def test_the_example_paths_are_paths(tmp_path):
    """A `Path` is taken as well as text."""
    plugins = found("lmcore_add_corpora", mine=lambda r: r.add("x", Path(tmp_path) / "x", "X."))
    assert plugin_corpora(plugins)["x"].path == tmp_path / "x"


ENGINE = TrainingEngine(
    name="mine",
    title="Mine",
    open="tests.nowhere:open_engine",
    lacks=lambda config: {"optimizer": Lack("it has one", "use `--optimizer sgd`")},
    rules=lambda loaded: iter([ConfigError("`--engine mine` is asleep")]),
    offloads=True,
)


ABSENT = "(of `lmcore[deepspeed]`)"


@pytest.fixture
def engine_of_a_plugin():
    """A plugin's training engine, known until the test ends."""
    found("lmcore_add_engines", mine=lambda r: r.add(ENGINE))
    yield ENGINE
    found("lmcore_add_engines", mine=lambda r: None)
    assert "mine" not in engines()


@pytest.mark.usefixtures("engine_of_a_plugin")
@pytest.mark.parametrize(
    "flags,problems",
    [
        ("--engine mine", ["`--engine mine` is asleep"]),
        ("--engine MINE --cpu-offload", ["`--engine mine` is asleep"]),
        (
            "--engine mine --tensor-model-parallel-size 2 --optimizer sgd",
            [
                "`--engine mine` is asleep",
                "`--tensor-model-parallel-size 2` cannot be combined with `--engine mine`",
                "`--optimizer sgd` cannot be combined with `--engine mine`",
            ],
        ),
        (
            "--cpu-offload",
            [f"`--cpu-offload` needs `--engine mine` or `--engine deepspeed` {ABSENT}"],
        ),
    ],
)
def test_an_engine_of_a_plugin_is_chosen_by_name(flags, problems, monkeypatch):
    """Its rules hold for its runs only, and the core refuses layouts that it does not divide."""
    lacks = ENGINE.lacks if "sgd" in flags else lambda config: {}
    monkeypatch.setitem(engines(), "mine", dataclasses.replace(ENGINE, lacks=lacks))
    loaded = load_config([*flags.split(), "--global-batch-size", "16"])
    assert [one.what for one in problems_of(loaded, world_size=2)] == problems
    assert loaded.config.parallel.by_layout == ("--engine" not in flags)


@pytest.mark.usefixtures("engine_of_a_plugin")
def test_an_engine_that_cannot_be_loaded_names_itself():
    """The error has the engine and its target."""
    with pytest.raises(PluginError, match="training engine `mine` cannot be loaded") as caught:
        engine_named("mine").load()
    assert "`tests.nowhere:open_engine`" in str(caught.value.why)


@pytest.mark.parametrize(
    "engine,why",
    [
        ("mine", "a training engine is a record"),
        (dataclasses.replace(ENGINE, name="Mine"), "letters, digits and dashes"),
        (dataclasses.replace(ENGINE, name="native"), "it is lmcore's"),
        (dataclasses.replace(ENGINE, open="nowhere"), "`open` has the form"),
    ],
)
def test_a_wrong_engine_is_refused(engine, why, caplog):
    """Anything but a record with a free name and a target is left out, with the reason."""
    found("lmcore_add_engines", mine=lambda r: r.add(engine))
    assert why in caplog.text
    assert list(engines()) == ["native"]


@pytest.mark.parametrize("part", ["matches", "checkpoints", "lacks"])
def test_a_format_that_cannot_tell_about_a_directory_is_named(part, tmp_path):
    """A failure of any question to the format is an error that names the plugin."""

    def fail(directory):
        raise ZeroDivisionError("by zero")

    asked = {"matches": lambda directory: True, part: fail}
    odd = CheckpointFormat("odd", title="Odd", described="a checkpoint of Odd", read="a:b", **asked)
    found("lmcore_add_formats", mine=lambda r: r.add(odd))
    try:
        with pytest.raises(PluginError, match=r"`odd` of plugin .*mine.* failed") as caught:
            getattr(formats()["odd"], part)(tmp_path)
        assert f"`{part}` raised ZeroDivisionError: by zero" in str(caught.value.why)
    finally:
        found("lmcore_add_formats", mine=lambda r: None)
    assert "odd" not in formats()


def test_records_of_plugins_are_restored():
    """Records of a later set of plugins are gone again, and the records of before are back."""
    odd, even = (
        CheckpointFormat(name, title=name, described="", matches=lambda _: False, read="a:b")
        for name in ("odd", "even")
    )
    before = added_records()
    found("lmcore_add_formats", mine=lambda r: r.add(odd))
    kept = added_records()
    found("lmcore_add_formats", mine=lambda r: r.add(even))
    assert "even" in formats()
    assert "odd" not in formats()
    restore_records(kept)
    assert "odd" in formats()
    assert "even" not in formats()
    restore_records(before)
    assert "odd" not in formats()


# Tasks


def test_tasks_of_two_plugins():
    """Each is known by its name, with its plugin."""
    found_tasks = plugin_tasks(
        found(
            "lmcore_add_tasks",
            mine=lambda r: r.add("one", "mine.tasks:ONE"),
            other=lambda r: r.add("two", "other.tasks:TWO"),
        ),
        {"piqa": "lmcore"},
    )
    assert {name: one.load for name, one in found_tasks.items()} == {
        "one": "mine.tasks:ONE",
        "two": "other.tasks:TWO",
    }
    assert found_tasks.plugins["two"].name == "other"


def test_a_task_of_two_plugins_is_an_error_with_both():
    def add(registry):
        registry.add("one", "tasks:ONE")

    with pytest.raises(PluginError, match="have a task `one` each") as caught:
        plugin_tasks(found("lmcore_add_tasks", mine=add, other=add), {})
    assert "`mine`" in caught.value.what
    assert "`other`" in caught.value.what


@pytest.mark.parametrize(
    "add,why",
    [
        (lambda r: r.add("piqa", "tasks:ONE"), "it is lmcore's"),
        (lambda r: r.add("1one", "tasks:ONE"), "a name is letters"),
        (lambda r: r.add("one", "tasks.ONE"), "a target is written `package.module:OBJECT`"),
    ],
)
def test_a_wrong_task_is_refused(add, why):
    def collect(plugins):
        return plugin_tasks(plugins, {"piqa": "lmcore"})

    assert why in refusal("lmcore_add_tasks", collect, add)
