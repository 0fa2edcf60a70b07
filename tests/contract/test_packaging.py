"""Pinned requirements, and distributions whose names cannot be taken for others."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lmcore.cli.commands import GROUPS, known_commands
from lmcore.model.known_plugins import APPLICATIONS

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = (
    *(".", "plugins/conformance", "plugins/data-tools", "plugins/deepspeed"),
    *("plugins/serve", "plugins/sim", "plugins/xla", "plugins_cuda", "plugins_xpu"),
)


def project(folder: str) -> dict[str, Any]:
    """Return a distribution's pyproject.toml."""
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))


def pins() -> dict[str, str]:
    """Return the version that constraints.txt pins for each package."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([\w.-]+)==([\w.!+]+)", line).groups()  # type: ignore[union-attr]
            found[canonicalize_name(name)] = version
    return found


def requirements(folder: str) -> set[str]:
    """Return the names of all that a distribution needs to be built, used and checked."""
    content = project(folder)
    table = content["project"]
    lists = [
        content["build-system"]["requires"],
        table.get("dependencies", []),
        *table.get("optional-dependencies", {}).values(),
        *content.get("dependency-groups", {}).values(),
    ]
    texts = [text for group in lists for text in group if isinstance(text, str)]
    return {canonicalize_name(Requirement(text).name) for text in texts}


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_own_distribution_is_pinned(folder: str) -> None:
    """Our version is pinned, so that pip cannot prefer another project of the same name."""
    table = project(folder)["project"]
    assert pins()[table["name"]] == table["version"]


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_every_requirement_is_pinned(folder: str) -> None:
    """Each requirement of any environment is pinned in constraints.txt, loggers of runs excepted.

    MLflow wants older packages than the pins, so that `tox -e loggers` resolves its packages alone.
    """
    assert requirements(folder) - set(pins()) - {"codecarbon", "mlflow", "wandb"} == set()


def test_checkpoints_of_deepspeed_need_no_deepspeed() -> None:
    """Its plugin requires lmcore alone; lmcore's extra brings all that its engine needs, too."""
    plugin, core = project("plugins/deepspeed")["project"], project(".")["project"]
    (needed,) = plugin["dependencies"]
    assert Requirement(needed).name == "lmcore"
    (engine,) = plugin["optional-dependencies"]["engine"]
    assert Requirement(engine).name == "deepspeed"
    assert core["optional-dependencies"]["deepspeed"] == ["lmcore-deepspeed[engine]"]


def test_extras_bring_the_packages_of_commands() -> None:
    """The extra in the hint for an absent command requires the package that adds it."""
    inner = [one for group in GROUPS.values() for one in group]
    named = {one.extra: one.package for one in (*known_commands().values(), *inner) if one.extra}
    assert named["serve"] == "lmcore-serve"
    assert set(named) == set(APPLICATIONS)
    extras = project(".")["project"]["optional-dependencies"]
    for extra, package in named.items():
        assert package in {Requirement(text).name for text in extras[extra]}


def test_no_group_fetches_a_distribution_of_ours() -> None:
    """Dependency groups, which are installed by themselves, never ask an index for lmcore."""
    groups = project(".")["dependency-groups"].values()
    names = {Requirement(text).name for group in groups for text in group if isinstance(text, str)}
    assert not {name for name in names if name.startswith("lmcore")}


def test_versions_agree() -> None:
    """The package reports the version of its distribution."""
    text = (ROOT / "lmcore" / "__init__.py").read_text(encoding="utf-8")
    assert f'__version__ = "{project(".")["project"]["version"]}"' in text


def test_torchs_index_is_asked_for_torch_alone() -> None:
    """No page, workflow or setting adds its index for all packages, or replaces a user's own.

    PIP_EXTRA_INDEX_URL and `--extra-index-url` do: any package may come from any index then.
    """
    suffixes = {".md", ".in", ".ini", ".toml", ".yml", ".yaml", ".sh", ""}
    files = [ROOT / ".ci/run", *ROOT.glob("*.*"), *(ROOT / "docs").rglob("*.md")]
    files += [file for file in (ROOT / "plugins").rglob("*") if file.suffix in suffixes]
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.is_file()}
    adds = [file for file, text in texts.items() if re.search(r"(?i)extra.index.url", text)]
    assert [file.name for file in adds if file.name != "CHANGELOG.md"] == []
    commands = [
        line
        for text in texts.values()
        for line in re.sub(r"\s*\n\s+--", " --", text).splitlines()
        if "pip install" in line and "//download.pytorch.org" in line
    ]
    assert len(commands) >= 2
    assert all(re.search(r"--no-deps .*--index-url \S+ torch$", line) for line in commands)


def test_commands_on_our_pages_never_fetch_another_lmcore() -> None:
    """A page that installs lmcore by name does so with the pins, or from files alone."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    commands = re.findall(r"pip install[^`\n]*[ \"']lmcore[^`\n]*", text)
    assert commands
    careless = [line for line in commands if "-c constraints.txt" not in line]
    assert careless == ["pip install lmcore"]  # the README's warning
