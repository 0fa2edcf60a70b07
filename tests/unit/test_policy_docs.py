"""The page on policies knows every policy, and every field that a plugin fills in."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lmcore.config.section import Config
from lmcore.config.section.accelerator import AcceleratorSection
from lmcore.config.section.checkpoint import CheckpointSection
from lmcore.contract import (
    CheckpointStager,
    PrecisionPolicy,
    RecomputePolicy,
    RngTracker,
    host_copy_stager,
    standard_recompute_policies,
)
from lmcore.plugin import (
    checkpoint_stagers,
    create_device,
    discover,
    precision_policies,
    select,
)

TEXT = (Path(__file__).resolve().parents[2] / "docs/reference/policies.md").read_text("utf-8")
ROWS = set(re.findall(r"^\| `([\w-]+)` \|", TEXT, re.MULTILINE))
WORDS = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", TEXT))))


def test_every_policy_has_its_row() -> None:
    """The tables have every policy of the core and of the CPU's plugin."""
    plugins = discover(env={"LMCORE_PLUGINS": ""})
    selection = select(plugins, env={})
    device = create_device(plugins, selection, Config())
    offered = [
        *precision_policies(plugins, selection, device),
        *standard_recompute_policies(device),
        *checkpoint_stagers(plugins, selection, device),
        host_copy_stager(),
    ]
    missing = {one.name for one in offered} - ROWS
    assert not missing


@pytest.mark.parametrize("record", [PrecisionPolicy, RecomputePolicy, CheckpointStager])
def test_every_field_is_named(record: type) -> None:
    """A field that a plugin fills in is explained, or is in the record's signature."""
    fields = {field.name for field in dataclasses.fields(record)}
    assert fields <= WORDS, fields - WORDS


def test_every_function_of_the_tracker_is_named() -> None:
    """Each function for a block or a device's own tracker is on the page."""
    public = {name for name in vars(RngTracker) if not name.startswith("_")} - {"names", "verify"}
    assert public <= WORDS, public - WORDS


def test_every_flag_is_named() -> None:
    """The options that choose policies are on the page."""
    sections = (AcceleratorSection, CheckpointSection)
    names = {field.name for section in sections for field in dataclasses.fields(section)}
    flags = {name for name in names if name.startswith(("precision", "recompute", "async"))}
    assert len(flags) == 5
    for name in flags:
        assert f"`--{name.replace('_', '-')}" in TEXT
