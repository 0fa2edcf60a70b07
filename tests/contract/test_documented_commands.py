"""Each `lmcore` command in the documentation and the examples exists, with each of its flags."""

from __future__ import annotations

import configparser
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from lmcore.cli.commands import known_commands as known
from lmcore.cli.launch import split_launch
from lmcore.cli.main import main
from lmcore.cli.plugin_commands import find_commands
from lmcore.cli.run import _split
from lmcore.config.foreign import megatron
from lmcore.config.foreign.convert import PLACES, convert_flags
from lmcore.config.foreign.evaluate import evaluate_flags
from lmcore.config.foreign.generate import GivenModel

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "examples", "plugins", "plugins_cuda", "plugins_xpu", "tests")
PAGES = [
    *ROOT.glob("*.md"),
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))),
    *(ROOT / "examples").glob("*.sh"),
]
SEPARATORS = {"&&", "||", "|", ";", "&", ">", ">>", "<", "2>"}


def shell_text(page: Path) -> Iterator[str]:
    """Yield what a page shows to be typed: its shell blocks and its `lmcore ...` spans."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".sh":
        yield text
        return
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language in {"sh", "bash", "console"}:
            yield block
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"`(lmcore [a-z][^`]*)`", prose)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words after `lmcore` of every command in a piece of shell."""
    for line in text.replace("\\\n", " ").splitlines():
        if not re.search(r"(^|[\s/])lmcore\s", line):
            continue
        words = shlex.split(line.removeprefix("$ "), comments=True)
        starts = [at for at, word in enumerate(words) if Path(word).name == "lmcore"]
        for start in starts:
            rest = words[start + 1 :]
            ends = [at for at, word in enumerate(rest) if word in SEPARATORS]
            yield rest[: min(ends, default=len(rest))]


@cache
def help_text(*command: str) -> str:
    """Return what `lmcore COMMAND --help` prints."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
        assert main([*command, "--help"]) == 0
    return "\n".join(lines)


def subcommands_of(command: str) -> set[str]:
    """Return the commands below a command, from the list or the usage line of its help."""
    text = help_text(command)
    listed = text.partition("commands:\n")[2].partition("\n\n")[0]
    return {line.split()[0] for line in listed.splitlines()} | set(
        re.findall(rf"^usage: lmcore {command} ([a-z]+)\s", text, re.MULTILINE)
    )


@pytest.fixture(scope="module", autouse=True)
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of the plugins the CPU's, the applications, the authors' kit and the examples are there."""
    site = tmp_path_factory.mktemp("site")
    sources = []
    for name, package, folder in (
        ("example", "lmcore_example_extension", "examples/plugin_extension"),
        ("window", "lmcore_example_family", "examples/plugin_family"),
        ("conformance", "lmcore_conformance", "plugins/conformance"),
        ("data-tools", "lmcore_data_tools", "plugins/data-tools"),
        ("serve", "lmcore_serve", "plugins/serve"),
    ):
        record = site / f"{package}-1.0.dist-info"
        record.mkdir()
        points = f"[lmcore.plugins]\n{name} = {package}.plugin\n"
        (record / "entry_points.txt").write_text(points, encoding="utf-8")
        metadata = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.0\n"
        (record / "METADATA").write_text(metadata, encoding="utf-8")
        sources.append(str(ROOT / folder / "src"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(site), *sources, *sys.path])
        patch.setenv("LMCORE_PLUGINS", "example,window,conformance,data-tools,serve")
        yield


@cache
def known_commands() -> frozenset[str]:
    """Return the commands of the core and of the plugins."""
    return frozenset([*known(), *find_commands()])


def flags_of(command: list[str], shown: str) -> set[str]:
    """Return the flags of a command, with those it takes from Megatron's commands."""
    flags = set(re.findall(r"--[a-z][a-z0-9-]*", help_text(*command).replace("[no-]", "")))
    if command == ["train"]:
        flags |= {*megatron.RENAMED, *megatron.FIXED}
    if command == ["checkpoint", "convert"]:
        flags |= {*convert_flags(()), *PLACES}
    if command == ["evaluate"] and re.search(r"--task [A-Z]", shown):
        flags |= {*evaluate_flags((), GivenModel())}
    return flags


def problems(words: list[str]) -> Iterator[str]:  # a case for each kind
    """Yield what is wrong with a documented command."""
    shown = shlex.join(["lmcore", *words])
    names = known_commands()
    if not words or words[0].startswith("-"):
        return
    if words[0] not in names:
        yield f"`{shown}`: no command `{words[0]}`"
        return
    command = words[:1]
    if subcommands := subcommands_of(words[0]):
        if words[1:2] and words[1] not in subcommands | {"--help"}:
            yield f"`{shown}`: no command `{words[1]}`"
            return
        command = [word for word in words[:2] if word != "--help"]
    known = flags_of(command, shown)
    arguments = words[1:]
    if command[:1] == ["launch"] and command[1:]:  # its flags, then a command
        arguments, launched = split_launch(command[1], words[2:])
        yield from problems(launched if {*launched[:1]} <= names else ["train", *launched])
    if words[0] == "run":  # what follows a script is the script's
        arguments = _split(arguments)[0]
    for word in arguments:
        flag = word.partition("=")[0].replace("--no-", "--")
        if flag.startswith("--") and flag not in known | {"--help", "--flags"}:
            yield f"`{shown}`: no flag `{flag}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_documented_commands_exist(page: Path) -> None:
    """Every command and flag that the page shows is one that lmcore has."""
    shown = [words for text in shell_text(page) for words in commands(text)]
    assert [problem for words in shown for problem in problems(words)] == []


def old_names(text: str) -> set[str]:
    """Return Megatron's names of renamed flags in paragraphs that do not say whose names they are.

    A row of a table is a paragraph.
    """
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return {
        flag
        for part in re.split(r"\n\n|\n(?=\|)", prose)
        if "Megatron" not in part
        for flag in re.findall(r"`(--[a-z][a-z0-9-]*)", part)
        if flag in megatron.RENAMED
    }


def test_options_have_their_current_names() -> None:
    """Prose names an option as `--help` does; Megatron's name is said to be that."""
    named_there = {"megatron-flags.md", "CHANGELOG.md"}
    pages = [page for page in PAGES if page.suffix == ".md" and page.name not in named_there]
    found = {
        page.name: names
        for page in pages
        if not page.name.startswith("move-from-") and (names := old_names(page.read_text("utf-8")))
    }
    assert found == {}
    assert old_names("| RMSNorm | `--norm-epsilon` |\n| `--bf16`, as in Megatron | x |") == {
        "--norm-epsilon"
    }


def test_some_commands_are_documented() -> None:
    """The pages are read: the README shows at least training, preparing data and generating."""
    shown = [words for text in shell_text(ROOT / "README.md") for words in commands(text)]
    assert {words[0] for words in shown if words} >= {"train", "data", "generate"}


@pytest.mark.parametrize(
    "line",
    [
        "lmcore trian",
        ".venv/bin/lmcore train --hiden-size 8",
        "a && lmcore config show --jsno | b",
        "lmcore data prepair --input x",
        "lmcore config shw",
        "lmcore run --nproc 2 train.py --lr 1",
    ],
)
def test_planted_mistake_is_found(line: str) -> None:
    """A misspelt command or flag is found, wherever on the line it is."""
    (words,) = commands(line)
    assert list(problems(words))


def test_the_linter_of_imports_is_started_by_tox() -> None:
    """The set-up lacks packages that `.importlinter` names; the environment of tox has them."""
    shown = "\n".join(
        text for page in PAGES if page.name == "CONTRIBUTING.md" for text in shell_text(page)
    )
    assert "tox -e imports" in shown
    assert "lint-imports" not in shown
    linter, tox = (configparser.ConfigParser(strict=False) for _ in range(2))
    linter.read(ROOT / ".importlinter", encoding="utf-8")
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    path = tox["testenv:imports"]["set_env"].partition("PYTHONPATH = ")[2]
    folders = [ROOT / part.strip("{}/: \n") for part in path.replace("{tox_root}", "").split("{:}")]
    packages = linter["importlinter"]["root_packages"].split()
    missing = [one for one in packages if not any((folder / one).is_dir() for folder in folders)]
    assert missing == []


def test_golden_files_are_documented() -> None:
    """tests/README.md says of each golden file which command rewrites it."""
    text = (ROOT / "tests/README.md").read_text(encoding="utf-8")
    patterns = re.findall(r"^\| `([\w*./]+)` \| `([\w./]+\.py)` \|", text, re.MULTILINE)
    golden = ROOT / "tests/golden"
    files = {file for file in golden.rglob("*") if file.is_file()}
    assert {file for pattern, _ in patterns for file in golden.glob(pattern)} == files
    assert all((ROOT / "tests" / test).is_file() for _, test in patterns)


def test_environments_are_documented() -> None:
    """CONTRIBUTING.md names every tox environment."""
    tox = configparser.ConfigParser(strict=False)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    environments = {
        name.partition(":")[2] for name in tox.sections() if name.startswith("testenv:")
    }
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert {name for name in environments if f"tox -e {name}" not in text} == set()
