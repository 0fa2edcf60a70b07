"""`examples/serve`: the unit and the container start the server, agree, and take rights away."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcore.config.options.command_line import parse_section
from lmcore_serve.command.serve import ServeSection
from lmcore_serve.server import is_loopback

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples/serve"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
PROGRAM = ["/opt/lmcore/bin/lmcore", "serve"]
MODEL = "/srv/lmcore/model"
TASKS = 512
CREDENTIALS = "/run/credentials/lmcore-serve.service"


def settings(text: str) -> dict[str, list[str]]:
    """Return the values of each key in the text of a unit."""
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the container file and their arguments, in order."""
    text = (FOLDER / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(r"^([A-Z]+) (.*)$", text, re.MULTILINE)


def last(name: str) -> str:
    """Return the argument of the last instruction of a name."""
    return [value for found, value in instructions() if found == name][-1]


def parsed(words: list[str]) -> ServeSection:
    """Return the options of a command line of the server."""
    assert words[: len(PROGRAM)] == PROGRAM
    return parse_section(ServeSection, words[len(PROGRAM) :], command="lmcore serve")


@pytest.fixture(scope="module")
def unit() -> dict[str, list[str]]:
    """The settings of the unit."""
    return settings((FOLDER / "lmcore-serve.service").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def container() -> dict[str, Any]:
    """The service of the compose file."""
    text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)["services"]["lmcore-serve"]
    return found


def test_the_unit_starts_the_server(unit: dict[str, list[str]]) -> None:
    """Its command is valid, listens on the loopback address and has time to end."""
    section = parsed(shlex.split(unit["ExecStart"][0]))
    assert (section.load, section.port) == (MODEL, 5000)
    assert is_loopback(section.host)
    assert unit["IPAddressDeny"] == ["any"]
    assert unit["IPAddressAllow"] == ["localhost"]
    assert int(unit["TimeoutStopSec"][0]) >= section.shutdown_timeout + 15
    assert int(unit["LimitNOFILE"][0]) >= section.max_connections + 256
    for path in unit["ReadOnlyPaths"][0].split():
        assert PROGRAM[0].startswith(path) or MODEL.startswith(path)


def test_the_unit_takes_rights_away(unit: dict[str, list[str]]) -> None:
    """It runs as another user than root, without capabilities, and is bounded."""
    assert unit["User"] == ["lmcore"]
    assert unit["CapabilityBoundingSet"] == unit["AmbientCapabilities"] == [""]
    assert unit["ProtectSystem"] == ["strict"]
    assert unit["DynamicUser"] == unit["NoNewPrivileges"] == unit["PrivateTmp"] == ["yes"]
    assert unit["MemoryMax"] == ["16G"]
    assert unit["TasksMax"] == [str(TASKS)]
    assert not unit.keys() & {"ReadWritePaths", "StateDirectory", "CacheDirectory"}


def test_the_image_starts_the_server() -> None:
    """Its command is valid, and without further words listens on the loopback address."""
    section = parsed([*json.loads(last("ENTRYPOINT")), *json.loads(last("CMD"))])
    assert (section.load, section.port) == (MODEL, int(last("EXPOSE")))
    assert is_loopback(section.host)
    assert last("USER") == "10001:10001"
    sources = [value.split()[:-1] for name, value in instructions() if name == "COPY"]
    copied = [path for paths in sources for path in paths if "=" not in path and path[0] != "/"]
    assert copied
    assert all((ROOT / path).exists() for path in copied)


def test_the_container_is_bounded(container: dict[str, Any], unit: dict[str, list[str]]) -> None:
    """It is as bounded as the unit, and its port is published to this machine only."""
    section = parsed([*json.loads(last("ENTRYPOINT")), *container["command"]])
    assert section.allowed_host == ("localhost",)
    assert container["ports"] == [f"127.0.0.1:{section.port}:{section.port}"]
    (volume,) = container["volumes"]
    assert volume.endswith(f":{section.load}:ro")
    build = container["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).samefile(FOLDER / "Containerfile")
    assert container["user"] == last("USER")
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert container["mem_limit"] == container["memswap_limit"] == unit["MemoryMax"][0].lower()
    assert container["pids_limit"] == TASKS
    assert "privileged" not in container
    assert "cap_add" not in container


def test_the_port_is_published_with_keys() -> None:
    """Both documented ways to publish the port are valid, and ask for keys."""
    (drop_in,) = re.findall(r"^```ini\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    found = settings(drop_in)
    assert found["ExecStart"][0] == ""
    # systemd puts a directory in place of the variable.
    command = found["ExecStart"][1].replace("${CREDENTIALS_DIRECTORY}", CREDENTIALS)
    section = parsed(shlex.split(command))
    assert (section.load, section.host) == (MODEL, "0.0.0.0")
    name = found["LoadCredential"][0].partition(":")[0]
    assert section.api_key_file == f"{CREDENTIALS}/{name}"
    assert found["IPAddressAllow"] == ["any"]

    (override,) = re.findall(r"^```yaml\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    changed = yaml.safe_load(override.replace("!override ", ""))["services"]["lmcore-serve"]
    section = parsed([*json.loads(last("ENTRYPOINT")), *changed["command"]])
    assert changed["ports"] == [f"{section.port}:{section.port}"]
    (volume,) = changed["volumes"]
    assert volume.endswith(f":{section.api_key_file}:ro")
