"""Settings that plugins add: flags, files, sources, the written config.yaml, what is gone."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.file.run_file import write_run_file
from lmcore.config.load import load_config
from lmcore.config.option import option
from lmcore.config.options.command_line import parse_with_plugins
from lmcore.config.options.help import render_run_help
from lmcore.config.plugin_section import LeftOut, PluginSections, PluginSettings
from lmcore.config.resolve import resolve
from lmcore.config.section import Config, run_options
from lmcore.config.settings import Provenance
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate


@dataclass(frozen=True)
class Drill:
    """Settings of the drill."""

    depth: int = option(3, "Depth in metres.", minimum=1)
    wet: bool = option(True, "Cool by water.")
    names: tuple[str, ...] = option((), "Names of the bits.")
    lr: float | None = option(None, "A rate of the drill's own.")


@dataclass(frozen=True)
class Well:
    """Settings of the well."""

    depth: int = option(30, "Depth in metres.", minimum=1)


PLUGINS = PluginSections({"drill": Drill, "deep-well": Well})


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file in the current folder and return its name."""
    monkeypatch.chdir(tmp_path)

    def write_file(text, name="run.yaml"):
        Path(name).write_text(text, encoding="utf-8")
        return name

    return write_file


def test_every_source_gives_values(write):
    """Values of defaults, files and flags have their sources; the sections are under `plugins`."""
    path = write("drill:\n  depth: 5\n  names: [a, b]\n  lr: 1e-4\ndeep-well: {depth: 40}\n")
    loaded = load_config([path, "--no-drill-wet", "--deep_well_depth", "50"], plugins=PLUGINS)
    assert loaded.config.plugins == {
        "drill": Drill(5, wet=False, names=("a", "b"), lr=1e-4),
        "deep-well": Well(50),
    }
    assert loaded.provenance["drill_depth"] == Provenance("file", "run.yaml:2")
    assert loaded.provenance["drill_wet"] == Provenance("flag", "--no-drill-wet")
    assert loaded.value("deep_well_depth") == 50
    assert loaded.value("lr") == run_options()["lr"].default  # the core's is another option
    assert load_config([], plugins=PLUGINS).config.plugins == {
        "drill": Drill(),
        "deep-well": Well(),
    }


@pytest.mark.parametrize(
    "text, message, hint",
    [
        ("drill:\n  dept: 3\n", "2: unknown key `dept`", "did you mean `depth`?"),
        ("drill:\n  depth: 0\n", "2: `depth: 0`: out of range", None),
        ("drill:\n  drill_depth: 3\n", "2: unknown key `drill_depth`", "`depth`"),
        ("drill: 3\n", "1: section `drill` holds no settings", "indented"),
        ("drill_depth: 3\n", "1: `drill_depth` is outside its section", "`drill:` as `depth`"),
        ("drill:\n  seed: 3\n", "2: `seed` is not in `drill`", "below `training:`"),
        ("training:\n  depth: 3\n", "2: unknown key `depth`", "did you mean `depth` of `drill`?"),
        ("dril:\n  depth: 3\n", "1: unknown section `dril`", "did you mean `drill`?"),
    ],
)
def test_file_problems(write, text, message, hint):
    """A plugin's section is read as strictly as the core's."""
    with pytest.raises(ConfigError) as caught:
        load_config([write(text)], plugins=PLUGINS)
    assert caught.value.what == f"run.yaml:{message}"
    assert hint is None or hint in (caught.value.hint or "")


def test_a_misspelt_flag_names_the_plugins(write):
    """Suggestions know the flags of plugins."""
    with pytest.raises(ConfigError) as caught:
        load_config(["--drill-dept", "3"], plugins=PLUGINS)
    assert caught.value.hint == "did you mean `--drill-depth`?"


def test_the_written_file_reads_back(write):
    """`config.yaml` of a run has the plugins' settings with their sources, and repeats them."""
    argv = ["--drill-depth", "7", "--drill-names", "x", "--train-iters", "3"]
    plan = resolve(
        validate(load_config(argv, plugins=PLUGINS)), tokenizer=TokenizerIdentity(vocab_size=257)
    )
    text = write_run_file(plan)
    assert "\ndrill:  # settings of the plugin drill\n  depth: 7 " in text
    assert "# --drill-depth\n" in text
    again = resolve(
        validate(load_config([write(text)], plugins=PLUGINS)),
        tokenizer=TokenizerIdentity(vocab_size=257),
    )
    assert again.config == plan.config
    assert again.fingerprint == plan.fingerprint
    made = json.loads(json.dumps(plan.to_dict()))
    assert made["config"]["plugins"]["drill"]["depth"] == 7
    assert made["sources"]["drill_depth"] == "--drill-depth"


def test_settings_of_plugins_tell_runs_apart():
    """Two runs that differ in a plugin's setting have other fingerprints."""
    plans = [
        resolve(
            validate(load_config(argv, plugins=PLUGINS)),
            tokenizer=TokenizerIdentity(vocab_size=257),
        )
        for argv in ([], ["--drill-depth", "4"])
    ]
    assert plans[0].fingerprint != plans[1].fingerprint


def test_a_file_of_a_plugin_that_is_not_installed(write):
    """The message names the section, and both ways on: install it, or delete its section."""
    path = write("model:\n  num_layers: 3\ndrill:\n  depth: 7\n  wet: false\n")
    with pytest.raises(ConfigError) as caught:
        load_config([path])
    assert caught.value.what == "run.yaml:3: unknown section `drill`"
    assert "nor an installed plugin" in caught.value.why
    assert (
        "if it belongs to a plugin `drill`, install that, or delete the section `drill:` "
        "from `run.yaml`" in caught.value.hint
    )
    assert caught.value.others == ()


def test_a_file_of_a_plugin_that_failed(write):
    """The plugin's own failure is the reason."""
    gone = PluginSections({}, {"deep-well": LeftOut("failed: libwell.so is missing")})
    with pytest.raises(ConfigError) as caught:
        load_config([write("deep_well:\n  depth: 7\n"), "--deep-well-depth", "3"], plugins=gone)
    flag, file = caught.value, caught.value.others[0]
    assert flag.what == "unknown flag `--deep-well-depth`"
    assert flag.why == "plugin `deep-well` failed: libwell.so is missing"
    assert file.what == "run.yaml:1: the settings of plugin `deep-well` cannot be read"
    assert "libwell.so" in file.why
    assert "delete the section `deep_well:` from `run.yaml`" in file.hint


def test_a_file_of_a_plugin_that_is_off(write, caplog):
    """Its section is ignored with a notice; a flag of it is an error that says why."""
    off = PluginSections(
        {}, {"drill": LeftOut("is off: `--plugin-off` leaves it out", wanted=True)}
    )
    path = write("drill:\n  depth: 7\n  wet: false\n")
    with caplog.at_level(logging.WARNING):
        assert load_config([path], plugins=off).config == Config()
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith("run.yaml:1: section `drill` is ignored: ")
    with pytest.raises(ConfigError, match="unknown flag `--no-drill-wet`") as caught:
        load_config(["--no-drill-wet"], plugins=off)
    assert "`--plugin-off` leaves it out" in caught.value.why


def test_help_has_a_group_for_each_plugin():
    """The title names the plugin, followed by the summary of its section."""
    text = render_run_help("lmcore train", "Train.", plugins=PLUGINS)
    assert "\nplugin drill: Settings of the drill.\n  --drill-depth N " in text
    assert "--[no-]drill-wet" in text
    assert "\nplugin deep-well: Settings of the well.\n" in text


def test_settings_are_read_only_and_travel():
    """They cannot be changed; a copy, a pickle and `asdict` keep them."""
    config = Config(plugins=PLUGINS.settings())
    for change in (
        lambda plugins: plugins.update(drill=1),
        lambda plugins: plugins.pop("drill"),
        lambda plugins: plugins.setdefault("x", 1),
        lambda plugins: plugins.__setitem__("x", 1),
        lambda plugins: plugins.__delitem__("drill"),
        lambda plugins: plugins.__ior__({"x": 1}),
        lambda plugins: plugins.clear(),
    ):
        with pytest.raises(TypeError, match="cannot be changed"):
            change(config.plugins)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.plugins["drill"].depth = 4
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    assert hash(copy.deepcopy(config)) == hash(config)
    assert isinstance(copy.deepcopy(config).plugins, PluginSettings)
    assert dataclasses.asdict(config)["plugins"]["deep-well"] == {"depth": 30}


def test_a_small_command_takes_them_too():
    """A command with its own section reads the plugins' flags beside its own."""
    section, settings = parse_with_plugins(
        Well, ["--depth", "4", "--drill-depth", "5"], command="lmcore dig", plugins=PLUGINS
    )
    assert section == Well(4)
    assert settings["drill"] == Drill(5)
    assert settings["deep-well"] == Well()


def test_a_small_commands_flags_stay_its_own():
    """A plugin whose flag the command has is an error that says how to continue."""

    @dataclass(frozen=True)
    class Dig:
        """Dig."""

        drill_depth: int = option(1, "Depth.")

    with pytest.raises(ConfigError, match="plugin `drill` adds the flag `--drill-depth`") as caught:
        parse_with_plugins(Dig, [], command="lmcore dig", plugins=PLUGINS)
    assert caught.value.hint == "turn the plugin off: `--plugin-off drill`"
