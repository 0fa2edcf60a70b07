"""The bill of materials has what our distributions need, and nothing of this machine; hashes."""

from __future__ import annotations

import hashlib
import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from suite import sbom

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def wheels(tmp_path: Path) -> dict[str, Path]:
    """The wheel of the one distribution of ours that every environment of tests has."""
    path = tmp_path / "lmcore-1.2-py3-none-any.whl"
    path.write_bytes(b"a wheel")
    return {"lmcore": path}


def whole() -> dict[str, Any]:
    """Return a bill of this environment, in the form in which CycloneDX's program writes it."""
    names = {one.metadata["Name"] for one in metadata.distributions()}
    versions = {name: metadata.version(name) for name in names}
    references = {
        canonicalize_name(name): f"{name}=={version}" for name, version in versions.items()
    }
    local = {"type": "distribution", "url": "file:///home/somebody/lmcore"}
    public = {"type": "website", "url": "https://example.org"}
    return {
        "metadata": {"tools": {}},
        "components": [
            {
                "bom-ref": f"{name}=={version}",
                "name": name,
                "version": version,
                "externalReferences": [local, public],
            }
            for name, version in versions.items()
        ],
        "dependencies": [
            {
                "ref": f"{name}=={version}",
                "dependsOn": sorted(
                    references[one]
                    for text in metadata.requires(name) or []
                    if (one := canonicalize_name(Requirement(text).name)) in references
                ),
            }
            for name, version in versions.items()
        ],
    }


def test_it_has_what_the_wheels_need(wheels: dict[str, Path]) -> None:
    """Needs of lmcore are required, needs of its extras optional, and tools of tests absent."""
    found = sbom.bill(whole(), wheels)
    scopes = {canonicalize_name(one["name"]): one["scope"] for one in found["components"]}
    assert scopes["torch"] == scopes["numpy"] == scopes["markupsafe"] == "required"  # of Jinja2
    assert scopes["fastapi"] == scopes["pyarrow"] == "optional"
    assert not {"pytest", "hypothesis", "torchao", "ruff"} & set(scopes)
    references = [one["bom-ref"] for one in found["components"]]
    assert len(references) == len(set(references))
    kept = {*references, "distributions"}
    edges = {one["ref"]: one["dependsOn"] for one in found["dependencies"]}
    assert set(edges) == kept
    assert {ref for refs in edges.values() for ref in refs} <= kept
    assert [ref.partition("==")[0] for ref in edges["distributions"]] == ["lmcore"]


def test_a_distribution_that_is_found_twice_is_listed_once(wheels: dict[str, Path]) -> None:
    """The last one counts, to which the edges lead, under its plain reference."""
    twice = whole()
    (torch,) = (one for one in twice["components"] if one["name"] == "torch")
    twice["components"].append({**torch, "bom-ref": "BomRef.1.2"})
    text = json.dumps(twice["dependencies"])
    twice["dependencies"] = json.loads(text.replace(torch["bom-ref"], "BomRef.1.2"))
    assert sbom.bill(twice, wheels) == sbom.bill(whole(), wheels)


def test_our_wheels_have_hashes_and_others_their_source(wheels: dict[str, Path]) -> None:
    """The index's project of our name is never named, nor a file of this machine."""
    found = sbom.bill(whole(), wheels)
    assert "file:" not in str(found)
    components = {canonicalize_name(one["name"]): one for one in found["components"]}
    digest = hashlib.sha256(b"a wheel").hexdigest()
    assert components["lmcore"]["hashes"] == [{"alg": "SHA-256", "content": digest}]
    assert "purl" not in components["lmcore"]
    numpy = metadata.version("numpy")
    assert components["numpy"]["purl"] == f"pkg:pypi/numpy@{numpy}"
    assert found["metadata"]["component"]["version"] == "1.2"


def test_another_version_than_the_pin_is_refused() -> None:
    """Versions equal the pins; the local part, as of torch's CPU build, does not count."""
    names = [{"name": name, "version": "1.0"} for name in sbom.OURS]
    found = {"components": [*names, {"name": "torch", "version": "2.0+cpu"}]}
    pins = {**dict.fromkeys(sbom.OURS, "1.0"), "torch": "2.0"}
    assert list(sbom.problems(found, pins)) == []
    assert list(sbom.problems(found, {**pins, "torch": "2.1"})) == [
        "torch is 2.0+cpu, and constraints.txt has 2.1"
    ]
    assert list(sbom.problems({"components": names[1:]}, pins)) == ["lmcore is absent"]


def test_ci_installs_tox_by_hashes_of_the_pinned_versions() -> None:
    """Each package of `.ci/tox.txt` has its pinned version and a hash; none is missing."""
    assert "--require-hashes --requirement .ci/tox.txt" in (ROOT / ".ci/run").read_text("utf-8")
    found = hashed(".ci/tox.txt")
    pins = sbom.pinned()
    assert found == {name: pins[name] for name in found}
    if not sbom.is_installed("tox"):
        pytest.skip("tox is not installed")
    assert sbom.needed(["tox"]) == set(found)


def test_every_pinned_package_has_a_hash() -> None:
    """`.ci/packages.txt` has all pins of constraints.txt; SECURITY.md names the exceptions."""
    without = {"torch", "deepspeed"}
    wanted = {
        name: version
        for name, version in sbom.pinned().items()
        if name not in without and not name.startswith("lmcore")
    }
    assert hashed(".ci/packages.txt") == wanted


def hashed(file: str) -> dict[str, str]:
    """Return the versions in a requirements file whose lines have one SHA-256 each."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    rows = [
        re.fullmatch(r"([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
        for line in lines
        if not line.startswith("#")
    ]
    found = {canonicalize_name(row[1]): row[2] for row in rows if row}
    assert len(found) == len(rows)
    return found
