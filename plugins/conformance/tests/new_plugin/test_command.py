"""`lmcore plugin new`: its refusals, and its result, a complete folder or none."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from lmcore.cli.main import main
from lmcore.contract import API_VERSION
from lmcore_conformance.new_plugin import command as plugin_new
from lmcore_conformance.new_plugin import template as plugin_template
from lmcore_conformance.new_plugin.template import LICENCES, NewPlugin, render

KINDS = {
    "device": NewPlugin("chip", "chip", "torch", "MIT", "Ada <a@b.example>", 2026),
    "module": NewPlugin("chip", "npu", "torch_npu", "BSD-3-Clause", "Ada", 2026),
    "host": NewPlugin("my_chip", "cpu", "torch", "Apache-2.0", 'A "B" \\ C', 2026),
    "extension": NewPlugin("tools", "", "torch", "proprietary", "Ada", 2026),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def new(capsys):
    """Return a function that runs the command and returns status, output and message."""

    def call(*arguments):
        status = main(["plugin", "new", *arguments])
        output = capsys.readouterr()
        return status, output.out, output.err

    return call


def test_it_says_what_to_do_next(new, folder):
    """The folder is complete, and the next commands have its names in them."""
    status, out, err = new("mychip")
    assert (status, err) == (0, "")
    for text in (
        "wrote lmcore-mychip: 19 files",
        "pip install --editable ./lmcore-mychip",
        "lmcore plugin check lmcore-mychip",
        "lmcore train --device mychip",
        "lmcore-mychip/src/lmcore_mychip/probe.py",
    ):
        assert text in out
    assert [path.name for path in folder.iterdir()] == ["lmcore-mychip"]


def test_json_is_for_programs(new, folder):
    """It names every file that was written."""
    status, out, _ = new("my_chip", "--json", "--licence", "mit", "--torch-device", "npu")
    found = json.loads(out)
    written = [path for path in (folder / "lmcore-my-chip").rglob("*") if path.is_file()]
    assert status == 0
    assert found["files"] == sorted(
        path.relative_to(folder / "lmcore-my-chip").as_posix() for path in written
    )
    del found["files"]
    assert found == {
        "name": "my_chip",
        "distribution": "lmcore-my-chip",
        "package": "lmcore_my_chip",
        "torch_device": "npu",
        "licence": "MIT",
        "directory": "lmcore-my-chip",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_is_what_its_name_says(kind):
    """No word of the template is left; Python compiles, TOML and YAML can be read."""
    import yaml

    files = render(KINDS[kind])
    for path, text in files.items():
        assert not re.search(r"@[A-Z_]+@", path + text), path
        if path.endswith(".py"):
            compile(text, path, "exec")
        elif path.endswith(".toml"):
            tomllib.loads(text)
        elif path.endswith(".yml"):
            assert yaml.safe_load(text)["jobs"]
        assert text.endswith("\n") or not text, path


@pytest.mark.parametrize("kind", KINDS)
def test_the_distribution_says_who_and_what(kind):
    """Names, licence, author and versions are in pyproject.toml as PEP 621 has them."""
    plugin = KINDS[kind]
    files = render(plugin)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    point = {plugin.name: f"{plugin.package}.plugin"}
    assert project["entry-points"] == {"lmcore.plugins": point}
    assert project["name"] == plugin.distribution
    owned = plugin.licence == "proprietary"
    assert project["license"] == ("LicenseRef-Proprietary" if owned else plugin.licence)
    assert project["license-files"] == ([] if owned else ["LICENSE"])
    assert ("LICENSE" in files) == (not owned)
    assert ("Private :: Do Not Upload" in project["classifiers"]) == owned
    name, _, address = plugin.author.partition(" <")
    assert project["authors"][0]["name"] == name
    assert project["authors"][0].get("email", "") == address.rstrip(">")
    source = files[f"src/{plugin.package}/plugin.py"]
    assert f'api=">={API_VERSION},<{int(API_VERSION[0]) + 1}"' in source


@pytest.mark.parametrize(
    "name, message",
    [
        ("My-Chip", "did you mean `my_chip`?"),
        ("lmcore-mychip", "did you mean `mychip`?"),
        ("3chip", "a letter first"),
        ("", "the value is empty"),
        ("chip__two", "did you mean `chip_two`?"),
        ("chip/../x", "did you mean `chip_x`?"),
        ("ch\u00efp", "small letters"),
        ("class", "cannot be a plugin's name"),
        ("x" * 41, "at most 40"),
        ("cpu", "comes with `lmcore"),
        ("training", "lmcore uses the name itself"),
        ("conformance", "lmcore uses the name itself"),
    ],
)
def test_a_name_that_cannot_be_is_refused(new, folder, name, message):
    """The message has the reason, and the name that was probably meant."""
    status, _, err = new(name)
    assert status == 2
    assert message in err
    assert not list(folder.iterdir())


def test_a_name_that_is_taken_is_refused(new, folder, monkeypatch):
    """By an installed distribution, by one of lmcore's extras, or by a package that is there."""
    record = folder / "site" / "lmcore_some_chip-2.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: lmcore-some-chip\nVersion: 2.0\n"
    )
    (folder / "site" / "lmcore_lonely.py").touch()
    monkeypatch.syspath_prepend(folder / "site")
    monkeypatch.setattr(plugin_new, "device_packages", lambda: {"extra": "lmcore-extra"})
    for name, owner in (
        ("some_chip", "`lmcore-some-chip 2.0` is installed"),
        ("lonely", "lmcore_lonely.py"),
        ("extra", "lmcore's extra `extra`"),
    ):
        status, _, err = new(name)
        assert status == 2
        assert owner in err


@pytest.mark.parametrize("make", ["folder", "empty folder", "file", "dangling link"])
def test_what_exists_is_left_alone(new, folder, make):
    """Nothing is written over, not even into an empty folder."""
    target = folder / "lmcore-chip"
    if make == "file":
        target.write_text("mine")
    elif make == "dangling link":
        target.symlink_to("nowhere")
    else:
        target.mkdir()
    if make == "folder":
        (target / "mine").write_text("mine")
    status, _, err = new("chip")
    assert status == 2
    assert "exists already" in err
    assert [path.name for path in folder.iterdir()] == ["lmcore-chip"]
    if target.is_dir():
        assert [path.name for path in target.iterdir()] == ["mine"] * (make == "folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_permission_is_an_error_in_words(new, folder):
    """The message names the folder that cannot be written."""
    (folder / "locked").mkdir(mode=0o500)
    status, _, err = new("chip", "--directory", "locked/chip")
    assert status == 2
    assert "Permission denied" in err


def test_a_refusal_of_the_system_is_an_error_in_words(new, folder, monkeypatch):
    """No permission, as the system says it."""

    def refuse(_):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(plugin_template, "atomic_directory", refuse)
    status, _, err = new("chip")
    assert status == 2
    assert "cannot write `lmcore-chip`" in err
    assert f"why: Permission denied: {folder}" in err


def test_the_folder_above_has_to_exist(new):
    """A missing one is an error, because it is probably a typo."""
    status, _, err = new("chip", "--directory", "nowhere/chip")
    assert status == 2
    assert "No such file or directory" in err


@pytest.mark.parametrize("cause", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_in_the_middle_leaves_nothing(new, folder, monkeypatch, cause):
    """The folder is complete or absent, whatever happens while it is written."""
    plain = Path.write_text

    def write_text(self, text, **options):
        if self.name == "README.md":
            raise cause
        return plain(self, text, **options)

    monkeypatch.setattr(Path, "write_text", write_text)
    status, _, err = new("chip")
    assert status == (2 if isinstance(cause, OSError) else 130)
    assert ("No space left" in err) == isinstance(cause, OSError)
    assert not list(folder.iterdir())


def test_the_folder_is_readable_as_others_are(new, folder):
    """It has the permissions that any new folder gets."""
    new("chip")
    (folder / "other").mkdir()
    assert (folder / "lmcore-chip").stat().st_mode == (folder / "other").stat().st_mode


def test_no_licence_is_all_rights_reserved(new, folder):
    """`none` writes no licence, says so, and keeps the package from a public index."""
    assert new("chip", "--licence", "none")[0] == 0
    assert not (folder / "lmcore-chip" / "LICENSE").exists()
    assert "All rights reserved." in (folder / "lmcore-chip" / "README.md").read_text()
    assert "Private :: Do Not Upload" in (folder / "lmcore-chip" / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "given, meant",
    [("apache", "Apache-2.0"), ("BSD", "BSD-3-Clause"), ("MTI", "MIT"), ("GPL-3.0", None)],
)
def test_an_unknown_licence_lists_those_there_are(new, folder, given, meant):
    """The nearest one is first if one is similar."""
    status, _, err = new("chip", "--licence", given)
    assert status == 2
    assert all(f"`{licence}`" in err for licence in LICENCES)
    assert ("did you mean" in err) == (meant is not None)
    assert meant is None or f"did you mean `{meant}`?" in err
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--without-device", "--torch-device", "npu"), "`--torch-device` cannot be combined with"),
        (("--without-device", "--torch-module", "m"), "`--torch-module` cannot be combined with"),
        (("--torch-device", "npu:0"), "no device type of torch"),
        (("--torch-module", "torch-npu"), "no name of a Python package"),
        (("--author", "<a@b.example>"), "is no name"),
        (("--author", "two\nlines"), "is no name"),
        (("--author", "A <b> <c@d>"), "is no name"),
        (("--torch-devic", "npu"), "--torch-device"),
    ],
)
def test_flags_that_make_no_sense_are_refused(new, folder, flags, message):
    """Each with its reason, and nothing is written."""
    status, _, err = new("chip", *flags)
    assert status == 2
    assert message in err
    assert not list(folder.iterdir())


def test_all_problems_are_reported_together(new):
    """Name, device and licence in one message."""
    _, _, err = new("Bad", "--torch-device", "A:0", "--licence", "nobody")
    assert err.count("error:") == 3


def test_a_plugin_without_a_device_says_so(new, folder):
    """It has hooks that serve every device, and no probe."""
    status, out, _ = new("tools", "--without-device", "--directory", "mine")
    assert status == 0
    assert "--device" not in out
    text = (folder / "mine" / "src" / "lmcore_tools" / "plugin.py").read_text()
    assert "def lmcore_probe" not in text
    assert "def lmcore_add_options" in text
