"""The software bill of materials of the wheels in dist/: `dist/lmcore-VERSION.cdx.json`, CycloneDX.

    sbom.py      describe the environment of this Python, in which the wheels are installed

CycloneDX's own program describes the environment.  What our distributions do not need is left out:
the tools of tests, and the extra `test`.  A component that only another extra needs is optional.
Each component has the version that constraints.txt pins; our wheels have their hashes.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[3]
OURS = (
    *("lmcore", "lmcore-conformance", "lmcore-cuda", "lmcore-data-tools", "lmcore-deepspeed"),
    *("lmcore-serve", "lmcore-xla", "lmcore-xpu"),
)
TESTS = "test"
"""Extra that no user of lmcore installs."""


def described() -> dict[str, Any]:
    """Return the bill of this whole environment."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", sys.executable]
    # Its validation needs twenty more packages.
    options = ["--no-validate", "--output-reproducible", "--output-format", "JSON"]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def needed(names: Iterable[str], *, optional: bool = False) -> set[str]:
    """Return the installed distributions that some need, directly or not, themselves included.

    Args:
        names: Names of distributions.
        optional: True to include what their extras need, tests' excepted.
    """
    found: set[str] = set()
    left = [(name, tuple(extras_of(name)) if optional else ()) for name in names]
    seen = set(left)
    while left:
        name, extras = left.pop()
        found.add(canonicalize_name(name))
        for requirement in requirements(name, extras):
            one = (canonicalize_name(requirement.name), tuple(sorted(requirement.extras)))
            if one not in seen and is_installed(one[0]):
                seen.add(one)
                left.append(one)
    return found


def extras_of(name: str) -> Iterator[str]:
    """Yield the extras of a distribution that its users install."""
    extras = metadata.metadata(name).get_all("Provides-Extra") or []
    yield from (extra for extra in extras if extra != TESTS)


def requirements(name: str, extras: tuple[str, ...]) -> Iterator[Requirement]:
    """Yield what a distribution requires here, alone and with some extras."""
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def is_installed(name: str) -> bool:
    """Return whether a distribution is installed."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def bill(whole: Mapping[str, Any], wheels: Mapping[str, Path]) -> dict[str, Any]:
    """Return the part of an environment's bill that our distributions need.

    Args:
        whole: Bill of the environment.
        wheels: Our wheels, by the canonical name of the distribution.
    """
    required, all_of_them = needed(wheels), needed(wheels, optional=True)
    # A distribution that is on the path twice is described twice; edges lead to the last one.
    named = {canonicalize_name(one["name"]): one for one in whole["components"]}
    kept = [one for name, one in named.items() if name in all_of_them]
    references = {one["bom-ref"]: f"{one['name']}=={one['version']}" for one in kept}
    components = [component(one, wheels, required) for one in kept]
    edges = [
        {
            "ref": references[one["ref"]],
            "dependsOn": [references[ref] for ref in one.get("dependsOn", []) if ref in references],
        }
        for one in whole["dependencies"]
        if one["ref"] in references
    ]
    version = parse_wheel_filename(wheels["lmcore"].name)[1]
    root = {"type": "application", "bom-ref": "distributions", "name": "lmcore and its plugins"}
    ours = [references[named[name]["bom-ref"]] for name in wheels]
    edges.append({"ref": root["bom-ref"], "dependsOn": ours})
    return {
        **whole,
        "metadata": {**whole["metadata"], "component": {**root, "version": str(version)}},
        "components": components,
        "dependencies": edges,
    }


def component(
    one: Mapping[str, Any], wheels: Mapping[str, Path], required: set[str]
) -> dict[str, Any]:
    """Return a component with its scope and hash, without addresses of files of this machine."""
    name = canonicalize_name(one["name"])
    addresses = [
        at for at in one.get("externalReferences", []) if not at["url"].startswith("file:")
    ]
    reference = f"{one['name']}=={one['version']}"
    made = {**one, "bom-ref": reference, "externalReferences": addresses}
    made["scope"] = "required" if name in required else "optional"
    if name in wheels:
        digest = hashlib.sha256(wheels[name].read_bytes()).hexdigest()
        made["hashes"] = [{"alg": "SHA-256", "content": digest}]
        made.pop("purl", None)  # the index's project of this name is somebody else's
    else:
        made.setdefault("purl", f"pkg:pypi/{name}@{one['version'].replace('+', '%2B')}")
    return made


def problems(found: Mapping[str, Any], pins: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with a bill: absent distributions, versions that are not the pins."""
    versions = {canonicalize_name(one["name"]): one["version"] for one in found["components"]}
    yield from (f"{name} is absent" for name in OURS if name not in versions)
    for name, version in versions.items():
        if pins.get(name) != version.partition("+")[0]:
            yield f"{name} is {version}, and constraints.txt has {pins.get(name)}"


def pinned() -> dict[str, str]:
    """Return the versions in constraints.txt, by canonical name."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    rows = re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in rows}


def main() -> None:
    """Write the bill of the wheels in dist/."""
    paths = sorted((ROOT / "dist").glob("*.whl"))
    found = {str(parse_wheel_filename(path.name)[0]): path for path in paths}
    made = bill(described(), {name: found[name] for name in OURS})
    wrong = list(problems(made, pinned()))
    if wrong:
        sys.exit("\n".join(["error: the bill of materials is wrong:", *wrong]))
    path = ROOT / "dist" / f"lmcore-{made['metadata']['component']['version']}.cdx.json"
    path.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(made['components'])} components")


if __name__ == "__main__":
    main()
